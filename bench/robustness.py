#!/usr/bin/env python3
"""Clients that behave badly, against a real server: crowds, slow readers, sockets that stay silent, clients that vanish, kill -9.

    bench/robustness.py --taper target/release/taper [--only NAME]

Each scenario is a row of the table that it prints, with what the server let itself be brought to; one that does not hold is
marked, and the exit status is then 1. Needs nothing but Python 3.11 or later, Linux and openssl; all of it is on loopback.
"""

import argparse
import asyncio
import os
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import traceback

from faults import BODIES_MIB, BODY, DEADLINE, HEAD, HEALTH, KV_MIB, MORE_MIB, SLACK, WRITE
from faults import CATALOGUE, HEALTH_REQUEST, LAST_HEALTH_REQUEST, STREAM_END
from faults import Server, ask, chat, closed, connect, long_text, narrow, post, reset, until


async def crowd(server, count):
    answers = await asyncio.gather(*(ask(server, chat(8)) for _ in range(count)))
    # One that waits for more than ten seconds has its status by then, and hears of its deadline in the stream.
    late = [a for a in answers if a[0] == 504 or (a[0] == 200 and b"deadline" in a[2])]
    taken = [a for a in answers if a[0] == 200 and b"deadline" not in a[2]]
    refused = [a for a in answers if a[0] == 503]
    assert len(taken) + len(late) + len(refused) == count, {a[0] for a in answers}
    assert len(taken) + len(late) >= 256, f"{len(refused)} refused of {count}, beside a queue of 256"
    broken = [a[2][-200:] for a in taken if not a[2].endswith(STREAM_END) or a[2].count(b'"finish_reason":"length"') != 1]
    assert not broken, f"{len(broken)} of {len(taken)} are no whole answers: {broken[0]}"
    assert all(b"retry-after:" in a[2].lower() for a in refused)
    slowest = max(a[1] for a in answers)
    assert slowest < DEADLINE + SLACK, slowest
    return f"{len(taken)} answered, {len(refused)} refused with Retry-After, {len(late)} late; the slowest {slowest:.1f} s"


async def slow(server, count):
    """Nobody reads until somebody else was answered; then all do, a little at a time. Answers are streams, and every fifth
    more than the system's buffers hold: there the server has to wait."""
    loop = asyncio.get_running_loop()
    alone = (await ask(server, chat(16)))[1]
    readers, catalogues = [narrow(server) for _ in range(count)], 60
    for i, one in enumerate(readers):
        last = CATALOGUE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        data = chat(32, logprobs=True, top_logprobs=20) if i % 5 else CATALOGUE * (catalogues - 1) + last
        await loop.sock_sendall(one, data)
    began = time.monotonic()

    async def made():
        return (await server.load())["running"] == 0

    await asyncio.sleep(1)
    # Who took nothing for longer would be let go.
    await until("answers made that nobody reads", made, WRITE - SLACK)
    took, unread = time.monotonic() - began, server.unread()
    assert len(unread) >= count // 5, unread
    status, beside, _ = await ask(server, chat(16))
    assert status == 200 and beside < alone + SLACK, f"{beside:.1f} s beside them, {alone:.1f} alone"

    async def read(i, one):
        answer = b""
        with one:
            while part := await loop.sock_recv(one, 4096):
                answer += part
        if i % 5:
            assert answer.endswith(STREAM_END) and answer.count(b'"finish_reason":"length"') == 1, answer[-200:]
        else:
            assert answer.count(b"HTTP/1.1 200") == catalogues, answer[-200:]
        return len(answer)

    sizes = await asyncio.wait_for(asyncio.gather(*(read(i, one) for i, one in enumerate(readers))), DEADLINE)
    return (
        f"answers made after {1 + took:.1f} s though none is read; another client then {beside:.1f} s (alone {alone:.1f}); "
        f"then all came whole, {min(sizes) / 1024:.0f} KiB to {max(sizes) / 2**20:.1f} MiB"
    )


