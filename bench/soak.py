#!/usr/bin/env python3
"""Taper under a mixed load for a long time: streams of every kind, clients that leave, deadlines that pass, too little cache.

    python3 bench/soak.py --taper target/release/taper [--model MODEL] [--minutes 30]

The server has little room: some two thousand tokens in memory and a thousand in a file.
Says what came of every request, what the server's memory was, and what its log complains of. Python's standard library only.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from cpu import Server, free_port

# Requests a minute, prompt and answer lengths, share of the clients that leave in the middle, fields.
LOADS = {
    "dense": (9, "20:400", "4:48", 0.2, {"ignore_eos": True}),
    "quest": (6, "100:600", "4:64", 0.3, {"attention": {"decode": {"method": "quest", "k": 64}}, "logprobs": 2}),
    "delta": (
        4, "50:300", "4:32", 0.3,
        {"attention": {"prefill": {"method": "delta"}, "decode": {"method": "vattention"}}, "n": 2, "temperature": 1, "top_p": 0.9},
    ),
    "drafts": (3, "50:600", "4:64", 0.2, {"attention": {"speculate": {"method": "streaming_llm"}}, "temperature": 0.7}),
    "late": (3, "50:900", "16:64", 0.1, {"timeout": 4}),
    "minference": (1.5, "600:1500", "4:32", 0.3, {"attention": {"prefill": {"method": "minference"}}}),
    "sampled": (
        1.5, "600:1500", "4:32", 0.3,
        {"attention": {"prefill": {"method": "delta", "base": {"method": "sample_attention", "min_tokens": 0}}, "decode": {"method": "santa"}}},
    ),
    "limited": (4, "20:100", "4:16", 0, {}),
}
# The second one may ask for one thing at a time.
KEYS = {"one": "a-key-without-limits", "two": "a-key-with-a-limit"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taper", required=True)
    parser.add_argument("--model")
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    folder, port = Path(tempfile.mkdtemp()), free_port()
    (folder / "keys.toml").write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()) + "requests = 1\n")
    command = [args.taper, "serve", "--port", str(port), "--api-keys", str(folder / "keys.toml")]
    command += ["--kv-memory", "48MiB", "--kv-offload", "24MiB", "--kv-offload-dir", str(folder)]
    log = open(folder / "log", "w+")
    command += ["--model", args.model] if args.model else []
    server = Server(command, port, log, dict(os.environ, RUST_LOG="info", NO_COLOR="1"))
    loads = {}
    for seed, (name, (rate, prompt, output, cancel, extra)) in enumerate(LOADS.items()):
        load = [args.taper, "bench", "serve", "--url", f"http://127.0.0.1:{port}/v1", "--endpoint", "completions", "--warm-up", "0"]
        load += ["--rate", str(rate / 60), "--requests", str(round(rate * args.minutes)), "--prompt", prompt, "--output", output]
        load += ["--cancel", str(cancel), "--seed", str(seed), "--extra", json.dumps(extra), "--json", str(folder / f"{name}.json")]
        load += ["--shared-prefix", "100"] if name == "dense" else []
        key = KEYS["two" if name == "limited" else "one"]
        loads[name] = subprocess.Popen(load, env=dict(os.environ, OPENAI_API_KEY=key), stdout=subprocess.DEVNULL)
    begun, seen = time.time(), []
    while any(load.poll() is None for load in loads.values()):
        seen.append((time.time() - begun, server.mib("RssAnon")))
        time.sleep(10)
    print(f"{(time.time() - begun) / 60:.1f} minutes")
    print("| load | sent | completed | left | refused or failed |\n| --- | --- | --- | --- | --- |")
    for name, load in loads.items():
        assert load.returncode == 0, name
        found = json.loads((folder / f"{name}.json").read_text())["figures"]
        sent = round(LOADS[name][0] * args.minutes)
        assert sent == found["completed"] + found["cancelled"] + sum(found["errors"].values()), f"{name}: {found}"
        print(f"| {name} | {sent} | {found['completed']} | {found['cancelled']} | {json.dumps(found['errors'])} |")
    after = [mib for at, mib in seen if at > 180] or [mib for _, mib in seen]
    print(f"anonymous memory: {after[0]} MiB after three minutes, {min(after)} to {max(after)} since, {after[-1]} at the end")
    code = server.stop()
    text = (folder / "log").read_text()
    wrong = [line for line in text.splitlines() if re.search("ERROR|panicked|a bug", line)]
    late = [line for line in wrong if "deadline" not in line]
    print(f"preempted {text.count('preempted:')} times; the server ended with {code}; {len(late)} lines of its log speak of errors")
    print("\n".join(late[:20]))


if __name__ == "__main__":
    main()
