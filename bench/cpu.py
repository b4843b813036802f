#!/usr/bin/env python3
"""Taper beside llama.cpp's llama-server on one machine, in one run: one stream, prefill and decode by prompt length.

    python3 bench/cpu.py --taper target/release/taper --llama-server PATH --gguf MODEL.gguf [--threads 2]

Every figure is the median of the repeats; the servers take turns at each length, so that both meet the same machine.
Prefill is prompt tokens over the time to the first token, decode the other tokens over the time since. Prompts are
random common words, new ones each time, so that no cache helps. Python's standard library only; loopback only.
"""

import argparse
import http.client
import json
import random
import socket
import statistics
import subprocess
import time

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother"
).split()

SPARSE = {
    "prefill": {"method": "streaming_llm", "sink": 4, "window": 512},
    "decode": {"method": "streaming_llm", "sink": 4, "window": 512},
}
# A promise that a sample keeps, by the method's defaults.
PROMISE = {"decode": {"method": "vattention"}}
# Practically every head goes dense: what a promise costs that only dense attention can keep.
UNKEEPABLE = {"decode": {"method": "vattention", "epsilon": 0.00001, "delta": 0.05}}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, command, port, log=subprocess.DEVNULL, env=None):
        self.port, started = port, time.time()
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        while not self.healthy():
            if self.process.poll() is not None or time.time() - started > 120:
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.02)
        self.ready_s = time.time() - started

    def healthy(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def mib(self, field):
        """A field of the process's status, such as VmHWM, the most memory that it had."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field)) // 1024

    def stop(self):
        """Its exit status."""
        self.process.terminate()
        return self.process.wait(60)

    def measure(self, words, tokens, attention):
        """(prefill tokens/s, decode tokens/s, prompt tokens, density of decode) of one streamed completion."""
        prompt = " " + " ".join(random.choice(WORDS) for _ in range(words))
        body = {
            "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
        if attention:
            body["attention"] = attention
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        start, stamps, usage = time.perf_counter(), [], None
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read()[:300]}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event["choices"]:
                stamps.append(time.perf_counter())
        completed = usage["completion_tokens"]
        prefill = usage["prompt_tokens"] / (stamps[0] - start)
        decode = (completed - 1) / (stamps[-1] - stamps[0])
        density = usage.get("attention", {}).get("decode", {}).get("density", 1.0)
        return prefill, decode, usage["prompt_tokens"], density


def arguments(text):
    """What a comparison of the two servers is told, described by the first line of a text."""
    args = argparse.ArgumentParser(description=text.splitlines()[0])
    args.add_argument("--taper", required=True)
    args.add_argument("--llama-server", required=True)
    args.add_argument("--gguf", required=True)
    args.add_argument("--threads", default="2")
    return args


def main():
    args = arguments(__doc__)
    args.add_argument("--lengths", default="128,1024,4096,8000")
    args.add_argument("--tokens", type=int, default=64)
    args.add_argument("--repeats", type=int, default=3)
    args = args.parse_args()
    ours, theirs = free_port(), free_port()
    taper = [args.taper, "serve", "--model", args.gguf, "--port", str(ours), "--threads", args.threads]
    llama = [args.llama_server, "-m", args.gguf, "--port", str(theirs), "-t", args.threads, "-c", "8192", "-np", "1"]
    rows = [("llama-server", theirs, llama, None), ("taper dense", ours, taper, None)]
    rows += [("taper streaming_llm 4+512", ours, taper, SPARSE), ("taper vattention", ours, taper, PROMISE)]
    rows += [("taper vattention, all dense", ours, taper, UNKEEPABLE)]
    print("| prompt | engine | prefill tok/s | decode tok/s | prefill ratio | decode ratio | decode density | peak MiB | ready s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for length in map(int, args.lengths.split(",")):
        # Fresh servers at each length, so that peak memory is that of the length.
        servers = {theirs: Server(llama, theirs), ours: Server(taper, ours)}
        found = {name: [] for name, *_ in rows}
        peak = {}
        for _ in range(args.repeats):
            for name, port, _, attention in rows:
                found[name].append(servers[port].measure(length, args.tokens, attention))
                peak.setdefault(name, servers[port].mib("VmHWM"))
        base = [statistics.median(x) for x in zip(*found["llama-server"])]
        for name, port, *_ in rows:
            prefill, decode, prompt, density = (statistics.median(x) for x in zip(*found[name]))
            print(
                f"| {prompt:.0f} | {name} | {prefill:.0f} | {decode:.1f} | {prefill / base[0]:.2f} | {decode / base[1]:.2f} "
                f"| {density:.3f} | {peak[name]} | {servers[port].ready_s:.2f} |", flush=True,
            )
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    main()
