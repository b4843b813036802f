"""Greedy tokens of two servers of one model, such as one on the CPU and one on a CUDA device, side by side.

    tokens.py http://127.0.0.1:8080 http://127.0.0.1:8081 [--tokens 64] [--lengths 30,300,2000]

Where tokens differ first, the first server's two best log probabilities say whether it could
have gone either way: only a difference where their gap is over 0.05 counts.
"""
import argparse
import json
import random
import sys
import urllib.request

WORDS = """the a of and river stone morning letter captain garden winter voice number answer city
silver road quiet seven window table under before carried found never opened little great house""".split()


def prompt(length, seed):
    pick = random.Random(seed)
    words = [pick.choice(WORDS) for _ in range(length)]
    return f"Once upon a time, story number {seed}: " + " ".join(words) + ". And then"


def ask(server, text, tokens, attention):
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    if attention:
        body["attention"] = attention
    data = json.dumps(body).encode()
    request = urllib.request.Request(server + "/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["logprobs"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{server}: {error.read().decode()}")


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("servers", nargs=2)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--lengths", default="30,300,2000")
    options.add_argument("--prompts", type=int, default=4, help="of each length")
    options.add_argument("--attention", help="JSON, as a request has it")
    options = options.parse_args()
    attention = json.loads(options.attention) if options.attention else None
    bad = 0
    for length in map(int, options.lengths.split(",")):
        for seed in range(options.prompts):
            text = prompt(length, seed)
            a, b = (ask(server, text, options.tokens, attention) for server in options.servers)
            same = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), None)
            if same is None:
                error = max(abs(x - y) for x, y in zip(a["token_logprobs"], b["token_logprobs"]))
                print(f"{length} words, {seed}: {len(a['tokens'])} tokens equal, log probabilities to {error:.4f}")
                continue
            best = sorted(a["top_logprobs"][same].values(), reverse=True)
            gap = best[0] - best[1]
            bad += gap > 0.05
            print(f"{length} words, {seed}: differ at token {same}, where the gap is {gap:.4f}")
    print(f"{bad} differences where the gap is over 0.05")
    sys.exit(bad > 0)


main()
