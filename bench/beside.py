#!/usr/bin/env python3
"""How long running streams wait for their tokens while a long prompt goes in.

    python3 bench/beside.py --taper target/release/taper --model MODEL [--prompt 16000] [--attention '{"prefill": …}']…

Eight streams run for some seconds alone, eight more for as long beside a prompt that comes once all of them have begun. Every
gap between two tokens of a stream counts. Python's standard library only; loopback only.
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


def gaps(port, streams, seconds, long=None):
    """Gaps within `seconds` of all streams, sorted; time to the first token of the long prompt, if it had one."""
    stop = threading.Event()
    all_ = [Stream(port, {"prompt": tokens(16), "max_tokens": 4000}, stop) for _ in range(streams)]
    while not all(len(stream.stamps) > 3 for stream in all_):
        if any(stream.failed for stream in all_):
            raise SystemExit(next(stream.failed for stream in all_ if stream.failed))
        time.sleep(0.05)
    start = time.perf_counter()
    prompt = Stream(port, {**long, "max_tokens": 2}, stop) if long else None
    time.sleep(seconds)
    end = time.perf_counter()
    stop.set()
    first = prompt.stamps[0] - start if prompt and prompt.stamps else None
    if prompt and prompt.failed:
        raise SystemExit(prompt.failed)
    found = []
    for stream in all_:
        # A stream that waits still has a gap that lasts.
        stamps = [stamp for stamp in stream.stamps if stamp < end] + [end]
        found += [b - a for a, b in zip(stamps, stamps[1:]) if b > start]
        stream.join(60)
    if prompt:
        prompt.join(600)
    return sorted(found), first


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--taper", required=True)
    args.add_argument("--model", default="default")
    args.add_argument("--threads", default="2")
    args.add_argument("--streams", type=int, default=8)
    args.add_argument("--prompt", type=int, default=16000)
    args.add_argument("--seconds", type=float, default=30)
    args.add_argument("--attention", action="append", type=json.loads)
    args = args.parse_args()
    port = free_port()
    command = [args.taper, "serve", "--model", args.model, "--port", str(port), "--threads", args.threads, "--kv-memory", "3GiB"]
    server = Server(command, port)
    print("| prompt | its TTFT | gaps | ITL p50 | ITL p95 | ITL p99 | longest | p99 ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = None
    for attention in [None, *(args.attention or [{}])]:
        long = None if attention is None else {"prompt": tokens(args.prompt), "attention": attention}
        found, first = gaps(port, args.streams, args.seconds, long)
        at = lambda share: 1e3 * found[min(int(share * len(found)), len(found) - 1)]
        base = base or at(0.99)
        name = "none" if attention is None else f"{args.prompt}, `{json.dumps(attention)}`"
        ttft = "" if attention is None else f"{first:.1f} s" if first else f"over {args.seconds:.0f} s"
        print(
            f"| {name} | {ttft} | {len(found)} | {at(0.5):.0f} ms | {at(0.95):.0f} ms | {at(0.99):.0f} ms | {1e3 * found[-1]:.0f} ms "
            f"| {at(0.99) / base:.2f} |", flush=True,
        )
    server.stop()


if __name__ == "__main__":
    main()
