#!/usr/bin/env python3
"""Clients that behave badly, against a real server: many at once, slow readers, half-open sockets, bodies cut short, clients
that vanish, kill -9. Prints a table and fails unless the server stays up, its memory bounded, and nobody waits past a deadline.

    bench/robustness.py --taper target/release/taper

Needs nothing but Python 3.11 or later and Linux; all of it is on loopback.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import time
import urllib.request

HEAD_SECONDS = BODY_SECONDS = 5
DEADLINE = 60


class Server:
    def __init__(self, taper, port=0):
        command = [taper, "serve", "--port", str(port), "--kv-memory", "512MiB", "--queue", "256"]
        command += ["--header-seconds", str(HEAD_SECONDS), "--body-seconds", str(BODY_SECONDS), "--request-seconds", str(DEADLINE)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        greeting = self.process.stdout.readline()
        self.port = int(greeting.strip().rpartition(":")[2])

    def mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) // 1024

    def sockets(self):
        return sum(os.readlink(f.path).startswith("socket:") for f in os.scandir(f"/proc/{self.process.pid}/fd"))

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read()

    def load(self):
        return json.loads(self.get("/ready"))


def request(body, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: taper\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data


def chat(tokens, **more):
    messages = [{"role": "user", "content": "Tell me a story."}]
    return request({"messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True, **more})


async def ask(server, data):
    """Status, seconds, and the whole answer."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return int(answer[9:12] or 0), time.monotonic() - began, answer


async def wait(what, until, seconds=30):
    began = time.monotonic()
    while not until():
        assert time.monotonic() - began < seconds, f"in vain for {seconds} s: {what}"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def probes(server, seen, stop):
    """How long /health takes meanwhile."""
    while not stop.is_set():
        _, seconds, answer = await ask(server, b"GET /health HTTP/1.1\r\nHost: taper\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer[:80]
        seen.append(seconds)
        await asyncio.sleep(0.1)


async def crowd(server, count):
    answers = await asyncio.gather(*(ask(server, chat(8)) for _ in range(count)))
    taken = [a for a in answers if a[0] == 200]
    late = [a for a in answers if a[0] == 504]
    refused = [a for a in answers if a[0] == 503]
    assert len(taken) + len(late) + len(refused) == count, {a[0] for a in answers}
    assert all(a[2].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for a in taken)
    assert all(b"retry-after:" in a[2].lower() for a in refused)
    slowest = max(a[1] for a in answers)
    assert slowest < DEADLINE + 5, slowest
    return f"{len(taken)} answered, {len(refused)} refused at once with Retry-After, {len(late)} late; the slowest {slowest:.1f} s"


async def slow(server, count):
    """They take in a byte now and then; somebody else asks beside them."""
    alone = (await ask(server, chat(16)))[1]
    readers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.get_extra_info("socket").setsockopt(1, 8, 1024)
        # More than the sockets' buffers take.
        writer.write(chat(128, logprobs=True, top_logprobs=20))
        readers.append((reader, writer))
    await asyncio.sleep(2)
    first = [await reader.read(1) for reader, _ in readers]
    # Their answers end although nobody has read them.
    ended = await wait("answers of slow readers", lambda: server.load()["running"] == 0, DEADLINE)
    status, beside, _ = await ask(server, chat(16))
    assert status == 200 and all(first)
    for _, writer in readers:
        writer.close()
    return f"answers made {ended:.1f} s later though none is read; another client then {beside:.1f} s, alone {alone:.1f}"


async def half(server, count):
    parts = [b"", b"POST /v1/chat/comp", chat(4)[:-20], b"GET /health HTTP/1.1\r\nX: "]
    began = time.monotonic()
    opened = []
    for i in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(parts[i % len(parts)])
        opened.append((reader, writer))
    answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), HEAD_SECONDS + BODY_SECONDS + 10)
    seconds = time.monotonic() - began
    for _, writer in opened:
        writer.close()
    timeouts = sum(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    return f"all let go after {seconds:.1f} s, {timeouts} of them with a 408"


async def cut(server, count):
    """Bodies that end before they should."""

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(chat(4)[:-20])
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    answers = await asyncio.gather(*(one() for _ in range(count)))
    assert not any(answer.startswith(b"HTTP/1.1 5") for answer in answers), answers[0]
    return f"{sum(answer.startswith(b'HTTP/1.1 4') for answer in answers)} told so, the others closed"


async def vanish(server, count):
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(chat(4000))
        await reader.read(100)
        # No farewell: a reset.
        writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
    seconds = await wait("their work to end", lambda: (load := server.load())["running"] == 0 and load["waiting"] == 0)
    return f"{count} answers of 4,000 tokens given up {seconds:.1f} s after the last left"


async def deadlines(server, count):
    answers = await asyncio.gather(*(ask(server, chat(4000, timeout=3)) for _ in range(count)))
    slowest = max(a[1] for a in answers)
    assert slowest < 3 + 3, slowest
    return f"the slowest of timeout 3 s ended after {slowest:.1f} s"


async def killed(server, taper):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(chat(4000))
    await reader.read(200)
    began = time.monotonic()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    try:
        await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        pass
    port, server.process = server.port, Server(taper, server.port).process
    server.port = port
    status, _, _ = await ask(server, chat(4))
    assert status == 200
    return f"on the same port again, and answering, {time.monotonic() - began:.1f} s later"


async def run(args):
    server = Server(args.taper)
    await ask(server, chat(8))
    least = server.mib()
    print(f"| what | clients | outcome | /health meanwhile, slowest | MiB after (idle {least}) |\n| --- | --- | --- | --- | --- |")
    try:
        for name, what, count in [
            ("streams at once", crowd, args.crowd), ("slow readers", slow, 50), ("half-open sockets", half, 400),
            ("bodies cut short", cut, 200), ("clients that vanish", vanish, 100), ("deadlines", deadlines, 32),
            ("streams at once, again", crowd, args.crowd),
        ]:
            seen, stop = [], asyncio.Event()
            watch = asyncio.create_task(probes(server, seen, stop))
            outcome = await what(server, count)
            stop.set()
            await watch
            await wait("sockets to close", lambda: server.sockets() < 20)
            print(f"| {name} | {count:,} | {outcome} | {max(seen) * 1e3:.0f} ms | {server.mib()} |", flush=True)
        # What one crowd needs the next one uses again.
        assert server.mib() < least + 300, f"{server.mib()} MiB, {least} at first"
        print(f"| kill -9 in a stream, and a new start | 1 | {await killed(server, args.taper)} | | |")
        server.process.terminate()
        assert server.process.wait(30) == 0
    finally:
        server.process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taper", default="target/release/taper")
    parser.add_argument("--crowd", type=int, default=1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    asyncio.run(run(parser.parse_args()))
