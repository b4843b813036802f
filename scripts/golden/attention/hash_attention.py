#!/usr/bin/env python3
"""HashAttention decoding: top-k by the equal bits of learned codes (see common.py).

A code's 32 bits are the signs (0 counts as positive) of a three-layer SiLU network's outputs; queries and keys have
networks of their own. A head's score of a key is 32 - 2 popcount(xor), a whole number; a group's is the sum. Most
decisions are between equals and go to the lower index. Query networks are one for each query head; key networks one
for each KV head, or, as in the paper, one for each query head too. The codes are taken after rotary embedding.
"""

from common import Array, Choose, Unclear, between, decode, f16, first_clear, heads, importance, math, np, top

SETTINGS = {"method": "hash_attention", "k": 40, "sink": 4, "window": 16}
D, HIDDEN, BITS = 32, 16, 32

Layers = list[tuple[Array, Array]]  # weight [maps, out, in], bias [maps, out]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def codes(layers: Layers, x: Array, activation=silu) -> Array:
    """[maps, tokens, 32] of x [maps, tokens, d]."""
    for i, (weight, bias) in enumerate(layers):
        terms = np.abs(x) @ np.abs(weight).swapaxes(1, 2) + np.abs(bias)[:, None]
        x = x @ weight.swapaxes(1, 2) + bias[:, None]
        if i < len(layers) - 1:
            x = activation(x)
    if (np.abs(x) < 1e-3).any() or (np.abs(x) < 4e-6 * terms).any():
        raise Unclear("a bit is nearly neither")
    return x >= 0


def maps(rng: np.random.Generator, base: list[Array], noise: float) -> Layers:
    """Networks near `base`, so that a query's code and a similar key's are alike."""
    layers = []
    for weight in base:
        size = weight.std()
        bias = 0.3 * size * rng.normal(size=weight.shape[:2])
        layers.append((f16(weight + noise * size * rng.normal(size=weight.shape)), f16(bias)))
    return layers


def networks(seed: int, kv_heads: int, group: int, key_maps: int) -> tuple[Layers, Layers]:
    """The queries' and the keys'."""
    rng = np.random.default_rng([seed, 1])
    shapes = [(HIDDEN, D), (HIDDEN, HIDDEN), (BITS, HIDDEN)]
    # The last layer is wide, so that few outputs lie near 0.
    base = [gain / math.sqrt(shape[1]) * rng.normal(size=(kv_heads, *shape)) for shape, gain in zip(shapes, [2, 3, 40])]
    query = maps(rng, [np.repeat(weight, group, axis=0) for weight in base], 0.3)
    return query, maps(rng, [np.repeat(weight, key_maps // kv_heads, axis=0) for weight in base], 0.3)


def artefact(query: Layers, key: Layers) -> dict[str, Array]:
    return {
        f"layers.0.{side}.{i}.{part}": x
        for side, layers in [("query", query), ("key", key)]
        for i, layer in enumerate(layers)
        for part, x in zip(["weight", "bias"], layer)
    }


def chooser(
    kv_heads: int,
    query: Layers,
    key: Layers,
    settings: dict = SETTINGS,
    score=lambda s: s.sum(axis=0),
    more: int = 0,
    last: bool = False,
    activation=silu,
) -> Choose:
    group, key_maps = len(query[0][0]) // kv_heads, len(key[0][0])

    def choose(q: Array, keys: Array, h: int) -> Array:
        mine = slice(h * group, (h + 1) * group)
        theirs = slice(h * key_maps // kv_heads, (h + 1) * key_maps // kv_heads)
        asked = codes([(w[mine], b[mine]) for w, b in query], q[:, None], activation)
        layers = [(w[theirs], b[theirs]) for w, b in key]
        held = codes(layers, np.repeat(keys[None], key_maps // kv_heads, axis=0), activation)
        scores = BITS - 2 * (asked != held).sum(axis=2)
        candidates = between(len(keys), settings["sink"], settings["window"])
        chosen = ~candidates
        order = np.flatnonzero(candidates)[:: -1 if last else 1]
        chosen[top(score(scores), order, settings["k"] + more, ties=True)] = True
        return chosen

    return choose


def make(name: str, kv_heads: int, group: int, key_maps: int, seed: int) -> None:
    qkv = heads(seed, n=397, kv_heads=kv_heads, group=group, d=D, rows=3)
    query, key = networks(seed, kv_heads, group, key_maps)
    args = (kv_heads, query, key)
    wrong = {
        "the higher index among equals": chooser(*args, last=True),
        "one key more": chooser(*args, more=1),
        "one key less": chooser(*args, more=-1),
        "softmax of the scores": chooser(*args, score=importance),
        "the first head": chooser(*args, score=lambda s: s[0]),
        "ReLU": chooser(*args, activation=lambda x: np.maximum(x, 0)),
    }
    assert query[0][0].shape == (kv_heads * group, HIDDEN, D) and key[2][1].shape == (key_maps, BITS)
    decode(name, SETTINGS, qkv, chooser(*args), wrong, artefact(query, key))


def main() -> None:
    first_clear(lambda seed: make("hash_attention", 2, 3, 2, seed))
    first_clear(lambda seed: make("hash_attention-per-query-head", 2, 3, 6, seed))


if __name__ == "__main__":
    main()