async def never(server, count):
    """Read nothing ever: a stream with a deadline, more of it than the system's buffers take, and pipelines of requests."""
    loop, seconds = asyncio.get_running_loop(), 20
    readers = [narrow(server) for _ in range(count)]
    began = time.monotonic()
    for i, one in enumerate(readers):
        data = CATALOGUE * 400 if i else chat(1000, n=16, temperature=1, logprobs=True, top_logprobs=20, timeout=seconds)
        try:
            await asyncio.wait_for(loop.sock_sendall(one, data), 1)
        except TimeoutError:
            pass  # It takes no more requests than it can answer: so it should.

    most = seconds + WRITE + SLACK

    async def let_go():
        return not server.unread()

    try:
        await until("their work to end", lambda: asyncio.sleep(0, len(server.unread()) >= count), most)
        freed = await server.free("the blocks of an answer that nobody reads", most)
        try:
            await until("connections closed", let_go, most - (time.monotonic() - began))
        except AssertionError:
            left = server.unread()
            message = f"blocks free, but {len(left)} of {count} connections still open {time.monotonic() - began - seconds:.0f} s"
            raise AssertionError(f"{message} after the deadline, {sum(left) / 2**20:.0f} MiB in the system's buffers") from None
        return f"blocks free {freed:.1f} s after the last, all let go after {time.monotonic() - began:.1f}"
    finally:
        for one in readers:
            one.close()


