#!/usr/bin/env python3
"""Exact top-k decoding: of the keys between sinks and window, those with the largest probability (see common.py)."""

from common import Array, Choose, between, count, decode, first_clear, heads, importance, math, np, top


def logits(q: Array, keys: Array) -> Array:
    return q @ keys.T / math.sqrt(q.shape[1])


def chooser(k: float, sink: int, window: int, score=importance, more: int = 0) -> Choose:
    def choose(q: Array, keys: Array, _: int) -> Array:
        candidates = between(len(keys), sink, window)
        chosen = ~candidates
        chosen[top(score(logits(q, keys)), np.flatnonzero(candidates), count(k, len(keys)) + more)] = True
        return chosen

    return choose


def make(name: str, settings: dict, shape: dict, seed: int) -> None:
    k, sink, window = settings["k"], settings["sink"], settings["window"]
    wrong = {
        "one key more": chooser(k, sink, window, more=1),
        "one key less": chooser(k, sink, window, more=-1),
        "a longer window": chooser(k, sink, window + 1),
        "a shorter window": chooser(k, sink, window - 1),
        "a sink more": chooser(k, sink + 1, window),
    }
    if shape["group"] > 1:
        wrong |= {
            "summed scores": chooser(k, sink, window, lambda s: s.sum(axis=0) - s.min()),
            "the best head": chooser(k, sink, window, lambda s: np.exp(s - s.max(axis=1, keepdims=True)).max(axis=0)),
            "the first head": chooser(k, sink, window, lambda s: importance(s[:1])),
        }
    decode(name, settings, heads(seed, **shape), chooser(k, sink, window), wrong)


def main() -> None:
    settings = {"method": "oracle_top_k", "k": 40, "sink": 4, "window": 16}
    shape = {"n": 403, "kv_heads": 2, "group": 3, "d": 32, "rows": 3}
    first_clear(lambda seed: make("oracle_top_k", settings, shape, seed))
    # A share of the visible keys, rounded up: 29 of 282, 283, 284 and 285.
    shape = {"n": 285, "kv_heads": 2, "group": 1, "d": 64, "rows": 4}
    first_clear(lambda seed: make("oracle_top_k-share", settings | {"k": 0.1}, shape, seed))
    shape = {"n": 149, "kv_heads": 1, "group": 4, "d": 128, "rows": 3}
    first_clear(lambda seed: make("oracle_top_k-wide", settings | {"k": 20}, shape, seed))


if __name__ == "__main__":
    main()
