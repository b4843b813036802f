"""A real server with the default model, for as long as a test needs it."""

import contextlib
import os
import subprocess


@contextlib.contextmanager
def serving(*options, **environment):
    """Starts the binary that the environment's TAPER names; gives its address."""
    command = [os.environ["TAPER"], "serve", "--port", "0", "--kv-memory", "512MiB", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        greeting = server.stdout.readline()
        assert "http://" in greeting, greeting
        yield "http://" + greeting.strip().rpartition("http://")[2]
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0, "the server drains and ends with success"
