#!/usr/bin/env python3
"""Taper under a mixed load for a long time: streams of every kind, clients that leave, deadlines that pass, too little cache.

    python3 bench/soak.py --taper target/release/taper [--model MODEL] [--minutes 30] [--device cuda --times 8]

The server has little room, some fifteen hundred tokens in memory and seven hundred in a file (beside a GPU: in the host's memory), so that
requests lose their place and are computed again.
Every request must end as it should: answers with one reason to end for each choice and, where they cannot end early, all their
tokens; one line of the log for each that the engine took; the same text for one request that comes again and again as it has
alone (on a GPU, where products add by the number of rows, it says how many differed). Whenever nothing runs, all blocks must be free. Says
what the server's memory was and what its log complains of.
Python's standard library only.
"""

import argparse
import collections
import http.client
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from cpu import Server, free_port

# Requests a minute, prompt and answer lengths, share of the clients that leave in the middle, fields.
LOADS = {
    "dense": (8, "20:400", "4:48", 0.2, {"ignore_eos": True}),
    "quest": (6, "100:600", "4:64", 0.3, {"attention": {"decode": {"method": "quest", "k": 64}}, "logprobs": 2}),
    "delta": (
        4, "50:300", "4:32", 0.3,
        {"attention": {"prefill": {"method": "delta"}, "decode": {"method": "vattention"}}, "n": 2, "temperature": 1, "top_p": 0.9},
    ),
    "drafts": (3, "50:600", "4:64", 0.2, {"attention": {"speculate": {"method": "streaming_llm"}}, "temperature": 0.7}),
    "late": (3, "50:900", "16:64", 0.1, {"timeout": 12}),
    "minference": (1.5, "600:1500", "4:32", 0.3, {"attention": {"prefill": {"method": "minference"}}}),
    "sampled": (
        1.5, "600:1500", "4:32", 0.3,
        {"attention": {"prefill": {"method": "delta", "base": {"method": "sample_attention", "min_tokens": 0}}, "decode": {"method": "santa"}}},
    ),
    # Two at once may take more blocks than there are.
    "growing": (4, "40:60", "200:320", 0.2, {"ignore_eos": True, "n": 3, "temperature": 1}),
    "limited": (4, "20:100", "4:16", 0, {}),
}
# The second one may ask for one thing at a time.
KEYS = {"one": "a-key-without-limits", "two": "a-key-with-a-limit"}

# Comes every few seconds, and must be answered alike whatever runs beside it.
STEADY = {
    "prompt": "The lighthouse keeper wrote in his journal every evening. " * 12, "max_tokens": 40, "temperature": 1, "seed": 7,
    "attention": {"prefill": {"method": "delta"}, "decode": {"method": "vattention", "top": {"method": "quest"}}},
}
# How requests of a load may fail: late ones, and those of a key that has another underway.
MAY_FAIL = {"late": "deadline", "limited": "HTTP 429"}
# How the engine's log says that a request is over.
OVER = "done|cancelled: the client is gone|late: its deadline has passed|request failed"


def steady(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS['one']}"}
    connection.request("POST", "/v1/completions", json.dumps(STEADY), headers)
    answer = json.loads(connection.getresponse().read())
    return answer["choices"][0]["text"] if "choices" in answer else answer


