#!/usr/bin/env python3
"""BigBird, for causal prefill (see common.py): global blocks, a band of blocks and random blocks, of 64 tokens each.

The global blocks are the first; the band ends with the rows' own block; both are rounded up to blocks, shares being of
the prompt. Of the blocks between, the rows of a block read the first `random` in the order of a permutation that Philox
keys with the seed 0 and the counter (layer 0, KV head, the rows' block).

Besides: `selected` [query blocks, kv_heads, n], u8: what a block's rows read, but for causality.
"""

from common import Array, attend, check, dense, first_clear, heads, math, np, permutation, write

BLOCK = 64


def make(name: str, settings: dict, n: int, seed: int) -> None:
    q, k, v = heads(seed, n=n, kv_heads=2, group=2, d=16)
    at = np.arange(n)

    def blocks(amount: float) -> int:
        return math.ceil((math.ceil(amount * n) if amount < 1 else amount) / BLOCK)

    def select(first: int = 0, near: int = 0, more: int = 0, shift: int = 0, one_head: bool = False, last: bool = False) -> Array:
        selected = np.zeros((-(-n // BLOCK), 2, n), bool)
        for own in range(len(selected)):
            start = max(own + 1 - blocks(settings["window"]) - near, 0)
            between = range(min(blocks(settings["global"]) + first, start), start)
            for h in range(2):
                order = permutation(len(between), [0, 0], [0, 0 if one_head else h, own + shift]) if between else []
                size = settings["random"] + more
                drawn = order[-size:] if last else order[:size]
                chosen = [*range(between.start), *(between[i] for i in drawn), *range(start, own + 1)]
                selected[own, h] = np.isin(at // BLOCK, chosen)
        return selected

    def output(selected: Array) -> Array:
        return attend(q, k, v, selected[at // BLOCK])

    selected = select()
    out = output(selected)
    wrong = {
        "a global block more": select(first=1),
        "a global block less": select(first=-1),
        "a block more in the band": select(near=1),
        "a block less in the band": select(near=-1),
        "a random block more": select(more=1),
        "a random block less": select(more=-1),
        "the next block's draw": select(shift=1),
        "one draw for all heads": select(one_head=True),
        "the last of the draw": select(last=True),
    }
    check(out, dense(q, k, v), {key: output(other) for key, other in wrong.items()})
    write(name, {"prefill": {"method": "bigbird"} | settings}, {"q": q, "k": k, "v": v, "out": out, "selected": selected})


def main() -> None:
    first_clear(lambda seed: make("bigbird", {"global": 64, "window": 100, "random": 2}, 701, seed))
    first_clear(lambda seed: make("bigbird-share", {"global": 0.15, "window": 0.2, "random": 3}, 950, seed))


if __name__ == "__main__":
    main()
