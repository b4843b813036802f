#!/usr/bin/env python3
"""Decoding from sinks, a window and a uniform sample that stands for the rest (see common.py).

The sample is the first `rate` of the other keys, in the order of a permutation of all visible keys that `seed` keys; one
serves a KV head's group. Each of its b keys counts for r / b of the r that are not fixed.
"""

from common import Array, between, check, count, dense, drawn, first_clear, heads, np, weighed, write

SEED = 0x0123456789ABCDEF


def make(name: str, settings: dict, shape: dict, data: int) -> None:
    q, k, v = heads(data, **shape)
    rows, n, kv_heads = len(q), len(k), k.shape[1]

    def weights(sink=settings["sink"], window=settings["window"], more=0, seed=SEED, head=lambda h: h, unit=False) -> Array:
        all_weights = np.zeros((rows, kv_heads, n))
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(kv_heads):
                fixed = ~between(m, sink, window)
                sample = drawn(fixed, seed, head(h))
                size = count(settings["rate"], m) + more
                all_weights[r, h, :m] = fixed
                all_weights[r, h, sample[:size]] = 1 if unit else len(sample) / size
        return all_weights

    chosen = weights()
    wrong = {
        "weights of one": weights(unit=True),
        "a key more": weights(more=1),
        "a key less": weights(more=-1),
        "a longer window": weights(window=settings["window"] + 1),
        "a sink more": weights(sink=settings["sink"] + 1),
        "another seed": weights(seed=SEED >> 32),
        "one draw for all heads": weights(head=lambda _: 0),
    }
    out = weighed(q, k, v, chosen)
    check(out, dense(q, k, v), {key: weighed(q, k, v, other) for key, other in wrong.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": chosen > 0}
    write(name, {"decode": settings}, arrays, seed=SEED)


def main() -> None:
    settings = {"method": "random_sample", "rate": 30, "sink": 4, "window": 16}
    shape = {"n": 301, "kv_heads": 2, "group": 3, "d": 32, "rows": 3}
    first_clear(lambda data: make("random_sample", settings, shape, data))
    first_clear(lambda data: make("random_sample-share", settings | {"rate": 0.1234}, shape, data))


if __name__ == "__main__":
    main()