def check(name, sent, found, of_each):
    """Fails unless every request of a load ended as it should."""
    assert sorted(one["number"] for one in of_each) == list(range(sent)), name
    extra = LOADS[name][4]
    for one in of_each:
        if one["error"]:
            assert re.search(MAY_FAIL.get(name, "$^"), one["error"]), f"{name}: {one['error']}"
        if one["left"] or one["error"]:
            continue
        choices = extra.get("n", 1)
        assert len(one["finish"]) == len(one["texts"]) == choices and set(one["finish"]) <= {"stop", "length"}, f"{name}: {one}"
        if "length" in one["finish"] and choices == 1:
            assert one["completion_tokens"] == one["max_tokens"], f"{name}: {one}"
        assert one["completion_tokens"] <= choices * one["max_tokens"], f"{name}: {one}"
        if extra.get("ignore_eos"):
            assert set(one["finish"]) == {"length"}, f"{name}: {one}"
    print(f"| {name} | {sent} | {found['completed']} | {found['cancelled']} | {json.dumps(found['errors'])} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taper", required=True)
    parser.add_argument("--model")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=float, default=1, help="so many times the requests a minute")
    args = parser.parse_args()
    folder, port = Path(tempfile.mkdtemp()), free_port()
    (folder / "keys.toml").write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()) + "requests = 1\n")
    command = [args.taper, "serve", "--port", str(port), "--api-keys", str(folder / "keys.toml")]
    on_cpu = args.device == "cpu"
    command += ["--device", args.device, "--kv-memory", "32MiB", "--kv-offload", "16MiB"]
    command += ["--kv-offload-dir", str(folder)] if on_cpu else []
    log = open(folder / "log", "w+")
    command += ["--model", args.model] if args.model else []
    server = Server(command, port, log, dict(os.environ, RUST_LOG="info,taper_engine=debug", NO_COLOR="1"))
    alone = steady(port)
    assert isinstance(alone, str) and alone, alone
    loads, sent = {}, {name: round(load[0] * args.times * args.minutes) for name, load in LOADS.items()}
    for seed, (name, (rate, prompt, output, cancel, extra)) in enumerate(LOADS.items()):
        load = [args.taper, "bench", "serve", "--url", f"http://127.0.0.1:{port}/v1", "--endpoint", "completions", "--warm-up", "0"]
        load += ["--rate", str(rate * args.times / 60), "--requests", str(sent[name]), "--prompt", prompt, "--output", output]
        load += ["--cancel", str(cancel), "--seed", str(seed), "--extra", json.dumps(extra), "--json", str(folder / f"{name}.json")]
        load += ["--shared-prefix", "100"] if name == "dense" else []
        key = KEYS["two" if name == "limited" else "one"]
        loads[name] = subprocess.Popen(load, env=dict(os.environ, OPENAI_API_KEY=key), stdout=subprocess.DEVNULL)
    begun, seen, again = time.time(), [], []

    def ask():
        try:
            again.append(steady(port))
        except Exception as error:
            again.append(repr(error))

    asking = threading.Thread(target=ask)
    while any(load.poll() is None for load in loads.values()):
        seen.append((time.time() - begun, server.mib("RssAnon")))
        if not asking.is_alive():
            asking = threading.Thread(target=ask)
            asking.start()
        time.sleep(10 / args.times)
    asking.join()
    print(f"{(time.time() - begun) / 60:.1f} minutes")
    print("| load | sent | completed | left | refused or failed |\n| --- | --- | --- | --- | --- |")
    refused = 0
    for name, load in loads.items():
        # A load of which none was answered ends with 1: all may be late.
        assert load.returncode == 0 or name in MAY_FAIL, name
        found = json.loads((folder / f"{name}.json").read_text())
        check(name, sent[name], found["figures"], found["requests"])
        refused += sum("HTTP 429" in (one["error"] or "") for one in found["requests"])
    differ = sum(text != alone for text in again)
    assert again and all(isinstance(text, str) for text in again), again[:3]
    assert differ == 0 or not on_cpu, f"{differ} of {len(again)} answers differ"
    print(f"{len(again)} answers to one request beside all that, {len(again) - differ} of them as it was alone")
    after = [mib for at, mib in seen if at > 180] or [mib for _, mib in seen]
    thirds = [sum(part) / len(part) for part in (after[i * len(after) // 3 : (i + 1) * len(after) // 3] or after for i in range(3))]
    print(f"anonymous memory from the fourth minute on: {min(after)} to {max(after)} MiB, {' '.join(f'{mib:.0f}' for mib in thirds)} in its thirds")
    code = server.stop()
    text = (folder / "log").read_text()
    wrong = [line for line in text.splitlines() if re.search("ERROR|panicked|a bug", line)]
    late = [line for line in wrong if "deadline" not in line]
    print(f"preempted {text.count('preempted:')} times; the server ended with {code}; {len(late)} lines of its log speak of errors")
    print("\n".join(late[:20]))
    assert code == 0 and not late
    if args.minutes >= 10:
        assert thirds[2] < 1.1 * thirds[0] + 10, "memory grows"
    ids = lambda pattern: collections.Counter(re.findall(rf": (?:{pattern})", text))
    name = r'id="?(?:\w+-)?(\w+)'
    answered, over = ids(rf'answered {name}" method="POST"'), ids(rf"(?:{OVER}).* {name}")
    odd = [one for one in over if over[one] != 1 or answered[one] != 1]
    assert over and not odd, f"{len(odd)} of {len(over)} are not over once and answered once: {odd[:9]}"
    never = sum(one not in over for one in answered)
    assert never == refused, f"{never} that were answered never ran, {refused} refused"
    free = {int(count) for count in re.findall(r"idle and sound free=(\d+)", text)}
    blocks = int(re.search(r"KV cache ([\d,]+) tokens", text)[1].replace(",", "")) // 64
    assert free == {blocks}, f"free blocks of {blocks} while idle: {free}"
    print(f"{len(over)} requests taken, each over once; idle {text.count('idle and sound')} times, with all {blocks} blocks free")


if __name__ == "__main__":
    main()
