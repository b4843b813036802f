#!/usr/bin/env python3
"""Delta Attention, for prefill (see common.py): a window's output, corrected by what every gamma-th row lacks.

Anchors are the rows 0, gamma, 2 gamma, ... below the tail; dense minus sparse there is added to the rows from each up
to the next. The tail, dense, begins at the largest multiple of gamma that leaves max(tail, gamma) rows or more; tail is 128
unless it is given, and 0 is none. `recompute` makes only the anchors and the tail dense. Underneath is a window, or one of
minference.py's patterns, which sees the tail's rows too.
"""

from collections.abc import Callable

from common import Array, attend, between, dense, first_clear, heads, np, prefill, scores, softmax, widen

import minference

BASE = {"method": "streaming_llm", "sink": 4, "window": 32}


def correct(sparse: Array, full: Array, gamma: int, spread: bool, tail: int, first: int = 0) -> Array:
    out = sparse.copy()
    for anchor in range(first, tail, gamma):
        end = min(anchor + gamma, tail) if spread else anchor + 1
        out[anchor:end] += full[anchor] - sparse[anchor]
    out[tail:] = full[tail:]
    return out


def near(sink: int, window: int) -> Callable[[Array, Array], Array]:
    """The mask of a window."""

    def mask(q: Array, _: Array) -> Array:
        n = len(q)
        mask = np.zeros((n, 1, n), bool)
        for row in range(n):
            mask[row, 0, : row + 1] = ~between(row + 1, sink, window)
        return mask

    return mask


def striped(vertical: int, slash: int, queries: int) -> Callable[[Array, Array], Array]:
    def mask(q: Array, k: Array) -> Array:
        p = softmax(scores(q, k))
        return minference.striped(*minference.stripes(p, vertical, slash, queries))

    return mask


def blocks(count: int) -> Callable[[Array, Array], Array]:
    def mask(q: Array, k: Array) -> Array:
        return minference.tiled(minference.pooled(q, k, [count] * q.shape[1]), len(q))

    return mask


def make(name: str, settings: dict, shape: dict, seed: int, base=near(4, 32), other=near(4, 33), wide=False) -> None:
    """`base` is the mask of the method underneath, `other` one that it might be taken for."""
    gamma, mode, least = settings["gamma"], settings["mode"], settings.get("tail", 128)
    drawn = heads(seed, **shape)
    q, k, v = widen(*drawn) if wide else drawn
    n = len(q)
    full = dense(q, k, v)
    sparse, spread = attend(q, k, v, base(q, k)), mode == "delta"
    tail = (n - max(least, gamma)) // gamma * gamma if least else n
    out = correct(sparse, full, gamma, spread, tail)
    wrong = {
        "the other mode": correct(sparse, full, gamma, not spread, tail),
        "anchors counted from one": correct(sparse, full, gamma, spread, tail, gamma - 1),
        "a longer tail": correct(sparse, full, gamma, spread, tail - gamma),
        "another gamma": correct(sparse, full, gamma // 2, spread, tail),
        "another base": correct(attend(q, k, v, other(q, k)), full, gamma, spread, tail),
        "no correction": sparse,
    }
    if least:
        wrong["a shorter tail"] = correct(sparse, full, gamma, spread, tail + gamma)
        wrong["a tail of exactly so many rows"] = correct(sparse, full, gamma, spread, n - least)
        wrong["no tail"] = correct(sparse, full, gamma, spread, n)
    else:
        wrong["a tail of one row"] = correct(sparse, full, gamma, spread, n - 1)
        wrong["nothing behind the last anchor"] = correct(sparse, full, gamma, spread, n)
        wrong["nothing behind the last anchor"][(n - 1) // gamma * gamma + 1 :] = sparse[(n - 1) // gamma * gamma + 1 :]
    prefill(name, settings, (q, k, v), out, wrong, drawn if wide else None)


def main() -> None:
    shape = {"n": 347, "kv_heads": 2, "group": 2, "d": 16}
    for mode in ["delta", "recompute"]:
        settings = {"method": "delta", "gamma": 16, "mode": mode, "base": BASE}
        first_clear(lambda seed: make(f"delta-{mode}", settings, shape, seed))
    shape |= {"n": 203, "kv_heads": 1}
    for name, tail in [("no-tail", 0), ("short-tail", 40)]:
        settings = {"method": "delta", "gamma": 16, "tail": tail, "mode": "delta", "base": BASE}
        first_clear(lambda seed: make(f"delta-{name}", settings, shape, seed))
    settings = {"method": "delta", "gamma": 16, "tail": 36, "mode": "delta", "base": BASE}
    first_clear(lambda seed: make("delta-wide", settings, shape, seed, wide=True))
    shape = {"n": 651, "kv_heads": 1, "group": 2, "d": 8}
    striping = {"method": "minference", "pattern": "vertical_slash", "vertical": 40, "slash": 110, "queries": 64}
    settings = {"method": "delta", "gamma": 48, "tail": 100, "mode": "delta", "base": striping}
    masks = striped(40, 110, 64), striped(36, 110, 64)
    first_clear(lambda seed: make("delta-vertical_slash", settings, shape, seed, *masks))
    settings = settings | {"base": {"method": "minference", "pattern": "block_sparse", "blocks": 2}}
    shape |= {"n": 347, "d": 16}
    first_clear(lambda seed: make("delta-block_sparse", settings, shape, seed, blocks(2), blocks(3)))


if __name__ == "__main__":
    main()
