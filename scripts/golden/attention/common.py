"""What the golden scripts of the attention methods share: random heads, dense attention, Philox, a file writer.

Each script beside this one is our own reading of one method's paper, in NumPy's float64, and writes
crates/taper-attention/tests/golden/<method>[-variant].safetensors:

- `q` [rows, q_heads, d], `k` and `v` [n, kv_heads, d]: f16, and everything is computed from these rounded values.
  A prefill's rows are all n tokens, a decode's the last ones: row r stands at n - rows + r and sees keys 0..=there.
- `out` [rows, q_heads, d], f32; or, of the wide prefills, of the rows in `rows`, u32. Their `q`, `k` and `v` are to be
  multiplied by `spread` [d, 128], f16, so that the files stay small.
- `selected` [rows, kv_heads, n], u8: the keys that each decode row reads.
- `artefact.<name>`: learned parts, f32 with values that f16 has (indices: i64).
- metadata: `attention`, the request's attention object as JSON; `phase`; `n`; for some `seed`, `rope_theta` or `window`.

Query head h reads KV head h / group. Heads are drawn with heavy keys, slow drift and uneven norms. Each file is of the
first seed for which no decision is near a tie, so that f32 decides alike, and for which `out` is far from dense
attention and from what each of the script's misreadings (an index off by one, another order of ties) would give.

Needs numpy and safetensors. Run from the repository's root; running twice gives the same bytes:
    python scripts/golden/attention/all.py
    python scripts/golden/attention/quest.py
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray

OUT = Path("crates/taper-attention/tests/golden")
DTYPES = {"float16": "F16", "float32": "F32", "int64": "I64", "uint32": "U32", "uint8": "U8"}

TIE = 1e-4  # Two sides of a decision lie at least this far apart, relatively.
FAR = 0.05  # From dense attention, relatively, over the whole file.
WRONG = 4e-3  # From each misreading, relatively, in the row that differs most.

WIDE = 128  # Elements of a wide head.


class Unclear(Exception):
    """These heads leave a decision to rounding or a misreading unseen: try the next seed."""


def first_clear(make: Callable[[int], None]) -> None:
    for seed in range(500):
        try:
            return make(seed)
        except Unclear as unclear:
            reason = unclear
    raise SystemExit(f"no seed is clear; the last one: {reason}")


def clear(best: float, next_best: float, scale: float = 0.0) -> None:
    if abs(best - next_best) <= TIE * max(abs(best), abs(next_best), scale):
        raise Unclear(f"{best} and {next_best} are nearly equal")


def f16(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


# Heads


def rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotates [tokens, heads, d] as Hugging Face's Llama does: channel i turns with i + d/2."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def unrope(x: Array, positions: Array, theta: float) -> Array:
    return rope(x, -positions, theta)


def heads(
    seed: int, n: int, kv_heads: int, group: int, d: int, rows: int | None = None, theta: float | None = None
) -> tuple[Array, Array, Array]:
    """q [rows, kv_heads * group, d], k and v [n, kv_heads, d], as f16 holds them; rotated if theta is given.

    Channels differ in width. Keys drift along positions and queries with them; keys of two kinds are heavy, and each
    query head cares for a kind more at some times than at others. Heads of a group differ in sharpness.
    """
    rng = np.random.default_rng(seed)
    tokens = np.arange(n)
    late = tokens[n - (rows or n) :]
    q, k, v = np.empty((len(late), kv_heads * group, d)), np.empty((n, kv_heads, d)), np.empty((n, kv_heads, d))
    for h in range(kv_heads):
        width = np.exp(0.5 * rng.normal(size=d))
        width /= math.sqrt(np.mean(width**2))
        kinds = rng.normal(size=(2, d))
        waves, period, start = rng.normal(size=(3, 2, d)), rng.uniform(90, 400, size=3), rng.uniform(0, 1, size=3)

        def drift(at: Array) -> Array:
            angle = 2 * np.pi * (at[:, None] / period + start)
            return (np.cos(angle) @ waves[:, 0] + np.sin(angle) @ waves[:, 1]) / math.sqrt(3)

        norm = np.exp(0.3 * rng.normal(size=(n, 1)))
        k[:, h] = norm * (0.7 * rng.normal(size=(n, d)) + 0.8 * drift(tokens))
        v[:, h] = rng.normal(size=(n, d)) + drift(tokens)[:, ::-1]
        heavy, kind = rng.choice(n, size=n // 20, replace=False), rng.integers(2, size=n // 20)
        k[heavy, h] += 1.2 * kinds[kind]
        v[heavy, h] += 1.5 * kinds[kind][:, ::-1]
        k[:4, h] += 0.8 * kinds[0]
        k[:, h] *= width
        common = rng.normal(size=(len(late), d))
        for g in range(group):
            phase = 2 * np.pi * (late[:, None] / rng.uniform(60, 200) + rng.uniform(0, 1, size=2))
            care = (0.9 + 0.6 * np.cos(phase)) @ kinds
            own = 0.4 * common + 0.4 * rng.normal(size=(len(late), d)) + 0.9 * drift(late) + care
            scores = (own * width) @ k[:, h].T / math.sqrt(d)
            q[:, h * group + g] = own * width * (1.3 + 0.5 * (g % 3)) / scores.std()
    if theta is not None:
        q, k = rope(q, late, theta), rope(k, tokens, theta)
    return f16(q), f16(k), f16(v)


def widen(*narrow: Array) -> tuple[Array, ...]:
    """[tokens, heads, d] over 128 elements, uneven ones, such that scores stay what they were."""
    matrix = spreading(narrow[0].shape[2])
    return tuple(x @ matrix for x in narrow)


def spreading(d: int) -> Array:
    """[d, 128]"""
    orthogonal = np.linalg.qr(np.random.default_rng(d).normal(size=(WIDE, d)))[0].T
    return f16(orthogonal * (WIDE / d) ** 0.25)


# Attention


def softmax(scores: Array) -> Array:
    """Over the last axis; -inf gets nothing."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def seen(rows: int, n: int) -> Array:
    """[rows, n]: which keys the last `rows` tokens of n see."""
    return np.arange(n) <= np.arange(n - rows, n)[:, None]


