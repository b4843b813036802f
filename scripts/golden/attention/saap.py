#!/usr/bin/env python3
"""SAAP decoding: k-means clusters of the keys, chosen by a classifier of the queries (see common.py).

Keys are clustered, and queries classified, as they were before rotary embedding; attention is over the rotated ones.
The classifier, with its normalisation folded in, is linear, ReLU, linear, softmax: one for each KV head, and a group's
clusters are the best by the sum of its heads' probabilities.
"""

from common import Array, Choose, decode, f16, first_clear, heads, importance, math, np, unrope
from kmeans import CLUSTERS, THETA, assign, plain, read, train

SETTINGS = {"method": "saap", "probes": 4, "sink": 1, "window": 16, "dense_layers": 0}
HIDDEN = 48


def make(seed: int) -> None:
    qkv = q, k, v = heads(seed, n=419, kv_heads=2, group=3, d=32, rows=3, theta=THETA)
    rng = np.random.default_rng([seed, 1])
    centroids = train(rng, unrope(k, np.arange(len(k)), THETA))
    # A hidden unit looks along one cluster's centroid, and the clusters near it gain by it.
    first = centroids[:, rng.integers(CLUSTERS, size=HIDDEN)] + 0.05 * rng.normal(size=(2, HIDDEN, 32))
    second = 0.6 * centroids @ first.swapaxes(1, 2) + 0.1 * rng.normal(size=(2, CLUSTERS, HIDDEN))
    weights = [f16(first), f16(second)]
    biases = [f16(0.3 * rng.normal(size=(2, HIDDEN))), f16(0.3 * rng.normal(size=(2, CLUSTERS)))]

    def chooser(rotated: str = "", more: int = 0, sink=1, window=16, score=importance, relu=True) -> Choose:
        def choose(q: Array, keys: Array, h: int) -> Array:
            last = len(keys) - 1
            if "queries" not in rotated:
                q = np.concatenate([plain(head[None], last) for head in q])
            if "keys" not in rotated:
                keys = plain(keys, last)
            hidden = q @ weights[0][h].T + biases[0][h]
            logits = (np.maximum(hidden, 0) if relu else hidden) @ weights[1][h].T + biases[1][h]
            return read(assign(keys, centroids[h]), score(logits), SETTINGS["probes"] + more, sink, window)

        return choose

    def by_centroids(q: Array, keys: Array, h: int) -> Array:
        last = len(keys) - 1
        plain_q = np.concatenate([plain(head[None], last) for head in q])
        favour = importance(plain_q @ centroids[h].T / math.sqrt(q.shape[1]))
        return read(assign(plain(keys, last), centroids[h]), favour, SETTINGS["probes"], 1, 16)

    wrong = {
        "rotated queries": chooser("queries"),
        "rotated keys": chooser("keys"),
        "a cluster more": chooser(more=1),
        "a cluster less": chooser(more=-1),
        "no sink": chooser(sink=0),
        "a longer window": chooser(window=17),
        "summed logits": chooser(score=lambda s: s.sum(axis=0)),
        "the best head": chooser(score=lambda s: s.max(axis=0)),
        "no ReLU": chooser(relu=False),
        "k-means": by_centroids,
    }
    artefacts = {"layers.0.centroids": centroids}
    for i in range(2):
        artefacts |= {f"layers.0.classifier.{i}.weight": weights[i], f"layers.0.classifier.{i}.bias": biases[i]}
    decode("saap", SETTINGS, qkv, chooser(), wrong, artefacts, rope_theta=THETA)


if __name__ == "__main__":
    first_clear(make)
