"""The server under test and the clients' side of connections to it, for robustness.py."""

import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import time

# What the server is told, in seconds, and what is allowed on top where clients, server and builds share few cores.
HEAD, BODY, WRITE, DEADLINE = 5, 5, 30, 60
SLACK = 5
# /health may take so long whatever goes on.
HEALTH = 5
# No scenario may bring the server over its memory at rest by more than the KV cache, the bodies that may be on their way together
# (sixteen of 16 MiB), and this.
KV_MIB, BODIES_MIB, MORE_MIB = 512, 256, 256
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nHost: taper\r\n\r\n"
LAST_HEALTH_REQUEST = HEALTH_REQUEST[:-2] + b"Connection: close\r\n\r\n"
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
CATALOGUE = b"GET /v1/attention/methods HTTP/1.1\r\nHost: taper\r\n\r\n"


class Server:
    def __init__(self, taper, *options, port=0, files=None):
        command = [taper, "serve", "--port", str(port), "--kv-memory", f"{KV_MIB}MiB", "--queue", "256"]
        command += ["--header-seconds", str(HEAD), "--body-seconds", str(BODY), "--write-seconds", str(WRITE), "--request-seconds", str(DEADLINE), *options]
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, preexec_fn=limit, env=os.environ | {"RUST_LOG": "off"}, **pipes)
        self.port = int(self.process.stdout.readline().strip().rpartition(":")[2])

    def mib(self, field):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field)) // 1024

    def forget_peak(self):
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")

    def cpu(self):
        """Seconds of processor time so far."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            return sum(map(int, stat.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def unread(self):
        """Bytes that wait in the system's buffers until a client takes them, by connection that the server has not closed."""
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in list(table)[1:]]
        own = [row for row in rows if int(row[1].split(":")[1], 16) == self.port and row[3] == "01"]
        return [size for row in own if (size := int(row[4].split(":")[0], 16))]

    async def get(self, path):
        status, _, answer = await ask(self, b"GET %s HTTP/1.1\r\nHost: taper\r\nConnection: close\r\n\r\n" % path.encode())
        assert status == 200, answer[:200]
        return answer.partition(b"\r\n\r\n")[2].decode()

    async def load(self):
        return json.loads(await self.get("/ready"))

    async def blocks_held(self):
        """Share of the KV cache's blocks that requests hold."""
        lines = (await self.get("/metrics")).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))

    async def free(self, what, seconds=10):
        """Waits until nothing runs or waits and every block is free; how long that took."""

        async def so():
            load = await self.load()
            return load["running"] == load["waiting"] == 0 and await self.blocks_held() == 0

        return await until(what, so, seconds)

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


def post(body, more=b"Connection: close\r\n"):
    data = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: taper\r\n%sContent-Length: %d\r\n\r\n" % (more, len(data)) + data


def chat(tokens, text="Tell me a story.", head=b"Connection: close\r\n", **more):
    messages = [{"role": "user", "content": text}]
    return post({"messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True, **more}, head)


def long_text(seed, words):
    """No beginning in common with another seed's."""
    draw = random.Random(seed)
    return " ".join(draw.choice(["river", "stone", "window", "engine", "seven", "paper", "cold", "light"]) for _ in range(words))


async def connect(server, tls=None):
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=tls, limit=1 << 20)


async def ask(server, data, tls=None):
    """Status, seconds, and the whole answer."""
    began = time.monotonic()
    reader, writer = await connect(server, tls)
    try:
        writer.write(data)
        answer = await reader.read()
    finally:
        writer.close()
    return int(answer[9:12] or 0), time.monotonic() - began, answer


async def until(what, so, seconds):
    """Waits until something is so, at most so long; how long it took."""
    began = time.monotonic()
    while not await so():
        assert time.monotonic() - began < seconds, f"in vain for {seconds} s: {what}"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def closed(reader, began, most, what):
    """What a connection still said, and after how long the server closed it."""
    try:
        said = await asyncio.wait_for(reader.read(), most - (time.monotonic() - began))
    except ConnectionError:
        said = b""
    except TimeoutError:
        raise AssertionError(f"{what}: still open after {most} s") from None
    return said, time.monotonic() - began


def reset(writer):
    """No farewell."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def narrow(server):
    """A socket that has room for little."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", server.port))
    one.setblocking(False)
    return one
