#!/usr/bin/env python3
"""Delta Attention, for prefill (see common.py): a window's output, corrected by what every gamma-th row lacks.

Anchors are the rows 0, gamma, 2 gamma, ... below the tail; dense minus sparse there is added to the rows from each up
to the next. The tail, dense, begins at the largest multiple of gamma that leaves max(128, gamma) rows or more.
`recompute` makes only the anchors and the tail dense.
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


def make(mode: str, shape: dict, gamma: int, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    n = len(q)
    full = dense(q, k, v)

    def base(sink: int, window: int) -> Array:
        mask = np.zeros((n, 1, n), bool)
        for row in range(n):
            mask[row, 0, : row + 1] = ~between(row + 1, sink, window)
        return attend(q, k, v, mask)

    sparse, spread = base(4, 32), mode == "delta"
    tail = (n - max(128, gamma)) // gamma * gamma
    out = correct(sparse, full, gamma, spread, tail)
    wrong = {
        "the other mode": correct(sparse, full, gamma, not spread, tail),
        "anchors counted from one": correct(sparse, full, gamma, spread, tail, gamma - 1),
        "a longer tail": correct(sparse, full, gamma, spread, tail - gamma),
        "a shorter tail": correct(sparse, full, gamma, spread, tail + gamma),
        "a tail of exactly 128": correct(sparse, full, gamma, spread, n - 128),
        "no tail": correct(sparse, full, gamma, spread, n),
        "another gamma": correct(sparse, full, gamma // 2, spread, tail),
        "a longer window": correct(base(4, 33), full, gamma, spread, tail),
        "no correction": sparse,
    }
    check(out, full, wrong)
    settings = {"method": "delta", "gamma": gamma, "mode": mode, "base": BASE}
    write(f"delta-{mode}", {"prefill": settings}, {"q": q, "k": k, "v": v, "out": out})


def main() -> None:
    shape = {"n": 347, "kv_heads": 2, "group": 2, "d": 16}
    first_clear(lambda seed: make("delta", shape, 16, seed))
    first_clear(lambda seed: make("recompute", shape, 16, seed))


if __name__ == "__main__":
    main()
