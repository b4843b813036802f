#!/usr/bin/env python3
"""MInference's three patterns, for prefill and for each query head by itself (see common.py).

- a_shape: the first `init` tokens and the last `local` ones.
- vertical_slash: the probabilities of the last `queries` rows are summed by key and by offset row - key. The first
  30 keys and the first 100 offsets are always among the best `vertical` keys and `slash` offsets. Query block qb (64
  rows) reads, for each such offset o, whole every block that keys 64 qb - o to 64 qb + 63 - o touch, and the best keys.
- block_sparse: means of q and k over blocks of 64 (of the last block's rows, however few), each query block reading
  its own block and the best by mean_q.mean_k of the earlier ones, `blocks` in all.
- auto: for each head the one of the three that keeps most of the last `queries` rows' probability, where a_shape and
  block_sparse have as many keys as vertical_slash reads for the last row: the first `init` and the last others, and
  their number over 64, rounded up.

Everything is causal. Besides, as u8: `columns` and `offsets` [q_heads, n]; `blocks` [q_heads, query and key blocks];
`patterns` [q_heads] by the order above.
"""

from common import Array, Unclear, attend, between, clear, f16, first_clear, heads, math, np, prefill, scores, softmax
from common import top, widen

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
    settings = {"method": "minference", "pattern": "a_shape", "init": 16, "local": 100}
    prefill("minference-a_shape", settings, (q, k, v), out, wrong)


def best(mass: Array, k: int, forced: int) -> Array:
    """[n]: the k largest of mass [n], the first `forced` counted as infinitely large."""
    chosen = np.arange(len(mass)) < forced
    chosen[top(mass, np.flatnonzero(~chosen), k - forced)] = True
    return chosen


def stripes(
    p: Array, vertical: int, slash: int, queries: int, columns=FIRST_COLUMNS, offsets=FIRST_OFFSETS
) -> tuple[Array, Array]:
    """Which keys and which offsets [q_heads, n] hold most of the last rows' probabilities p [n, q_heads, n]."""
    n, q_heads, _ = p.shape
    at = np.arange(n)
    rows = at[n - queries :]
    offset = np.maximum(rows[:, None] - at, 0)
    down = p[rows].sum(axis=0)
    along = [np.bincount(offset.ravel(), p[rows, h].ravel(), n) for h in range(q_heads)]
    return (
        np.array([best(mass, vertical, columns) for mass in down]),
        np.array([best(mass, slash, offsets) for mass in along]),
    )


def striped(columns: Array, offsets: Array, whole: bool = True, unmoved: bool = False) -> Array:
    """The mask [n, q_heads, n] of keys and offsets [q_heads, n]."""
    q_heads, n = columns.shape
    at = np.arange(n)
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


def vertical_slash(seed: int) -> None:
    settings = {"method": "minference", "pattern": "vertical_slash", "vertical": 40, "slash": 120, "queries": 64}
    q, k, v = heads(seed, n=601, kv_heads=1, group=3, d=16)
    n, q_heads = q.shape[:2]
    at = np.arange(n)
    p = softmax(scores(q, k))

    def choose(vertical=40, slash=120, queries=64, **forced: int) -> tuple[Array, Array]:
        return stripes(p, vertical, slash, queries, **forced)

    columns, offsets = choose()
    wrong = {
        "keys of offsets alone": striped(columns, offsets, whole=False),
        "one block an offset": striped(columns, offsets, unmoved=True),
        "no columns": striped(columns & False, offsets),
        "no offsets": striped(columns, offsets & (at < FIRST_OFFSETS)),
        "no forced columns": striped(*choose(columns=0)),
        "no forced offsets": striped(*choose(offsets=0)),
        "forced columns besides": striped(*choose(vertical=70)),
        "a column more": striped(*choose(vertical=41)),
        "a column less": striped(*choose(vertical=39)),
        "other queries": striped(*choose(queries=32)),
        "one list for the group": striped(*(np.repeat(x.any(axis=0)[None], q_heads, axis=0) for x in [columns, offsets])),
        "the first head's list": striped(*(np.repeat(x[:1], q_heads, axis=0) for x in [columns, offsets])),
    }
    out = attend(q, k, v, striped(columns, offsets))
    misread = {key: attend(q, k, v, other) for key, other in wrong.items()}
    prefill("minference-vertical_slash", settings, (q, k, v), out, misread, columns=columns, offsets=offsets)


