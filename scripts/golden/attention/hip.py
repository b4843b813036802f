#!/usr/bin/env python3
"""HiP, for prefill (see common.py): chunks of keys found by a search by halves.

The rows of a query block read the sinks and, from `window` tokens before the block on, everything (both rounded up to
blocks of 64). The tokens between are cut into chunks. Neighbouring queries are averaged, `average` of them by absolute
position; a key's score is the largest product with a mean query of any query head of the KV head. A chunk is halved
until one key is left, by way of the half whose middle key scores higher, the first of equals; its score is the best that
was seen. Of the chunks the best are kept, as many as hold `keep` tokens; the next stage cuts them into smaller ones. A
stage that would keep everything is left out, and with fewer than `full_at` tokens between it keeps so much less, rounded
up.

Besides: `selected` [query blocks, kv_heads, n], u8: what the block's last row reads, but for causality.
"""

from common import Array, attend, clear, first_clear, heads, math, np, prefill, widen

BLOCK = 64


def make(name: str, settings: dict, n: int, seed: int, wide: bool = False) -> None:
    kv_heads = 1 if wide else 2
    drawn = heads(seed, n=n, kv_heads=kv_heads, group=2, d=16)
    q, k, v = widen(*drawn) if wide else drawn
    at = np.arange(n)
    block_q, average, full_at = settings["block_q"], settings["average"], settings["full_at"]
    blocks = range(0, n, block_q)

    def up(tokens: int) -> int:
        return -(-tokens // BLOCK) * BLOCK

    def search(
        stages: list[dict],
        sink: int = settings["sink"],
        window: int = settings["window"],
        average: int = average,
        full_at: int = full_at,
        middle: bool = True,
        best: bool = True,
        first_head: bool = False,
        one_list: bool = False,
        sum_heads: bool = False,
    ) -> Array:
        """[query blocks, kv_heads, n]"""
        selected = np.zeros((len(blocks), kv_heads, n), bool)
        for b, start in enumerate(blocks):
            rows = at[start : start + block_q]
            means = np.array([q[rows[rows // average == g]].mean(axis=0) for g in np.unique(rows // average)])
            for h in range(kv_heads):
                own = range(2 * h, 2 * h + (1 if first_head else 2))
                products = np.stack([means[:, g] @ k[:, 0 if one_list else h].T for g in own])
                score = (products.sum(axis=0) if sum_heads else products.max(axis=0)).max(axis=0)
                near = max(start - up(window), 0)
                far = min(up(sink), near)
                kept, candidates = [(far, near)] if far < near else [], near - far
                for stage in stages:
                    keep = stage["keep"]
                    if full_at > 0:
                        keep = math.ceil(keep * min(candidates / full_at, 1))
                    if keep >= sum(high - low for low, high in kept):
                        continue
                    size = stage["chunk"]
                    chunks = [(c, min(c + size, high)) for low, high in kept for c in range(low, high, size)]
                    scores = np.array([descend(score, *chunk, middle, best) for chunk in chunks])
                    order = np.argsort(-scores, kind="stable")
                    taken = max(keep // size, 1)
                    if taken < len(order):
                        clear(scores[order[taken - 1]], scores[order[taken]], np.abs(scores).max())
                    kept = sorted(chunks[i] for i in order[:taken])
                selected[b, h, : up(sink)] = True
                selected[b, h, near : start + block_q] = True
                for low, high in kept:
                    selected[b, h, low:high] = True
        return selected

    def descend(score: Array, low: int, high: int, middle: bool, best: bool) -> float:
        seen = -math.inf
        while high - low > 1:
            half = low + (high - low) // 2
            a = score[low + (half - low) // 2 if middle else low]
            b = score[half + (high - half) // 2 if middle else half]
            clear(a, b, np.abs(score).max())
            low, high = (half, high) if b > a else (low, half)
            seen = max(seen, a, b) if best else max(a, b)
        return seen

    def output(selected: Array) -> Array:
        return attend(q, k, v, selected[at // block_q])

    stages = settings["stages"]
    half = [stage | {"keep": stage["keep"] // 2} for stage in stages]
    selected = search(stages)
    out = output(selected)
    wrong = {
        "chunks' first keys": search(stages, middle=False),
        "the last key's score": search(stages, best=False),
        "half of the tokens": search(half),
        "the last stage alone": search(stages[-1:]) if len(stages) > 1 else search([{"chunk": 32, "keep": 128}]),
        "the first head": search(stages, first_head=True),
        "the sum of the heads": search(stages, sum_heads=True),
        "other averages": search(stages, average=5 - average),
        "no sinks": search(stages, sink=0) if settings["sink"] else search(stages, sink=64),
        "a longer window": search(stages, window=settings["window"] + BLOCK),
        "the same at every length": search(stages, full_at=0) if full_at else search(stages, full_at=1000),
    }
    if kv_heads > 1:
        wrong["the first KV head"] = search(stages, one_list=True)
    attention = {"method": "hip", "dense_layers": 0} | settings
    misread = {key: output(other) for key, other in wrong.items()}
    prefill(name, attention, (q, k, v), out, misread, drawn if wide else None, selected=selected)


def main() -> None:
    stages = [{"chunk": 64, "keep": 256}, {"chunk": 16, "keep": 128}, {"chunk": 4, "keep": 40}]
    settings = {"block_q": 64, "average": 4, "sink": 40, "window": 64, "stages": stages, "full_at": 0}
    first_clear(lambda seed: make("hip", settings, 701, seed))
    whole = {"block_q": 128, "average": 1, "sink": 0, "window": 0, "stages": [{"chunk": 16, "keep": 128}], "full_at": 500}
    first_clear(lambda seed: make("hip-scaled", whole, 701, seed))
    first_clear(lambda seed: make("hip-wide", settings | {"sink": 0}, 445, seed, wide=True))


if __name__ == "__main__":
    main()
