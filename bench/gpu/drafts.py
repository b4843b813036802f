"""How many drafts of a trained model are right behind long prompts, and what they save: a running server, one request at a time.

    drafts.py http://127.0.0.1:8080 [--lengths 8000,32000] [--prompts 4] [--tokens 128] [--needles]
        [--draft streaming_llm] [--draft '{"method": "quest", "k": 0.05}']… [--ahead 3,7] [--choose token,round] [--lookup 0,3]

Greedy. Each prompt is asked without drafts twice, once to warm up, then with every draft method (`none`: all are looked up), number of drafts and way to choose; the prompt's
keys come from the server's memory of the first time. Milliseconds a token are from the first token to the last. "same" counts
prompts whose text is that without drafts; where drafts are checked, rows are computed together and may round otherwise.
"""
import argparse
import itertools
import json
import statistics
import time
import urllib.request

import prompts


def ask(server, text, tokens, attention):
    """Text, milliseconds a token, usage."""
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "attention": attention, "stream": True,
            "stream_options": {"include_usage": True}}
    request = urllib.request.Request(server + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    out, stamps, usage = "", [], None
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event["choices"]:
                    stamps.append(time.perf_counter())
                    out += event["choices"][0]["text"]
    return out, 1e3 * (stamps[-1] - stamps[0]) / (usage["completion_tokens"] - 1), usage


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("server")
    options.add_argument("--lengths", default="8000,32000")
    options.add_argument("--prompts", type=int, default=4)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--needles", action="store_true", help="RULER's keys and values instead of random words")
    options.add_argument("--draft", action="append", help="a method's name or JSON")
    options.add_argument("--ahead", default="3,7", help="drafts before each check")
    options.add_argument("--choose", default="token,round", help="how often drafts choose their keys")
    options.add_argument("--lookup", default="0", help="tokens that must be the same for what followed them to be drafted; 0: none are looked up")
    options = options.parse_args()
    methods = [json.loads(text) if text.startswith("{") else {"method": text} for text in options.draft or ["streaming_llm"]]
    ways = [{}]
    for method, ahead, lookup in itertools.product(methods, map(int, options.ahead.split(",")), map(int, options.lookup.split(","))):
        if method["method"] == "none":
            ways += [{"speculate": {"tokens": ahead, "lookup": lookup}}] if lookup else []
        else:
            ways += [{"speculate": {"method": method, "tokens": ahead, "choose": choose, "lookup": lookup}} for choose in options.choose.split(",")]
    print("| prompt tokens | drafts | ahead | lookup | choose | right | made | ms a token | times dense | density | same |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for length in map(int, options.lengths.split(",")):
        rows, plain, prompt_tokens = {}, {}, 0
        for seed in range(options.prompts):
            text = prompts.needles(length, seed)[0] if options.needles else prompts.words(length, seed)
            ask(options.server, text, 8, {})
            for at, way in enumerate(ways):
                answer, ms, usage = ask(options.server, text, options.tokens, way)
                prompt_tokens = max(prompt_tokens, usage["prompt_tokens"])
                if not way:
                    plain[seed] = answer
                said = usage["attention"][0] if isinstance(usage["attention"], list) else usage["attention"]
                drafts = said.get("speculation") or {}
                rows.setdefault(at, []).append((ms, drafts.get("acceptance"), drafts.get("drafted"), (drafts.get("draft") or {}).get("density", 0), answer == plain[seed]))
        dense = statistics.median(row[0] for row in rows[0])
        for at, way in enumerate(ways):
            ms = statistics.median(row[0] for row in rows[at])
            if not way:
                print(f"| {prompt_tokens} | none | | | | | | {ms:.2f} | 1.00 | | |")
                continue
            right, made, density = (statistics.mean(row[i] for row in rows[at]) for i in (1, 2, 3))
            by = way["speculate"]
            print(f"| {prompt_tokens} | {json.dumps(by.get('method'))} | {by['tokens']} | {by['lookup']} | {by.get('choose', '')} | {right:.3f} | {made:.0f} | {ms:.2f} | "
                  f"{dense / ms:.2f} | {density:.3f} | {sum(row[4] for row in rows[at])} of {len(rows[at])} |", flush=True)


main()
