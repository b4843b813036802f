#!/usr/bin/env python3
"""Quantised keys: top-k by the scores of keys at two bits a channel (see common.py).

Channel by channel, the visible keys of each block of 64 lie between their least and largest; a quarter of that is a step, and a key
stands where the middle of its quarter is. Middle of the first and step are rounded to bfloat16. Scores are divided by
sqrt(1 + pi variance / 4), where the variance is that of what each step may hide, sum (q step)^2 / 12 / d, the mean over the blocks 1, 3, 5 and 7
eighths of the way through the visible ones. An implementation may round queries, so what is taken and what is not lie well apart.
"""

from common import Array, Choose, Unclear, between, count, decode, f16, first_clear, heads, importance, math, np, top

SETTINGS = {"method": "quantized_keys", "k": 12, "sink": 4, "window": 16, "dense_layers": 0}
BLOCK = 64
APART = 0.05  # The last key taken and the next lie so far apart, relatively.


def bf16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def steps(keys: Array, axis: int = 0, parts: int = 4) -> tuple[Array, Array]:
    low, high = keys.min(axis=axis, keepdims=True), keys.max(axis=axis, keepdims=True)
    return low, (high - low) / parts


def quarters(keys: Array, axis: int = 0, parts: int = 4) -> Array:
    low, step = steps(keys, axis, parts)
    code = np.floor((keys - low) / np.where(step > 0, step, 1)).clip(0, parts - 1)
    return bf16(low + step / 2) + bf16(step) * code


def to_ends(keys: Array) -> Array:
    """The nearest of four levels from the least to the largest."""
    low, high = keys.min(axis=0), keys.max(axis=0)
    step = np.where(high > low, (high - low) / 3, 1)
    return low + step * np.round((keys - low) / step)


def around_zero(keys: Array) -> Array:
    step = np.abs(keys).max(axis=0) / 2
    return (np.floor(keys / step).clip(-2, 1) + 0.5) * step


def blocks(keys: Array, of: int, quantize) -> Array:
    return np.concatenate([quantize(keys[start : start + of]) for start in range(0, len(keys), of)])


def exact(seed: int, n: int, kv_heads: int, group: int, d: int, rows: int) -> tuple[Array, Array, Array]:
    """Heads that rounding queries times steps to 127 whole numbers leaves as they are: the first two keys of each block span the same
    range in every channel, and queries are such numbers themselves. Scores are as wide as those of other heads."""
    q, k, v = heads(seed, n=n, kv_heads=kv_heads, group=group, d=d, rows=rows)
    random = np.random.default_rng(seed)
    k = f16(k.clip(-2, 2))
    for start in range(0, n - 1, BLOCK):
        k[start] = random.choice([-2, 2], k[start].shape)
        k[start + 1] = -k[start]
    whole = np.round(127 * q / np.abs(q).max(axis=-1, keepdims=True))
    return whole / 64, k, v


def doubt(q: Array, keys: Array, start: int = 0) -> Array:
    """[group, 1]: what scores are divided by where `keys` from the one at `start` on are visible."""
    first = start // BLOCK
    n = math.ceil(len(keys) / BLOCK) - first
    starts = [(first + (2 * i + 1) * n // 8) * BLOCK for i in range(4)]
    squares = np.mean([bf16(steps(keys[at : at + BLOCK])[1][0]) ** 2 for at in starts], axis=0)
    return np.sqrt(1 + np.pi / 4 * (q**2 @ squares) / 12 / q.shape[1])[:, None]


def sure(q: Array, *_: object) -> Array:
    return np.ones((len(q), 1))


def guessed(q: Array, keys: Array, start: int = 0, quantize=quarters, of: int = BLOCK, doubt=doubt) -> Array:
    """[group, keys from `start` on]: scores by which shares are told."""
    stand = blocks(keys, of, quantize)[start:]
    return q @ stand.T / math.sqrt(q.shape[1]) / doubt(q, keys, start)


def chooser(
    quantize=quarters, of: int = BLOCK, score=importance, more: int = 0, apart: float = 0.0, doubt=doubt
) -> Choose:
    def choose(q: Array, keys: Array, _: int) -> Array:
        share = score(guessed(q, keys, 0, quantize, of, doubt))
        candidates = between(len(keys), SETTINGS["sink"], SETTINGS["window"])
        k = count(SETTINGS["k"], len(keys)) + more
        chosen = ~candidates
        chosen[clearly(share, np.flatnonzero(candidates), k, apart)] = True
        return chosen

    return choose


def clearly(share: Array, candidates: Array, k: int, apart: float = APART) -> Array:
    """The candidates of largest shares, if the next lies so far apart."""
    ranked = np.sort(share[candidates])[::-1]
    if ranked[k - 1] - ranked[k] < apart * ranked[k - 1]:
        raise Unclear("a query's rounding would decide")
    return top(share, candidates, k, ties=True)


def make(name: str, shape: dict, seed: int, other: dict[str, Choose]) -> None:
    wrong = {
        "whole keys": chooser(lambda keys: keys),
        "eight parts": chooser(lambda keys: quarters(keys, parts=8)),
        "token by token": chooser(lambda keys: quarters(keys, axis=1)),
        "levels at the ends": chooser(to_ends),
        "around zero": chooser(around_zero),
        "blocks of 32": chooser(of=32),
        "one block": chooser(of=10_000),
        "summed scores": chooser(score=lambda s: s.sum(axis=0)),
        "the first head": chooser(score=lambda s: importance(s[:1])),
        "one key more": chooser(more=1),
        "one key less": chooser(more=-1),
    }
    decode(name, SETTINGS, heads(seed, **shape), chooser(apart=APART), wrong | other)


def main() -> None:
    # The last block has 25 and 26 keys.
    shape, other = {"n": 410, "kv_heads": 1, "group": 3, "d": 32, "rows": 2}, {"sure of scores": chooser(doubt=sure)}
    first_clear(lambda seed: make("quantized_keys", shape, seed, other))
    shape = {"n": 150, "kv_heads": 1, "group": 4, "d": 128, "rows": 1}
    first_clear(lambda seed: make("quantized_keys-wide", shape, seed, {}))


if __name__ == "__main__":
    main()
