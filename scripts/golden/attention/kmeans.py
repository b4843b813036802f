#!/usr/bin/env python3
"""k-means decoding: all keys of the clusters whose centroids a group's queries favour (see common.py).

With `rope` the clusters are of keys and queries after rotary embedding, without it of those before it: they are
rotated back. Attention itself is over the rotated ones. `centroids` [kv_heads, clusters, d], unit vectors to f16's
precision and used as they are.
"""

from common import Array, Choose, between, clear, decode, f16, first_clear, heads, importance, math, np, top, unrope

THETA = 10000.0
CLUSTERS = 32


def train(rng: np.random.Generator, keys: Array) -> Array:
    """Spherical k-means of keys [tokens, kv_heads, d], on a noisy half of them."""
    centroids = []
    for h in range(keys.shape[1]):
        x = keys[::2, h] + 0.3 * rng.normal(size=keys[::2, h].shape)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        mu = x[rng.choice(len(x), CLUSTERS, replace=False)]
        for _ in range(10):
            cluster = np.argmax(x @ mu.T, axis=1)
            sums = np.array([x[cluster == c].sum(axis=0) if (cluster == c).any() else mu[c] for c in range(CLUSTERS)])
            mu = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        centroids.append(mu)
    return f16(np.array(centroids))


def assign(keys: Array, centroids: Array) -> Array:
    """[tokens]: the nearest of the unit centroids [clusters, d]."""
    near = keys @ centroids.T
    for best in np.sort(near, axis=1):
        # Rotating back in f32 costs digits.
        clear(best[-1], best[-2], scale=3 * best[-1])
    return np.argmax(near, axis=1)


def plain(x: Array, last: int) -> Array:
    """Rotates [tokens, d] back whose last token is at position `last`; several heads' queries are at one position."""
    return unrope(x[:, None], np.arange(last + 1 - len(x), last + 1), THETA)[:, 0]


def read(cluster: Array, favour: Array, probes: int, sink: int, window: int) -> Array:
    """The keys of the best `probes` clusters, empty ones counted, and the sinks and the window."""
    taken = top(favour, np.arange(len(favour)), probes)
    return ~between(len(cluster), sink, window) | np.isin(cluster, taken)


def make(name: str, settings: dict, seed: int) -> None:
    qkv = q, k, v = heads(seed, n=421, kv_heads=2, group=3, d=32, rows=3, theta=THETA)
    tokens = np.arange(len(k))
    centroids = train(np.random.default_rng([seed, 1]), k if settings["rope"] else unrope(k, tokens, THETA))

    def chooser(
        rope: bool = settings["rope"], more: int = 0, window: int = 16, sink: int = 1, score=importance, scale=1.0
    ) -> Choose:
        def choose(q: Array, keys: Array, h: int) -> Array:
            last = len(keys) - 1
            if not rope:
                q = np.concatenate([plain(head[None], last) for head in q])
                keys = plain(keys, last)
            favour = score(scale * q @ centroids[h].T / math.sqrt(q.shape[1]))
            return read(assign(keys, centroids[h]), favour, settings["probes"] + more, sink, window)

        return choose

    wrong = {
        "the other embedding": chooser(rope=not settings["rope"]),
        "a cluster more": chooser(more=1),
        "a cluster less": chooser(more=-1),
        "a longer window": chooser(window=17),
        "a shorter window": chooser(window=15),
        "a sink more": chooser(sink=2),
        "no sink": chooser(sink=0),
        "summed scores": chooser(score=lambda s: s.sum(axis=0)),
        "the best head": chooser(score=lambda s: s.max(axis=0)),
        "scores not scaled": chooser(scale=math.sqrt(32)),
    }
    decode(name, settings, qkv, chooser(), wrong, {"layers.0.centroids": centroids}, rope_theta=THETA)


def main() -> None:
    settings = {"method": "kmeans", "probes": 4, "sink": 1, "window": 16, "rope": True, "dense_layers": 0}
    first_clear(lambda seed: make("kmeans", settings, seed))
    first_clear(lambda seed: make("kmeans-unroped", settings | {"rope": False}, seed))


if __name__ == "__main__":
    main()