async def silent(server, count):
    """Connections that stop at some place of a request and stay open."""
    places = {
        "at once": (b"", HEAD),
        "in the first line": (b"POST /v1/chat/comp", HEAD),
        "in a header": (HEALTH_REQUEST[:-6] + b"X: ", HEAD),
        "in the body": (chat(4)[:-20], BODY),
    }

    async def one(place):
        data, most = places[place]
        began = time.monotonic()
        reader, writer = await connect(server)
        writer.write(data)
        said, seconds = await closed(reader, began, most + SLACK, f"silent {place}")
        writer.close()
        assert seconds > most - 1, f"silent {place}: closed after {seconds:.1f} s already"
        assert (said[9:12] == b"408") == (place == "in the body"), said[:100]
        return seconds

    took = await asyncio.gather(*(one(place) for place in places for _ in range(count // len(places))))
    return f"silent {', '.join(places)}: closed after {min(took):.1f} to {max(took):.1f} s, bodies with a 408"


async def drip(server, count):
    """Always sending, a byte at a time, and never done."""

    async def one(data, start, most):
        began = time.monotonic()
        reader, writer = await connect(server)
        writer.write(data[:start])
        reading = asyncio.create_task(closed(reader, began, most + SLACK, "a byte at a time"))
        for at in range(start, len(data)):
            await asyncio.wait([reading], timeout=0.5)
            if reading.done():
                break
            writer.write(data[at : at + 1])
        said, seconds = await reading
        writer.close()
        return said, seconds

    head = b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 1000
    body = chat(4)
    answers = await asyncio.gather(
        *(one(head, 5, HEAD) for _ in range(count // 2)), *(one(body, body.index(b"{") + 1, BODY) for _ in range(count // 2))
    )
    told = sum(said.startswith(b"HTTP/1.1 408") for said, _ in answers)
    assert told == count // 2, f"{told} of {count // 2} bodies were told"
    slowest = max(a[1] for a in answers)
    return f"a byte every 0.5 s, of heads and of bodies: closed after {slowest:.1f} s at the latest, bodies with a 408"


async def cut(server, count):
    """Requests that end before they should, or say what cannot be."""
    whole = chat(4)
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: taper\r\nTransfer-Encoding: chunked\r\n\r\n"
    nothing, bad = b"", b"400"
    kinds = [
        # What is sent, whether the client says that no more comes, and what it may be told.
        (whole[:-20], True, bad),
        (whole[:40], True, nothing),
        (chunked + b'40\r\n{"mess', True, bad),
        (chunked + b"zz\r\n{}\r\n", False, bad),
        (whole[:-1] + b"\0", False, bad),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", False, bad),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 2_000_000 + b"\r\n\r\n", False, b"431"),
    ]

    async def one(i):
        data, ends, wanted = kinds[i % len(kinds)]
        began = time.monotonic()
        reader, writer = await connect(server)
        writer.write(data)
        if ends:
            writer.write_eof()
        said, seconds = await closed(reader, began, SLACK, f"cut {i % len(kinds)}")
        writer.close()
        # A head that is too long may be refused before all of it is taken: a reset then overtakes the answer.
        assert said[9:12] == wanted or (wanted == b"431" and not said), (data[:60], said[:100])
        return bool(said), seconds

    answers = await asyncio.gather(*(one(i) for i in range(count)))
    assert await server.free("what was cut short") < 5
    slowest = max(a[1] for a in answers)
    return f"{sum(a[0] for a in answers)} told so, the others closed, {slowest:.1f} s at the latest; nothing of them runs on"


async def heavy(server, count):
    """Large bodies of which the last byte does not come."""
    data = post({"messages": [{"role": "user", "content": "x" * (15 << 20)}]})[:-1]

    async def one():
        began = time.monotonic()
        reader, writer = await connect(server)
        writer.write(data)
        said, seconds = await closed(reader, began, BODY + 2 * SLACK, "a large body")
        writer.close()
        return said[9:12], seconds

    answers = await asyncio.gather(*(one() for _ in range(count)))
    statuses = sorted({a[0].decode() or "none" for a in answers})
    return f"15 MiB each, and no end: told {', '.join(statuses)}, {max(a[1] for a in answers):.1f} s at the latest"


async def too_long(server, count):
    """Prompts of which a few would keep every core busy for a minute, if they were read to their ends."""
    alone = (await ask(server, chat(16)))[1]
    data = post({"messages": [{"role": "user", "content": "a word " * (2 << 20)}]})
    asked = [asyncio.create_task(ask(server, data)) for _ in range(count)]
    await asyncio.sleep(0.2)
    status, beside, _ = await ask(server, chat(16))
    assert status == 200 and beside < alone + SLACK, f"{beside:.1f} s beside them, {alone:.1f} alone"
    answers = await asyncio.gather(*asked)
    told = [a for a in answers if a[0] == 400 and b"context" in a[2]]
    assert len(told) == count, {a[0] for a in answers}
    slowest = max(a[1] for a in answers)
    assert slowest < 2 * SLACK, slowest
    return f"14 MiB each: refused after {slowest:.1f} s at the latest; another client then {beside:.1f} s (alone {alone:.1f})"


async def pipelined(server, count):
    """Requests one behind the other without waiting for answers, which must come in that order."""

    async def one(seed):
        reader, writer = await connect(server)
        lengths = [3, 1, 2]
        data = b"".join(HEALTH_REQUEST + chat(n, head=b"", stream=False) for n in lengths)
        writer.write(data + LAST_HEALTH_REQUEST)
        answer = await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == 7, answer[:300]
        found = [int(part.split(b",")[0].strip(b"} ")) for part in answer.split(b'"completion_tokens":')[1:]]
        assert found == lengths, found

    began = time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    return f"7 requests in one write, answered in their order, {time.monotonic() - began:.1f} s in all"


async def keep_alive(server, count):
    """Connections that were used once and then stay idle."""

    async def one():
        reader, writer = await connect(server)
        writer.write(HEALTH_REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        _, seconds = await closed(reader, time.monotonic(), HEAD + SLACK, "idle")
        writer.close()
        assert seconds > HEAD - 1, seconds
        return seconds

    took = await asyncio.gather(*(one() for _ in range(count)))
    return f"answered, then closed after {min(took):.1f} to {max(took):.1f} s of idleness"


async def leave_in_prefill(server, count):
    """Leave, half of them with a farewell, while their prompts are computed or wait for it."""
    opened = []
    for i in range(count):
        reader, writer = await connect(server)
        writer.write(chat(100, long_text(i, 4000)))
        opened.append((reader, writer))

    async def underway():
        load = await server.load()
        return load["running"] + load["waiting"] == count and await server.blocks_held() > 0

    await until(f"{count} requests to be taken", underway, DEADLINE)
    held = await server.blocks_held()
    for i, (reader, writer) in enumerate(opened):
        assert not reader._buffer, "nobody was answered yet"
        writer.close() if i % 2 else reset(writer)
    seconds = await server.free("their work to end", 5 + SLACK)
    return f"{held:.0%} of the blocks held as they left, mid-prompt; all free {seconds:.1f} s after"


async def leave_in_decode(server, count):
    opened = []
    for i in range(count):
        reader, writer = await connect(server)
        writer.write(chat(4000))
        opened.append((reader, writer))
    for reader, _ in opened[:64]:
        await reader.readuntil(b'"content":"')
    load, held = await server.load(), await server.blocks_held()
    assert load["running"] == min(64, count) and held > 0, load
    for i, (_, writer) in enumerate(opened):
        writer.close() if i % 2 else reset(writer)
    seconds = await server.free("their work to end", 5 + SLACK)
    so = f"{load['running']} in decode, {load['waiting']} waiting, {held:.0%} of the blocks held as they left"
    return f"{so}; all free {seconds:.1f} s after"


async def deadlines(server, count):
    answers = await asyncio.gather(*(ask(server, chat(4000, timeout=3)) for _ in range(count)))
    slowest, quickest = max(a[1] for a in answers), min(a[1] for a in answers)
    assert 2.5 < quickest and slowest < 3 + SLACK, (quickest, slowest)
    assert all(a[0] == 504 or b"deadline" in a[2] for a in answers), answers[0][2][-200:]
    await server.free("late requests to end")
    return f"answers of 4,000 tokens with a timeout of 3 s told of it after {quickest:.1f} to {slowest:.1f} s"


async def out_of_files(taper, count):
    """More connections than the server may open files: it serves those that it has, does not spin, and takes others later."""
    server = Server(taper, files=256)
    try:
        await ask(server, chat(4))
        reader, writer = await connect(server)
        stop = asyncio.Event()

        async def old():
            """A connection that was there before, and how long it waits for an answer at most."""
            longest = 0
            while not stop.is_set():
                began = time.monotonic()
                writer.write(HEALTH_REQUEST)
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEALTH)
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.5)
            return longest

        before = asyncio.create_task(old())
        stream = asyncio.create_task(ask(server, chat(64)))
        await asyncio.sleep(0.3)
        came = time.monotonic()
        crowd = [await connect(server) for _ in range(count)]
        behind = asyncio.create_task(ask(server, LAST_HEALTH_REQUEST))
        await stream
        assert stream.result()[2].endswith(STREAM_END)
        # Connections that say nothing would be let go, and their places taken by the next ones.
        most, cpu, began = server.files(), server.cpu(), time.monotonic()
        while time.monotonic() - began < 3:
            most = max(most, server.files())
            await asyncio.sleep(0.05)
        share = (server.cpu() - cpu) / (time.monotonic() - began)
        assert most >= 255, f"only {most} files are open: nothing is shown"
        assert share < 0.25, f"{share:.0%} of a core while it can accept nobody"
        most_wait = count / 256 * (HEAD + SLACK)
        status, _, _ = await asyncio.wait_for(behind, most_wait - (time.monotonic() - came))
        waited = time.monotonic() - came
        assert status == 200
        stop.set()
        longest = await before
        for other in (writer, *(other for _, other in crowd)):
            other.close()
        after = await until("files to be closed", lambda: asyncio.sleep(0, server.files() < 40), HEAD + SLACK)
        status, again, _ = await ask(server, chat(4))
        assert status == 200
        return (
            f"{most} files open of 256; {share:.0%} of a core meanwhile; a stream and a connection from before are served "
            f"({longest * 1e3:.0f} ms at most); the one behind them is served {waited:.1f} s after they came; all gone, "
            f"files are closed {after:.1f} s later, and an answer takes {again:.1f} s"
        )
    finally:
        server.stop()


async def tls(taper, count):
    """Connections that do not finish a handshake, beside clients that do."""
    with tempfile.TemporaryDirectory() as folder:
        make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout {folder}/key"
        subprocess.run([*make.split(), "-out", folder + "/cert"], check=True, stderr=subprocess.DEVNULL)
        server = Server(taper, "--tls-cert", folder + "/cert", "--tls-key", folder + "/key")
        try:
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            hello = ssl.MemoryBIO()
            talk = trusting.wrap_bio(ssl.MemoryBIO(), hello)
            try:
                talk.do_handshake()
            except ssl.SSLWantReadError:
                pass
            parts = [b"", (said := hello.read())[:50], said]

            async def one(i):
                began = time.monotonic()
                reader, writer = await connect(server)
                writer.write(parts[i % 3])
                _, seconds = await closed(reader, began, HEAD + SLACK, f"a handshake left after part {i % 3}")
                writer.close()
                return seconds

            hanging = asyncio.gather(*(one(i) for i in range(count)))
            await asyncio.sleep(1)
            status, beside, _ = await ask(server, chat(8), trusting)
            assert status == 200
            took = await hanging
            assert min(took) > HEAD - 1, took
            so = f"nothing, half a hello, a hello and no more: closed after {min(took):.1f} to {max(took):.1f} s"
            return f"{so}; another's answer beside them takes {beside:.1f} s"
        finally:
            server.stop()


async def stopped(taper, count):
    """SIGTERM while connections idle, hang, and take nothing of their answers: it ends all the same."""
    server = Server(taper)
    loop = asyncio.get_running_loop()
    readers = [narrow(server) for _ in range(count)]
    for i, one in enumerate(readers):
        data = [b"", HEALTH_REQUEST, chat(4)[:-20], CATALOGUE * 400][i % 4]
        await loop.sock_sendall(one, data)
    reader, writer = await connect(server)
    writer.write(chat(50))
    await reader.readuntil(b'"content":"')
    stopping = asyncio.create_task(asyncio.to_thread(server.stop))
    rest = await reader.read()
    began = time.monotonic()
    code = await stopping
    seconds = time.monotonic() - began
    for one in readers:
        one.close()
    assert code == 0 and rest.endswith(STREAM_END), (code, rest[-100:])
    # The ten seconds that clients have to read the rest of their answers.
    assert seconds < 10 + SLACK, seconds
    return f"a stream answered to its end, the server gone {seconds:.1f} s after that"


async def killed(taper, _):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        options = ["--kv-offload", "64MiB", "--kv-offload-dir", folder]
        server = Server(taper, *options)
        try:
            reader, writer = await connect(server)
            writer.write(chat(4000))
            await reader.readuntil(b'"content":"')
            began = time.monotonic()
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            await closed(reader, time.monotonic(), SLACK, "the stream of a server that is gone")
            left = os.listdir(folder)
            server = Server(taper, *options, port=server.port)
            status, _, _ = await ask(server, chat(4))
            assert status == 200 and not left, left
            seconds = time.monotonic() - began
            return f"on the same port again, and answering, {seconds:.1f} s later; nothing left of the cache's file"
        finally:
            assert server.stop() == 0


# No scenario goes on for longer.
LONGEST = 180

# Name, how many clients, and whether it needs a server of its own.
SCENARIOS = {
    "streams at once": (crowd, 1000, False),
    "slow readers": (slow, 50, False),
    "readers that take nothing": (never, 8, False),
    "silent connections": (silent, 400, False),
    "a byte at a time": (drip, 100, False),
    "requests cut short": (cut, 210, False),
    "pipelined requests": (pipelined, 20, False),
    "idle kept-alive connections": (keep_alive, 1000, False),
    "they vanish in prefill": (leave_in_prefill, 12, False),
    "they vanish in decode": (leave_in_decode, 100, False),
    "deadlines": (deadlines, 32, False),
    "streams at once, again": (crowd, 1000, False),
    "large bodies without end": (heavy, 64, False),
    "prompts that no context holds": (too_long, 12, False),
    "out of files": (out_of_files, 1000, True),
    "TLS handshakes left": (tls, 300, True),
    "SIGTERM among them": (stopped, 100, True),
    "kill -9 in a stream, and a new start": (killed, 1, True),
}


async def probes(server, seen, stop):
    """How long /health takes meanwhile."""
    while not stop.is_set():
        status, seconds, answer = await ask(server, LAST_HEALTH_REQUEST)
        assert status == 200, answer[:80]
        seen.append(seconds)
        await asyncio.sleep(0.1)


async def watched(server, scenario, count, least):
    """A scenario with what goes for all of them: outcome, slowest /health, peak MiB, MiB after."""
    seen, stop = [], asyncio.Event()
    server.forget_peak()
    watch = asyncio.create_task(probes(server, seen, stop))
    try:
        outcome = await scenario(server, count)
    finally:
        stop.set()
        await watch
    await until("files to be closed", lambda: asyncio.sleep(0, server.files() < 40), SLACK)
    peak = server.mib("VmHWM")
    assert peak < least + KV_MIB + BODIES_MIB + MORE_MIB, f"{outcome}; but {peak} MiB"
    assert max(seen) < HEALTH, f"{outcome}; but /health took {max(seen):.1f} s"
    return outcome, f"{max(seen) * 1e3:.0f} ms", peak, server.mib("VmRSS")


async def own_server(taper, scenario, count):
    return await scenario(taper, count), "", "", ""


async def run(args):
    server = Server(args.taper)
    await ask(server, chat(8))
    least, failed = server.mib("VmRSS"), 0
    print(f"| what | clients | outcome | /health, slowest | peak MiB (idle {least}) | MiB after |\n|{' --- |' * 6}", flush=True)
    try:
        for name, (scenario, count, own) in SCENARIOS.items():
            if args.only not in name:
                continue
            try:
                going = own_server(args.taper, scenario, count) if own else watched(server, scenario, count, least)
                cells = await asyncio.wait_for(going, LONGEST)
            except (AssertionError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                failed += 1
                traceback.print_exc()
                cells = (f"**NOT SO**: {error or type(error).__name__}", "", "", "")
            print(f"| {name} | {count:,} | {' | '.join(map(str, cells))} |", flush=True)
        code = server.stop()
        assert code == 0, code
    finally:
        server.process.kill()
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taper", default="target/release/taper")
    parser.add_argument("--only", default="", help="only scenarios with this in their name")
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.exit(min(1, asyncio.run(run(parser.parse_args()))))
