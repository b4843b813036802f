#!/usr/bin/env python3
"""Delta Attention, for prefill (see common.py): a window's output, corrected by what every gamma-th row lacks.

Anchors are the rows 0, gamma, 2 gamma, ... below the tail; dense minus sparse there is added to the rows from each up
to the next. The tail, dense, begins at the largest multiple of gamma that leaves max(tail, gamma) rows or more; tail is 128
unless it is given, and 0 is none. `recompute` makes only the anchors and the tail dense.
"""

from common import Array, attend, between, check, dense, first_clear, heads, np, write

BASE = {"method": "streaming_llm", "sink": 4, "window": 32}


def correct(sparse: Array, full: Array, gamma: int, spread: bool, tail: int, first: int = 0) -> Array:
    out = sparse.copy()
    for anchor in range(first, tail, gamma):
        end = min(anchor + gamma, tail) if spread else anchor + 1
        out[anchor:end] += full[anchor] - sparse[anchor]
    out[tail:] = full[tail:]
    return out


def make(name: str, settings: dict, shape: dict, seed: int) -> None:
    gamma, mode, least = settings["gamma"], settings["mode"], settings.get("tail", 128)
    q, k, v = heads(seed, **shape)
    n = len(q)
    full = dense(q, k, v)

    def base(sink: int, window: int) -> Array:
        mask = np.zeros((n, 1, n), bool)
        for row in range(n):
            mask[row, 0, : row + 1] = ~between(row + 1, sink, window)
        return attend(q, k, v, mask)

    sparse, spread = base(4, 32), mode == "delta"
    tail = (n - max(least, gamma)) // gamma * gamma if least else n
    out = correct(sparse, full, gamma, spread, tail)
    wrong = {
        "the other mode": correct(sparse, full, gamma, not spread, tail),
        "anchors counted from one": correct(sparse, full, gamma, spread, tail, gamma - 1),
        "a longer tail": correct(sparse, full, gamma, spread, tail - gamma),
        "another gamma": correct(sparse, full, gamma // 2, spread, tail),
        "a longer window": correct(base(4, 33), full, gamma, spread, tail),
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
    check(out, full, wrong)
    write(name, {"prefill": settings}, {"q": q, "k": k, "v": v, "out": out})


def main() -> None:
    shape = {"n": 347, "kv_heads": 2, "group": 2, "d": 16}
    for mode in ["delta", "recompute"]:
        settings = {"method": "delta", "gamma": 16, "mode": mode, "base": BASE}
        first_clear(lambda seed: make(f"delta-{mode}", settings, shape, seed))
    shape |= {"n": 203, "kv_heads": 1}
    for name, tail in [("no-tail", 0), ("short-tail", 40)]:
        settings = {"method": "delta", "gamma": 16, "tail": tail, "mode": "delta", "base": BASE}
        first_clear(lambda seed: make(f"delta-{name}", settings, shape, seed))


if __name__ == "__main__":
    main()
