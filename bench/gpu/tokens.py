"""Greedy tokens of two servers of one model, such as one on the CPU and one on a CUDA device, side by side.

    tokens.py http://127.0.0.1:8080 http://127.0.0.1:8081 [--tokens 64] [--lengths 30,300,2000] [--needles]

Either may be a file that an earlier run wrote with `--save FILE`, so that the slower server need not run beside the other.
Where tokens differ first, the first server's two best log probabilities say whether it could
have gone either way: only a difference where their gap is over 0.05 counts.
"""
import argparse
import json
import os
import sys
import time
import urllib.request

import prompts


class Server:
    """Asks a server, or finds its answers in a file."""

    def __init__(self, name, options):
        self.name, self.options, self.kept = name, options, {}
        self.is_file = not name.startswith("http")
        if self.is_file:
            with open(name) as file:
                self.kept = json.load(file)

    def ask(self, text):
        key = json.dumps([text, self.options.tokens, self.options.attention])
        if self.is_file and key not in self.kept:
            sys.exit(f"{self.name} has no answer to this prompt: lengths, prompts, tokens and attention must be the same")
        if key not in self.kept:
            answer = self.answer(text)
            if not self.options.save:
                return answer
            self.kept[key] = answer
            with open(self.options.save, "w") as file:
                json.dump(self.kept, file)
        return self.kept[key]

    def answer(self, text):
        body = {"prompt": text, "max_tokens": self.options.tokens, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        if self.options.attention:
            body["attention"] = json.loads(self.options.attention)
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.name + "/v1/completions", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=3600) as answer:
                answer = json.load(answer)
                return {**answer["choices"][0]["logprobs"], "prompt_tokens": answer["usage"]["prompt_tokens"]}
        except urllib.error.HTTPError as error:
            sys.exit(f"{self.name}: {error.read().decode()}")


def compare(what, a, b):
    """Prints how two answers differ; whether they do where it counts."""
    same = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), None)
    if same is None:
        error = max(abs(x - y) for x, y in zip(a["token_logprobs"], b["token_logprobs"]))
        print(f"{what}: {len(a['tokens'])} tokens equal, log probabilities to {error:.4f}")
        return False
    best = sorted(a["top_logprobs"][same].values(), reverse=True)
    gap = best[0] - best[1]
    print(f"{what}: differ at token {same}, where the gap is {gap:.4f}")
    return gap > 0.05


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("servers", nargs="+", help="one with --save, or two")
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--lengths", default="30,300,2000", help="in words, of needles in tokens")
    options.add_argument("--prompts", type=int, default=4, help="of each length")
    options.add_argument("--needles", action="store_true", help="RULER's keys and values instead of random words")
    options.add_argument("--questions", type=int, default=1, help="over each haystack of needles")
    options.add_argument("--attention", help="JSON, as a request has it")
    options.add_argument("--save", help="write the only server's answers to this file")
    options = options.parse_args()
    if len(options.servers) != (1 if options.save else 2):
        sys.exit("give two servers, or one and --save FILE")
    servers = [Server(name, options) for name in options.servers]
    if options.save and os.path.exists(options.save):
        servers[0].kept = json.load(open(options.save))
    bad = 0
    for length in map(int, options.lengths.split(",")):
        for number in range(options.prompts * options.questions):
            seed, question = divmod(number, options.questions)
            text, wanted = prompts.needles(length, seed, question) if options.needles else (prompts.words(length, seed), None)
            started = time.perf_counter()
            answers = [server.ask(text) for server in servers]
            first = answers[0]
            what = f"{first.get('prompt_tokens', length)} tokens, {seed}" + (f", question {question}" if options.questions > 1 else "")
            if wanted:
                what += ", found" if wanted in "".join(first["tokens"]) else ", not found"
            if options.save:
                print(f"{what}: {len(first['tokens'])} tokens in {time.perf_counter() - started:.1f} s", flush=True)
            else:
                bad += compare(what, *answers)
    if not options.save:
        print(f"{bad} differences where the gap is over 0.05")
    sys.exit(bad > 0)


main()
