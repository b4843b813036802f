#!/usr/bin/env python3
"""How long running streams wait for their tokens while a long prompt goes in.

    python3 bench/beside.py --taper target/release/taper --model MODEL [--prompt 16000] [--attention '{"prefill": …}']…
        [--prompts 1] [--least 30] [--most 900] [-- further arguments of taper serve]

Eight streams run beside each kind of prompt, which come one after the other, the first once all streams have begun: until the
last one has its first token, or for the most. Every gap between two tokens of a stream counts that was beside a prompt. Then
eight streams run alone, so that every gap has one behind as many tokens of its stream to be compared with: their own length
slows streams too. Python's standard library only; loopback only.
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


def begin(port, streams, length, stop):
    """Streams that have begun."""
    all_ = [Stream(port, {"prompt": tokens(16), "max_tokens": length}, stop) for _ in range(streams)]
    while not all(len(stream.stamps) > 3 for stream in all_):
        if any(stream.failed for stream in all_):
            raise SystemExit(next(stream.failed for stream in all_ if stream.failed))
        time.sleep(0.05)
    return all_


def beside(port, args, prompts):
    """For each stream the number of its first gap beside prompts, and those gaps; the prompts' mean time to the first token,
    if all had one."""
    stop = threading.Event()
    streams = begin(port, args.streams, args.tokens, stop)
    start, firsts = time.perf_counter(), []
    for body in prompts:
        came, prompt = time.perf_counter(), Stream(port, {**body, "max_tokens": 2}, stop)
        while not (prompt.stamps or prompt.failed) and time.perf_counter() < start + args.most:
            time.sleep(0.001)
        if prompt.failed:
            raise SystemExit(prompt.failed)
        firsts += [prompt.stamps[0] - came] if prompt.stamps else []
    end = time.perf_counter()
    stop.set()
    found = []
    for stream in streams:
        # A stream that waits still has a gap that lasts.
        stamps = [stamp for stamp in stream.stamps if stamp < end] + [end]
        first = sum(stamp <= start for stamp in stamps[1:])
        found.append((first, [b - a for a, b in zip(stamps, stamps[1:])][first:]))
        stream.join(60)
    return found, sum(firsts) / len(firsts) if firsts and len(firsts) == len(prompts) else None


def alone(port, args, count):
    """The gaps of each of the streams alone, at least `count` of them and for at least a while."""
    stop = threading.Event()
    streams = begin(port, args.streams, args.tokens, stop)
    least = time.perf_counter() + args.least
    while time.perf_counter() < least or not all(len(stream.stamps) > count for stream in streams):
        if not any(stream.is_alive() for stream in streams):
            break
        time.sleep(0.05)
    stop.set()
    for stream in streams:
        stream.join(60)
    return [[b - a for a, b in zip(stream.stamps, stream.stamps[1:])] for stream in streams]


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--taper", required=True)
    args.add_argument("--model", default="default")
    args.add_argument("--threads", default="2")
    args.add_argument("--streams", type=int, default=8)
    args.add_argument("--prompt", type=int, default=16000)
    args.add_argument("--least", type=float, default=30, help="so many seconds alone at least")
    args.add_argument("--most", type=float, default=900, help="so many seconds beside prompts at most")
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
    runs = []
    for attention in args.attention or [{}]:
        prompts = [{"prompt": tokens(args.prompt), "attention": attention} for _ in range(args.prompts)]
        runs.append((attention, *beside(port, args, prompts)))
    count = max(first + len(gaps) for _, found, _ in runs for first, gaps in found)
    without = alone(port, args, count)
    server.stop()

    print("| prompt | its TTFT | gaps | ITL p50 | ITL p95 | ITL p99 | longest | alone: p50 | p99 | ratio of p50 | of p99 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for attention, found, first in runs:
        # The same places of the streams, or the first so many where there are few.
        far = max([start + len(gaps) for start, gaps in found] + [min(200, count)])
        near = min([start for start, _ in found] if far > 200 else [0])
        those = sorted(gap for gaps in without for gap in gaps[near:far])
        gaps = sorted(gap for _, gaps in found for gap in gaps)
        at = lambda gaps, share: 1e3 * gaps[min(int(share * len(gaps)), len(gaps) - 1)]
        ttft = f"{first:.2f} s" if first else f"over {args.most:.0f} s"
        numbers = [at(gaps, 0.5), at(gaps, 0.95), at(gaps, 0.99), 1e3 * gaps[-1], at(those, 0.5), at(those, 0.99)]
        print(
            f"| {args.prompt}, `{json.dumps(attention)}` | {ttft} | {len(gaps)} | {' | '.join(f'{n:.1f} ms' for n in numbers)} "
            f"| {numbers[0] / numbers[4]:.2f} | {numbers[2] / numbers[5]:.2f} |"
        )


if __name__ == "__main__":
    main()
