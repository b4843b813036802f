#!/usr/bin/env python3
"""Quest decoding: pages of keys, ranked by a bound on the scores in each (see common.py).

A page's bound for a head is sum_j max(q_j min_j, q_j max_j) / sqrt(d) over the channel-wise ends of its visible keys.
"""

from common import Array, Choose, between, count, decode, first_clear, heads, importance, math, np, top


def bounds(q: Array, low: Array, high: Array) -> Array:
    return np.maximum(q[:, None] * low, q[:, None] * high).sum(axis=2) / math.sqrt(q.shape[1])


def centres(q: Array, low: Array, high: Array) -> Array:
    return q @ (low + high).T / 2 / math.sqrt(q.shape[1])


def chooser(
    k: float, sink: int, window: int, page: int, score=importance, logits=bounds, whole=math.ceil, any_page=False
) -> Choose:
    def choose(q: Array, keys: Array, _: int) -> Array:
        pages = [keys[start : start + page] for start in range(0, len(keys), page)]
        low, high = (np.array([end(keys, axis=0) for keys in pages]) for end in [np.min, np.max])
        rest = between(len(keys), sink, window)
        of = np.arange(len(keys)) // page
        candidates = np.arange(len(pages)) if any_page else np.unique(of[rest])
        taken = top(score(logits(q, low, high)), candidates, whole(count(k, len(keys)) / page))
        return ~rest | np.isin(of, taken)

    return choose


def make(name: str, settings: dict, shape: dict, seed: int) -> None:
    args = [settings[key] for key in ["k", "sink", "window", "page"]]
    k, sink, window, page = args
    wrong = {
        "a page more": chooser(*args, whole=lambda x: math.ceil(x) + 1),
        "a page less": chooser(*args, whole=lambda x: math.ceil(x) - 1),
        "the middle of the bounds": chooser(*args, logits=centres),
        "smaller pages": chooser(k, sink, window, page // 2),
        "a longer window": chooser(k, sink, window + 1, page),
        "a sink more": chooser(k, sink + 1, window, page),
        "pages without a key between": chooser(*args, any_page=True),
        "summed bounds": chooser(*args, score=lambda s: s.sum(axis=0)),
        "the first head": chooser(*args, score=lambda s: importance(s[:1])),
    }
    decode(name, settings, heads(seed, **shape), chooser(*args), wrong)


def main() -> None:
    settings = {"method": "quest", "k": 64, "sink": 4, "window": 16, "page": 16, "dense_layers": 0}
    shape = {"n": 437, "kv_heads": 2, "group": 3, "d": 32, "rows": 3}
    first_clear(lambda seed: make("quest", settings, shape, seed))
    # A share of the visible keys, 77 or 78 of them: five pages. The rows lie on both sides of a page's beginning.
    shape = {"n": 386, "kv_heads": 2, "group": 2, "d": 32, "rows": 4}
    first_clear(lambda seed: make("quest-share", settings | {"k": 0.201}, shape, seed))
    # Heads as wide and groups as large as those of the models that most serve.
    shape = {"n": 149, "kv_heads": 1, "group": 4, "d": 128, "rows": 2}
    first_clear(lambda seed: make("quest-wide", settings | {"k": 32, "page": 8}, shape, seed))


if __name__ == "__main__":
    main()
