#!/usr/bin/env python3
"""MInference's three patterns, for prefill and for each query head by itself (see common.py).

- a_shape: the first `init` tokens and the last `local` ones.
- vertical_slash: the probabilities of the last `queries` rows are summed by key and by offset row - key. The first
  30 keys and the first 100 offsets are always among the best `vertical` keys and `slash` offsets. Query block qb (64
  rows) reads, for each such offset o, whole every block that keys 64 qb - o to 64 qb + 63 - o touch, and the best keys.
- block_sparse: means of q and k over blocks of 64 (of the last block's rows, however few), each query block reading
  its own block and the best by mean_q.mean_k of the earlier ones, `blocks` in all.

Everything is causal. Besides, as u8: `columns` and `offsets` [q_heads, n]; `blocks` [q_heads, query and key blocks].
"""

from common import Array, attend, between, check, clear, dense, first_clear, heads, math, np, scores, softmax, top
from common import write

BLOCK = 64
FIRST_COLUMNS, FIRST_OFFSETS = 30, 100


def a_shape(seed: int) -> None:
    q, k, v = heads(seed, n=333, kv_heads=2, group=2, d=16)
    n = len(q)

    def output(init: int, local: int) -> Array:
        mask = np.zeros((n, 1, n), bool)
        for row in range(n):
            mask[row, 0, : row + 1] = ~between(row + 1, init, local)
        return attend(q, k, v, mask)

    wrong = {"a longer init": output(17, 100), "a longer window": output(16, 101), "a shorter window": output(16, 99)}
    out = output(16, 100)
    check(out, dense(q, k, v), wrong)
    settings = {"method": "minference", "pattern": "a_shape", "init": 16, "local": 100}
    write("minference-a_shape", {"prefill": settings}, {"q": q, "k": k, "v": v, "out": out})


def best(mass: Array, k: int, forced: int) -> Array:
    """[n]: the k largest of mass [n], the first `forced` counted as infinitely large."""
    chosen = np.arange(len(mass)) < forced
    chosen[top(mass, np.flatnonzero(~chosen), k - forced)] = True
    return chosen


def vertical_slash(seed: int) -> None:
    settings = {"method": "minference", "pattern": "vertical_slash", "vertical": 40, "slash": 120, "queries": 64}
    q, k, v = heads(seed, n=601, kv_heads=1, group=3, d=16)
    n, q_heads = q.shape[:2]
    at = np.arange(n)
    p = softmax(scores(q, k))

    def choose(vertical=40, slash=120, queries=64, columns=FIRST_COLUMNS, offsets=FIRST_OFFSETS) -> tuple[Array, Array]:
        rows = at[n - queries :]
        offset = np.maximum(rows[:, None] - at, 0)
        down = p[rows].sum(axis=0)
        along = [np.bincount(offset.ravel(), p[rows, h].ravel(), n) for h in range(q_heads)]
        return (
            np.array([best(mass, vertical, columns) for mass in down]),
            np.array([best(mass, slash, offsets) for mass in along]),
        )

    def mask(columns: Array, offsets: Array, whole: bool = True, unmoved: bool = False) -> Array:
        read = np.zeros((n, q_heads, n), bool)
        for h in range(q_heads):
            for start in range(0, n, BLOCK):
                touched = np.zeros(n + BLOCK, bool)
                for o in np.flatnonzero(offsets[h]):
                    low, high = start - o, start - o if unmoved else start + BLOCK - 1 - o
                    if high >= 0:
                        touched[max(low, 0) // BLOCK * BLOCK : (high // BLOCK + 1) * BLOCK] = True
                for row in range(start, min(start + BLOCK, n)):
                    if whole:
                        read[row, h] = touched[:n]
                    else:
                        read[row, h, row - at[: row + 1][offsets[h, : row + 1]]] = True
            read[:, h] |= columns[h]
        return read & (at <= at[:, None])[:, None]

    columns, offsets = choose()
    wrong = {
        "keys of offsets alone": mask(columns, offsets, whole=False),
        "one block an offset": mask(columns, offsets, unmoved=True),
        "no columns": mask(columns & False, offsets),
        "no offsets": mask(columns, offsets & (at < FIRST_OFFSETS)),
        "no forced columns": mask(*choose(columns=0)),
        "no forced offsets": mask(*choose(offsets=0)),
        "forced columns besides": mask(*choose(vertical=70)),
        "a column more": mask(*choose(vertical=41)),
        "a column less": mask(*choose(vertical=39)),
        "other queries": mask(*choose(queries=32)),
        "one list for the group": mask(*(np.repeat(x.any(axis=0)[None], q_heads, axis=0) for x in [columns, offsets])),
        "the first head's list": mask(*(np.repeat(x[:1], q_heads, axis=0) for x in [columns, offsets])),
    }
    out = attend(q, k, v, mask(columns, offsets))
    check(out, dense(q, k, v), {name: attend(q, k, v, other) for name, other in wrong.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "columns": columns, "offsets": offsets}
    write("minference-vertical_slash", {"prefill": settings}, arrays)


def block_sparse(seed: int) -> None:
    settings = {"method": "minference", "pattern": "block_sparse", "blocks": 3}
    q, k, v = heads(seed, n=457, kv_heads=2, group=2, d=16)
    n, q_heads, d = q.shape
    starts = np.arange(0, n, BLOCK)
    at = np.arange(n)

    def mean(x: Array) -> Array:
        """[blocks, heads, d]"""
        return np.array([x[start : start + BLOCK].mean(axis=0) for start in starts])

    def choose(blocks: int = 3, own: bool = True, shared: bool = False) -> Array:
        """[q_heads, query blocks, key blocks]"""
        pooled_q, pooled_k = mean(q), np.repeat(mean(k), q_heads // k.shape[1], axis=1)
        s = np.einsum("qhd,khd->hqk", pooled_q, pooled_k) / math.sqrt(d)
        if shared:
            s = np.repeat(s.reshape(2, -1, *s.shape[1:]).sum(axis=1), 2, axis=0)
        chosen = np.zeros(s.shape, bool)
        for h in range(q_heads):
            for qb in range(len(starts)):
                earlier = np.arange(qb if own else qb + 1)
                ranked = earlier[np.argsort(-s[h, qb, earlier], kind="stable")]
                taken = blocks - 1 if own else blocks
                if taken < len(ranked):
                    clear(s[h, qb, ranked[taken - 1]], s[h, qb, ranked[taken]], np.abs(s[h, qb, earlier]).max())
                chosen[h, qb, ranked[:taken]] = True
                chosen[h, qb, qb] |= own
        return chosen

    def output(chosen: Array) -> Array:
        read = np.repeat(np.repeat(chosen, BLOCK, axis=1), BLOCK, axis=2)[:, :n, :n].swapaxes(0, 1)
        own = (at == at[:, None])[:, None]
        return attend(q, k, v, read | own)

    chosen = choose()
    out = output(chosen)
    wrong = {
        "a block more": choose(blocks=4),
        "a block less": choose(blocks=2),
        "its own block not forced": choose(own=False),
        "one list for the group": choose(shared=True),
    }
    check(out, dense(q, k, v), {name: output(other) for name, other in wrong.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "blocks": chosen}
    write("minference-block_sparse", {"prefill": settings}, arrays)


if __name__ == "__main__":
    first_clear(a_shape)
    first_clear(vertical_slash)
    first_clear(block_sparse)
