#!/usr/bin/env python3
"""StreamingLLM, for prefill and decode: the first tokens and the last ones, at their true positions (see common.py)."""

from common import Array, attend, between, decode, first_clear, heads, np, prefill, widen

SETTINGS = {"method": "streaming_llm", "sink": 4, "window": 48}


def ends(m: int, sink: int = 4, window: int = 48) -> Array:
    return ~between(m, sink, window)


# name: (sink, window)
WRONG = {"a sink more": (5, 48), "a sink less": (3, 48), "a longer window": (4, 49), "a shorter window": (4, 47)}


def decoding(seed: int) -> None:
    wrong = {name: lambda q, keys, h, end=end: ends(len(keys), *end) for name, end in WRONG.items()}
    qkv = heads(seed, n=365, kv_heads=2, group=3, d=32, rows=3)
    decode("streaming_llm-decode", SETTINGS, qkv, lambda q, keys, h: ends(len(keys)), wrong)


def prompt(seed: int) -> None:
    record("streaming_llm-prefill", heads(seed, n=310, kv_heads=1, group=3, d=32))


def wide(seed: int) -> None:
    narrow = heads(seed, n=310, kv_heads=1, group=2, d=16)
    record("streaming_llm-wide", widen(*narrow), narrow)


def record(name: str, qkv: tuple[Array, Array, Array], narrow: tuple[Array, Array, Array] | None = None) -> None:
    q, k, v = qkv

    def output(sink: int, window: int) -> Array:
        mask = np.zeros((len(q), 1, len(k)), bool)
        for row in range(len(q)):
            mask[row, 0, : row + 1] = ends(row + 1, sink, window)
        return attend(q, k, v, mask)

    prefill(name, SETTINGS, qkv, output(4, 48), {key: output(*end) for key, end in WRONG.items()}, narrow)


if __name__ == "__main__":
    first_clear(decoding)
    first_clear(prompt)
    first_clear(wide)
