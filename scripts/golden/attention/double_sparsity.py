#!/usr/bin/env python3
"""DoubleSparsity decoding: top-k by the scores over a few channels (see common.py). Labels are not quantised.

`channels` [layers, kv_heads, r], ascending: those with the largest mean |q_j k_j| over the group, as the paper ranks.
"""

from common import Array, Choose, between, count, decode, first_clear, heads, importance, math, np, top

SETTINGS = {"method": "double_sparsity", "k": 40, "sink": 4, "window": 16, "dense_layers": 0}
CHANNELS = 8


def rank(q: Array, k: Array) -> Array:
    """The channels of other heads of the same kind."""
    size = np.abs(q).mean(axis=0).reshape(k.shape[1], -1, k.shape[2]).sum(axis=1) * np.abs(k).mean(axis=0)
    return np.sort(np.argsort(-size, axis=1)[:, :CHANNELS], axis=1)


def chooser(channels: Array, score=importance, more: int = 0, scale: float | None = None) -> Choose:
    def choose(q: Array, keys: Array, h: int) -> Array:
        logits = q[:, channels[h]] @ keys[:, channels[h]].T / (scale or math.sqrt(q.shape[1]))
        candidates = between(len(keys), SETTINGS["sink"], SETTINGS["window"])
        chosen = ~candidates
        chosen[top(score(logits), np.flatnonzero(candidates), count(SETTINGS["k"], len(keys)) + more)] = True
        return chosen

    return choose


def make(seed: int) -> None:
    q, k, v = heads(seed, n=411, kv_heads=2, group=3, d=32, rows=3)
    channels = rank(q, k)
    wrong = {
        "all channels": chooser(np.tile(np.arange(32), (2, 1))),
        "the other KV head's channels": chooser(channels[::-1]),
        "channels one off": chooser((channels + 1) % 32),
        "scaled by the channels": chooser(channels, scale=math.sqrt(CHANNELS)),
        "summed scores": chooser(channels, lambda s: s.sum(axis=0)),
        "the first head": chooser(channels, lambda s: importance(s[:1])),
        "one key more": chooser(channels, more=1),
        "one key less": chooser(channels, more=-1),
    }
    artefacts = {"channels": channels[None].astype(np.int64)}
    decode("double_sparsity", SETTINGS, (q, k, v), chooser(channels), wrong, artefacts)


if __name__ == "__main__":
    first_clear(make)