def scores(q: Array, k: Array) -> Array:
    """[rows, q_heads, n]: q.k / sqrt(d), and -inf where a row does not see."""
    group = q.shape[1] // k.shape[1]
    s = np.einsum("rhd,nhd->rhn", q, np.repeat(k, group, axis=1)) / math.sqrt(q.shape[2])
    return np.where(seen(len(q), len(k))[:, None], s, -np.inf)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Plain softmax attention [rows, q_heads, d] over a mask [rows, kv_heads or q_heads or 1, n]; causal besides."""
    mask = np.repeat(mask, q.shape[1] // mask.shape[1], axis=1)
    p = softmax(np.where(mask, scores(q, k), -np.inf))
    return np.einsum("rhn,nhd->rhd", p, np.repeat(v, q.shape[1] // v.shape[1], axis=1))


def dense(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, np.ones((len(q), 1, len(k)), bool))


# Choosing


def between(m: int, sink: int, window: int) -> Array:
    """[m]: which of m visible keys are neither among the first `sink` nor among the last `window`."""
    at = np.arange(m)
    return (at >= sink) & (at < m - window)


def count(k: float, m: int) -> int:
    """A whole number, or a share below 1 of the visible keys, rounded up."""
    if k >= 1:
        return int(k)
    if abs(k * m - round(k * m)) < 0.01:
        raise Unclear(f"{k} of {m} is nearly whole")
    return math.ceil(k * m)


def top(importance: Array, candidates: Array, k: int, ties: bool = False) -> Array:
    """Indices of the k most important candidates, the lower index first among equals."""
    ranked = candidates[np.argsort(-importance[candidates], kind="stable")]
    if 0 < k < len(ranked) and not ties:
        clear(importance[ranked[k - 1]], importance[ranked[k]])
    return ranked[:k]


def importance(logits: Array) -> Array:
    """[units]: each head's softmax over all units [group, units], summed over the heads."""
    return softmax(logits).sum(axis=0)


# choose(q [group, d], keys [m, d], KV head) -> which of the m keys are read
Choose = Callable[[Array, Array, int], Array]


def selection(q: Array, k: Array, choose: Choose) -> Array:
    """[rows, kv_heads, n]: the keys that each decode row reads, one list per KV head."""
    rows, n, kv_heads = len(q), len(k), k.shape[1]
    group = q.shape[1] // kv_heads
    selected = np.zeros((rows, kv_heads, n), bool)
    for r in range(rows):
        m = n - rows + r + 1
        for h in range(kv_heads):
            selected[r, h, :m] = choose(q[r, h * group : (h + 1) * group], k[:m, h], h)
    return selected


# Randomness