def pooled(
    q: Array, k: Array, blocks: list[int], own: bool = True, shared: bool = False, misread: bool = False
) -> Array:
    """[q_heads, query blocks, key blocks]: what each head reads if it has so many blocks."""
    (n, q_heads, d), kv_heads = q.shape, k.shape[1]
    starts = np.arange(0, n, BLOCK)

    def mean(x: Array) -> Array:
        """[blocks, heads, d]"""
        return np.array([x[start : start + BLOCK].mean(axis=0) for start in starts])

    pooled_q, pooled_k = mean(q), np.repeat(mean(k), q_heads // kv_heads, axis=1)
    s = np.einsum("qhd,khd->hqk", pooled_q, pooled_k) / math.sqrt(d)
    if shared:
        s = np.repeat(s.reshape(kv_heads, -1, *s.shape[1:]).sum(axis=1), q_heads // kv_heads, axis=0)
    chosen = np.zeros(s.shape, bool)
    for h in range(q_heads):
        for qb in range(len(starts)):
            earlier = np.arange(qb if own else qb + 1)
            ranked = earlier[np.argsort(-s[h, qb, earlier], kind="stable")]
            taken = blocks[h] - 1 if own else blocks[h]
            if 0 < taken < len(ranked) and not misread:
                clear(s[h, qb, ranked[taken - 1]], s[h, qb, ranked[taken]], np.abs(s[h, qb, earlier]).max())
            chosen[h, qb, ranked[:taken]] = True
            chosen[h, qb, qb] |= own
    return chosen


def tiled(chosen: Array, n: int) -> Array:
    """The mask [n, q_heads, n] of blocks [q_heads, query blocks, key blocks]."""
    at = np.arange(n)
    read = np.repeat(np.repeat(chosen, BLOCK, axis=1), BLOCK, axis=2)[:, :n, :n].swapaxes(0, 1)
    return (read | (at == at[:, None])[:, None]) & (at <= at[:, None])[:, None]


def block_sparse(seed: int) -> None:
    settings = {"method": "minference", "pattern": "block_sparse", "blocks": 3}
    q, k, v = heads(seed, n=457, kv_heads=2, group=2, d=16)
    n, q_heads = q.shape[:2]

    def choose(blocks: int = 3, **how: bool) -> Array:
        return pooled(q, k, [blocks] * q_heads, **how)

    chosen = choose()
    out = attend(q, k, v, tiled(chosen, n))
    wrong = {
        "a block more": choose(blocks=4),
        "a block less": choose(blocks=2),
        "its own block not forced": choose(own=False),
        "one list for the group": choose(shared=True),
    }
    misread = {key: attend(q, k, v, tiled(other, n)) for key, other in wrong.items()}
    prefill("minference-block_sparse", settings, (q, k, v), out, misread, blocks=chosen)


def mixed_heads(seed: int, n: int, group: int, d: int) -> tuple[Array, Array, Array]:
    """One KV head whose keys lie by position, by kind, and by stretch, and query heads that care for one of them each."""
    rng = np.random.default_rng(seed)
    at = np.arange(n)
    place = np.stack([np.cos(2 * np.pi * at / 900), np.sin(2 * np.pi * at / 900)], axis=1)
    kind = (at % 41 == 17)[:, None] * 1.0
    stretch = ((at >= 140) & (at < 290))[:, None] * 1.0
    noise = 0.5 * rng.normal(size=(n, d - 4))
    k = np.concatenate([place, kind, stretch, noise], axis=1)
    q = 0.4 * rng.normal(size=(n, group, d))
    for g in range(group):
        care = g % 3
        if care == 0:
            q[:, g, :2] += 14 * place
        else:
            q[:, g, 1 + care] += [7, 5][care - 1]
    v = rng.normal(size=(n, 1, d)) + place[:, None, :1]
    return f16(q * math.sqrt(d) / 2), f16(k[:, None]), f16(v)


def auto(seed: int) -> None:
    settings = {"method": "minference", "pattern": "auto", "vertical": 40, "slash": 110, "init": 8, "queries": 48}
    record_auto("minference-auto", settings, mixed_heads(seed, n=591, group=4, d=8))


def wide(seed: int) -> None:
    settings = {"method": "minference", "pattern": "auto", "vertical": 40, "slash": 110, "init": 8, "queries": 48}
    narrow = mixed_heads(seed, n=591, group=4, d=8)
    record_auto("minference-wide", settings, widen(*narrow), narrow)


def record_auto(
    name: str, settings: dict, qkv: tuple[Array, Array, Array], narrow: tuple[Array, Array, Array] | None = None
) -> None:
    q, k, v = qkv
    n, q_heads = q.shape[:2]
    at = np.arange(n)
    p = softmax(scores(q, k))

    def masks(extra: int = 0, init: int = 8, keys_of=lambda counts: counts, queries: int = 48) -> list[Array]:
        """Each pattern's mask, of as many keys as vertical_slash reads for the last row."""
        slashes = striped(*stripes(p, 40, 110, queries))
        keys = keys_of(slashes[-1].sum(axis=1))
        local = np.maximum(keys - init + extra, 1)
        near = np.zeros((n, q_heads, n), bool)
        for row in at:
            for h in range(q_heads):
                near[row, h, : row + 1] = ~between(row + 1, init, local[h])
        blocks = [math.ceil(x / BLOCK) + extra for x in keys]
        return [near, slashes, tiled(pooled(q, k, blocks), n)]

    def choose(masks: list[Array], last: int = 48, misread: bool = True, pick=np.argmax) -> tuple[list[int], Array]:
        kept = np.array([[(p[n - last :, h] * mask[n - last :, h]).sum() for mask in masks] for h in range(q_heads)])
        for shares in [] if misread else kept:
            clear(*np.sort(shares)[-2:])
        patterns = [int(pick(shares)) for shares in kept]
        return patterns, np.stack([masks[pattern][:, h] for h, pattern in enumerate(patterns)], axis=1)

    all_masks = masks()
    patterns, mask = choose(all_masks, misread=False)
    if set(patterns) != {0, 1, 2}:
        raise Unclear(f"the patterns {patterns}")

    def by(mask: Array) -> Array:
        return attend(q, k, v, mask)

    wrong = {
        "the worst": by(choose(all_masks, pick=np.argmin)[1]),
        "one for all heads": by(all_masks[int(np.bincount(patterns).argmax())]),
        "a key and a block more": by(choose(masks(extra=1))[1]),
        "no first tokens": by(choose(masks(init=0))[1]),
        "the settings' own sizes": by(choose(masks(keys_of=lambda counts: counts * 0 + 150))[1]),
        "other queries": by(choose(masks(queries=64), last=64)[1]),
    }
    wrong |= {f"all by pattern {i}": by(other) for i, other in enumerate(all_masks)}
    prefill(name, settings, qkv, by(mask), wrong, narrow, patterns=np.array(patterns))


if __name__ == "__main__":
    first_clear(a_shape)
    first_clear(vertical_slash)
    first_clear(block_sparse)
    first_clear(auto)
    first_clear(wide)
