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


def ahead(q: Array, n: int, k: float, sink: int, window: int, page: int, last=1, whole=True, least=True) -> Choose:
    """By the queries of the tokens `last` before, those before q's first being zero, and of the pages that are whole without
    the row's own token; the window is a page long at least."""
    before = np.concatenate([np.zeros_like(q[:last]), q[: len(q) - last]])

    def choose(own: Array, keys: Array, head: int) -> Array:
        row, heads = len(keys) - (n - len(q)) - 1, slice(head * len(own), (head + 1) * len(own))
        seen = keys[: (len(keys) - 1) // page * page] if whole else keys
        pages = [seen[start : start + page] for start in range(0, len(seen), page)]
        low, high = (np.array([end(part, axis=0) for part in pages]) for end in [np.min, np.max])
        rest = between(len(keys), sink, max(window, page) if least else window)
        of = np.arange(len(keys)) // page
        candidates = np.intersect1d(np.unique(of[rest]), np.arange(len(pages)))
        by = before[row, heads]
        share = importance(bounds(by, low, high))
        taken = top(share, candidates, math.ceil(count(k, len(keys)) / page), ties=not by.any())
        return ~rest | np.isin(of, taken)

    return choose


def make_ahead(name: str, settings: dict, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    args = [q, len(k), *[settings[key] for key in ["k", "sink", "window", "page"]]]
    wrong = {
        "its own query": ahead(*args, last=0),
        "the query before that": ahead(*args, last=2),
        "the page that is being filled too": ahead(*args, whole=False),
        "no longer a window": ahead(*args, least=False),
    }
    decode(name, settings, (q, k, v), ahead(*args), wrong)


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
    # Rows on both sides of a page's beginning, and a window of half a page.
    shape = {"n": 290, "kv_heads": 2, "group": 2, "d": 32, "rows": 5}
    first_clear(lambda seed: make_ahead("quest-ahead", settings | {"window": 8, "ahead": True}, shape, seed))


if __name__ == "__main__":
    main()