def philox(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al. 2011."""
    (k0, k1), (a, b, c, d) = key, counter
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ d ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


# The paper's known answers.
assert philox([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
assert philox([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
assert philox([0xA4093822, 0x299F31D0], [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]) == [
    0xD16CFE09,
    0x94FDCCEB,
    0x5001E420,
    0x24126EA1,
]


def permutation(n: int, key: list[int], stream: list[int]) -> list[int]:
    """0..n in the order of a keyed permutation: six Feistel rounds over the next power of two, of an odd number of bits with the
    smaller half first; a point that lands at n or beyond goes through the rounds again until it does not. The rounds' keys
    are the words of Philox for the numbers 0x50450000 and 0x50450001 of the stream."""
    keys = philox(key, stream + [0x50450000]) + philox(key, stream + [0x50450001])[:2]
    bits = (n - 1).bit_length()
    sizes = [bits // 2, bits - bits // 2]

    def land(point: int) -> int:
        halves = [point >> sizes[1], point & (1 << sizes[1]) - 1]
        for turn, k in enumerate(keys):
            x = (halves[1 - turn % 2] + k) * 0x9E3779B1 & 0xFFFFFFFF
            x = (x ^ x >> 15) * 0x85EBCA77 & 0xFFFFFFFF
            halves[turn % 2] ^= (x ^ x >> 13) & (1 << sizes[turn % 2]) - 1
        return halves[0] << sizes[1] | halves[1]

    points = []
    for i in range(n):
        point = land(i)
        while point >= n:
            point = land(point)
        points.append(point)
    assert sorted(points) == list(range(n))
    return points


def order(fixed: Array, seed: int, head: int) -> list[int]:
    """The permutation of all m keys by which is drawn for the last of the m positions in layer 0."""
    return permutation(len(fixed), [seed & 0xFFFFFFFF, seed >> 32], [0, head, len(fixed) - 1])


def drawn(fixed: Array, seed: int, head: int) -> Array:
    """Keys that are not fixed [m], in the order of drawing."""
    return np.array([key for key in order(fixed, seed, head) if not fixed[key]])


def weighed(q: Array, k: Array, v: Array, weights: Array) -> Array:
    """Attention [rows, q_heads, d] in which a key counts as often as its weight [rows, kv_heads, n] says."""
    weights = np.repeat(weights, q.shape[1] // weights.shape[1], axis=1)
    s = scores(q, k)
    e = weights * np.exp(s - s.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return np.einsum("rhn,nhd->rhd", p, np.repeat(v, q.shape[1] // v.shape[1], axis=1))


# Files


def difference(a: Array, b: Array) -> float:
    """The largest relative distance of a row and head."""
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())


def check(out: Array, full: Array, wrong: dict[str, Array], far: float = FAR) -> None:
    """Refuses heads on which the method is dense attention or one of its misreadings, by name, is the method."""
    if np.linalg.norm(out - full) < far * np.linalg.norm(full):
        raise Unclear("the output is nearly dense attention's")
    for name, other in wrong.items():
        if difference(other, out) < WRONG:
            raise Unclear(f"the misreading `{name}` changes nothing")


def write(name: str, attention: dict, arrays: dict[str, Array], **metadata: str | int | float) -> None:
    """Writes q, k, v and what spreads them as f16, floats as f32, masks as u8; the bytes depend on nothing else."""
    tensors = {}
    for key, x in arrays.items():
        half = key in ["q", "k", "v", "spread"]
        if half or key.startswith("artefact.") and x.dtype == np.float64:
            assert (f16(x) == x).all(), key
        kind = np.float16 if half else {"float64": np.float32, "bool": np.uint8}.get(x.dtype.name)
        tensors[key] = np.ascontiguousarray(x, kind or x.dtype)
        assert np.isfinite(tensors[key]).all(), key
    phase = next(iter(attention))
    about = {"attention": json.dumps(attention), "phase": phase, "n": str(len(arrays["k"]))}
    header = {"__metadata__": about | {key: str(value) for key, value in metadata.items()}}
    # Wide elements first, as the library orders them, so that all lie aligned.
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    end = 0
    for key in order:
        x = tensors[key]
        header[key] = {"dtype": DTYPES[x.dtype.name], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(tensors[key].tobytes() for key in order))
    read = load_file(path)
    assert read.keys() == tensors.keys() and all((read[key] == tensors[key]).all() for key in order)
    print(f"{path.name}: {path.stat().st_size // 1024} KiB")


def decode(
    name: str,
    attention: dict,
    qkv: tuple[Array, Array, Array],
    choose: Choose,
    wrong: dict[str, Choose],
    artefacts: dict[str, Array] | None = None,
    **metadata: str | int | float,
) -> None:
    """Records a decode method that reads an exact set of keys."""
    q, k, v = qkv
    selected = selection(q, k, choose)
    out = attend(q, k, v, selected)
    check(out, dense(q, k, v), {key: attend(q, k, v, selection(q, k, other)) for key, other in wrong.items()})
    artefacts = {f"artefact.{key}": x for key, x in (artefacts or {}).items()}
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": selected} | artefacts
    write(name, {"decode": attention}, arrays, **metadata)


def prefill(
    name: str,
    attention: dict,
    qkv: tuple[Array, Array, Array],
    out: Array,
    wrong: dict[str, Array],
    narrow: tuple[Array, Array, Array] | None = None,
    **besides: Array,
) -> None:
    """Records a prefill method. Of heads that were spread, what they were before, and some rows, the last one among them."""
    full, arrays = dense(*qkv), {}
    if narrow is not None:
        rows = np.arange(len(out) - 1, -1, -(len(out) // 16 | 1))[::-1]
        out, full, wrong = out[rows], full[rows], {key: other[rows] for key, other in wrong.items()}
        arrays = {"rows": rows.astype(np.uint32), "spread": spreading(narrow[0].shape[2])}
    check(out, full, wrong)
    arrays |= dict(zip("qkv", narrow or qkv)) | {"out": out} | besides
    write(name, {"prefill": attention}, arrays)
