#!/usr/bin/env python3
"""How long running streams wait for their tokens while a long prompt goes in.

    python3 bench/beside.py --taper target/release/taper --model MODEL [--prompt 16000] [--attention '{"prefill": …}']…
        [--prompts 1] [--seconds 30] [--most 900] [-- further arguments of taper serve]

Eight streams run for some seconds alone, eight more beside prompts, one after the other, the first of which comes once all of
them have begun: until the last one has its first token, or for the most. Every gap between two tokens of a stream counts that was
beside a prompt. Python's standard library only; loopback only.
"""

import argparse
import http.client
import json
import random
import threading
import time

from cpu import Server, free_port


class Stream(threading.Thread):
    """One request, the times of its tokens; it ends once `stop` is set, or by itself."""

    def __init__(self, port, body, stop):
        super().__init__(daemon=True)
        self.port, self.body, self.stop, self.stamps, self.failed = port, body, stop, [], None
        self.start()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"temperature": 0, "ignore_eos": True, "stream": True, **self.body}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            self.failed = response.read()[:300]
            return
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                self.stamps.append(time.perf_counter())
            if self.stop.is_set():
                break
        connection.close()


def tokens(count):
    return [random.randrange(1000, 20000) for _ in range(count)]


def gaps(port, streams, seconds, length, prompts=()):
    """Gaps of all streams within `seconds`, or beside prompts, sorted; the prompts' mean time to the first token, if all had one."""
    stop = threading.Event()
    all_ = [Stream(port, {"prompt": tokens(16), "max_tokens": length}, stop) for _ in range(streams)]
    while not all(len(stream.stamps) > 3 for stream in all_):
        if any(stream.failed for stream in all_):
            raise SystemExit(next(stream.failed for stream in all_ if stream.failed))
        time.sleep(0.05)
    start, firsts = time.perf_counter(), []
    for body in prompts:
        came, prompt = time.perf_counter(), Stream(port, {**body, "max_tokens": 2}, stop)
        while not (prompt.stamps or prompt.failed) and time.perf_counter() < start + seconds:
            time.sleep(0.001)
        if prompt.failed:
            raise SystemExit(prompt.failed)
        firsts += [prompt.stamps[0] - came] if prompt.stamps else []
    if not prompts:
        time.sleep(seconds)
    end = time.perf_counter()
    stop.set()
    found = []
    for stream in all_:
        # A stream that waits still has a gap that lasts.
        stamps = [stamp for stamp in stream.stamps if stamp < end] + [end]
        found += [b - a for a, b in zip(stamps, stamps[1:]) if b > start]
        stream.join(60)
    first = sum(firsts) / len(firsts) if firsts and len(firsts) == len(prompts) else None
    return sorted(found), first


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--taper", required=True)
    args.add_argument("--model", default="default")
    args.add_argument("--threads", default="2")
    args.add_argument("--streams", type=int, default=8)
    args.add_argument("--prompt", type=int, default=16000)
    args.add_argument("--seconds", type=float, default=30, help="so long alone")
    args.add_argument("--most", type=float, default=900, help="so long beside prompts at most")
    args.add_argument("--attention", action="append", type=json.loads)
    args.add_argument("--prompts", type=int, default=1)
    args.add_argument("--tokens", type=int, default=4000, help="most tokens of a stream")
    args.add_argument("--kv-memory", default="3GiB")
    args.add_argument("serve", nargs="*")
    args = args.parse_args()
    port = free_port()
    command = [
        args.taper, "serve", "--model", args.model, "--port", str(port), "--threads", args.threads, "--kv-memory", args.kv_memory,
        *args.serve,
    ]
    server = Server(command, port)
    print("| prompt | its TTFT | gaps | ITL p50 | ITL p95 | ITL p99 | longest | p99 ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = None
    for attention in [None, *(args.attention or [{}])]:
        long = [] if attention is None else [{"prompt": tokens(args.prompt), "attention": attention} for _ in range(args.prompts)]
        found, first = gaps(port, args.streams, args.most if long else args.seconds, args.tokens, long)
        at = lambda share: 1e3 * found[min(int(share * len(found)), len(found) - 1)]
        base = base or at(0.99)
        name = "none" if attention is None else f"{args.prompt}, `{json.dumps(attention)}`"
        ttft = "" if attention is None else f"{first:.2f} s" if first else f"over {args.most:.0f} s"
        print(
            f"| {name} | {ttft} | {len(found)} | {at(0.5):.1f} ms | {at(0.95):.1f} ms | {at(0.99):.1f} ms | {1e3 * found[-1]:.1f} ms "
            f"| {at(0.99) / base:.2f} |", flush=True,
        )
    server.stop()


if __name__ == "__main__":
    main()
