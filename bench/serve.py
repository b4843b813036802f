#!/usr/bin/env python3
"""Taper beside llama.cpp's llama-server on one machine, in one run: many streams at once.

    python3 bench/serve.py --taper target/release/taper --llama-server PATH --gguf MODEL.gguf [--threads 2]

Each number of clients sends as many requests at once, random prompts that no cache helps with; the servers take turns,
the other one idle. The load and its figures are those of `taper bench serve`. Python's standard library only.
"""

import json
import statistics
import subprocess
import tempfile

from cpu import Server, arguments, free_port


def load(taper, port, clients, prompt, output, seed):
    """What `taper bench serve` found."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            taper, "bench", "serve", "--url", f"http://127.0.0.1:{port}/v1", "--endpoint", "completions",
            "--extra", '{"ignore_eos": true, "temperature": 0}', "--clients", clients, "--requests", clients, "--prompt", prompt,
            "--output", output, "--seed", seed, "--json", file.name,
        ]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.load(open(file.name))


def main():
    args = arguments(__doc__)
    args.add_argument("--clients", default="8,32")
    args.add_argument("--prompt", type=int, default=512)
    args.add_argument("--output", type=int, default=64)
    args.add_argument("--repeats", type=int, default=3)
    args = args.parse_args()
    ours, theirs = free_port(), free_port()
    print("| clients | engine | requests | tokens/s | TTFT p50 | TTFT p95 | ITL p50 | ITL p95 | tokens/s ratio | TTFT p95 ratio | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for clients in map(int, args.clients.split(",")):
        context = str(clients * (args.prompt + args.output + 64))
        taper = [args.taper, "serve", "--model", args.gguf, "--port", str(ours), "--threads", args.threads]
        llama = [args.llama_server, "-m", args.gguf, "--port", str(theirs), "-t", args.threads, "-tb", args.threads]
        llama += ["-c", context, "-np", str(clients)]
        servers = {"llama-server": Server(llama, theirs), "taper": Server(taper, ours)}
        found = {name: [] for name in servers}
        for repeat in range(args.repeats):
            for i, name in enumerate(servers):
                figures = load(args.taper, servers[name].port, clients, args.prompt, args.output, 10 * repeat + i)
                found[name].append(figures["figures"])
        base = None
        for name, server in servers.items():
            median = lambda *path: statistics.median(at(run, path) for run in found[name])
            rate, p95 = median("total_per_s"), median("ttft", "p95")
            base = base or (rate, p95)
            print(
                f"| {clients} | {name} | {args.repeats} x {clients} | {rate:.0f} | {median('ttft', 'p50') / 1e3:.1f} s | {p95 / 1e3:.1f} s "
                f"| {median('itl', 'p50'):.0f} ms | {median('itl', 'p95'):.0f} ms | {rate / base[0]:.2f} | {p95 / base[1]:.2f} "
                f"| {server.mib('VmHWM')} |", flush=True,
            )
            server.stop()


def at(figures, path):
    for key in path:
        figures = figures[key]
    return figures


if __name__ == "__main__":
    main()
