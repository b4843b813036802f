"""A real server with the default model, and the official client of it."""

import os
import subprocess

import openai
import pytest


@pytest.fixture(scope="session")
def address():
    """The address of a server that lives as long as the tests."""
    command = [os.environ["TAPER"], "serve", "--port", "0", "--kv-memory", "512MiB"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        greeting = server.stdout.readline()
        assert "http://" in greeting, greeting
        yield "http://" + greeting.strip().rpartition("http://")[2]
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0, "the server drains and ends with success"


@pytest.fixture(scope="session")
def client(address):
    return openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
