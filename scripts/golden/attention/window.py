#!/usr/bin/env python3
"""A model's own sliding window, as Mistral 7B's (see common.py): a row at position p sees the `window` keys up to its own.

That are the keys j with p - window < j <= p; metadata `window` says how many. A method chooses from these alone: its sinks
are the first keys of the text as long as a row sees them, its shares those of the keys that the row sees. Quest's pages begin
at multiples of their size whatever a row sees, and a page's bounds are those of all its keys up to the row's own; so do the blocks of
quantised keys, of which those count to how far off scores are that hold a key that the row sees.
"""

from collections.abc import Callable

from common import Array, attend, between, check, count, dense, first_clear, heads, importance, np, scores, top, write

import quantized_keys
import quest

WINDOW = 205
OTHERS = {"a key more": WINDOW + 1, "a key less": WINDOW - 1, "half of it": WINDOW // 2}


def first(position: int, window: int) -> int:
    return max(0, position - window + 1)


def seen(rows: int, n: int, window: int = WINDOW) -> Array:
    """[rows, n]: which keys the last `rows` tokens of n see."""
    position, at = np.arange(n - rows, n)[:, None], np.arange(n)
    return (position - window < at) & (at <= position)


def everything(phase: str, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)

    def output(window: int) -> Array:
        return attend(q, k, v, seen(len(q), len(k), window)[:, None])

    out = output(WINDOW)
    check(out, dense(q, k, v), {name: output(window) for name, window in OTHERS.items()})
    attention = {phase: {"method": "dense"}}
    write(f"dense-{phase}-window", attention, {"q": q, "k": k, "v": v, "out": out}, window=WINDOW)


# pick(scores [group, m], queries [group, d], keys [m, d], first key that is seen, those between [m], k) -> keys
Pick = Callable[[Array, Array, Array, int, Array, float], Array]


def by_probability(s: Array, q: Array, keys: Array, start: int, rest: Array, k: int) -> Array:
    chosen = np.zeros(len(keys), bool)
    share = np.zeros(len(keys))
    share[start:] = importance(s[:, start:])
    chosen[top(share, np.flatnonzero(rest), k)] = True
    return chosen


def by_pages(page: int, whole=True) -> Pick:
    def pick(s: Array, q: Array, keys: Array, start: int, rest: Array, k: int) -> Array:
        pages = range(start // page, (len(keys) - 1) // page + 1)
        ends = [keys[(p * page if whole else max(p * page, start)) : (p + 1) * page] for p in pages]
        low, high = (np.array([end(keys, axis=0) for keys in ends]) for end in [np.min, np.max])
        of = np.arange(len(keys)) // page
        share = importance(quest.bounds(q, low, high))
        candidates = np.unique(of[rest]) - pages[0]
        taken = top(share, candidates, min(-(-k // page), len(candidates))) + pages[0]
        return rest & np.isin(of, taken)

    return pick


def by_quantized(begins=lambda start: 0, apart: float = 0.0) -> Pick:
    """`begins`: where the first block begins."""

    def pick(s: Array, q: Array, keys: Array, start: int, rest: Array, k: int) -> Array:
        off = begins(start)
        doubt = quantized_keys.doubt(q, keys, start)
        score = quantized_keys.guessed(q, keys[off:], start - off, doubt=lambda *_: doubt)
        chosen, share = np.zeros(len(keys), bool), np.zeros(len(keys))
        share[start:] = importance(score)
        chosen[quantized_keys.clearly(share, np.flatnonzero(rest), k, apart)] = True
        return chosen

    return pick


def chosen(
    qkv: tuple[Array, Array, Array],
    settings: dict,
    pick: Pick,
    window: int = WINDOW,
    sinks: str = "true",
    share_of_all: bool = False,
    whole: bool = False,
) -> Array:
    """[rows, kv_heads, n]: what each row reads."""
    q, k, _ = qkv
    rows, n, kv_heads = len(q), len(k), k.shape[1]
    group = q.shape[1] // kv_heads
    selected, all_scores = np.zeros((rows, kv_heads, n), bool), scores(q, k)
    for r in range(rows):
        position = n - rows + r
        start, m = first(position, window), position + 1
        at = np.arange(m)
        rest = between(m, settings["sink"], settings["window"]) & (at >= start)
        if sinks == "moving":
            rest = between(m, start + settings["sink"], settings["window"])
        fixed = (at >= start) & ~rest
        if sinks == "staying":
            fixed |= at < settings["sink"]
        size = count(settings["k"], m if share_of_all else m - start)
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            taken = pick(all_scores[r, own, :m], q[r, own], k[:m, h], start, rest, size)
            selected[r, h, :m] = fixed | (rest if whole else taken)
    return selected


def sparse(
    name: str, settings: dict, shape: dict, pick: Pick, wrong: dict[str, Pick], seed: int, made=heads
) -> None:
    q, k, v = qkv = made(seed, **shape)
    selected = chosen(qkv, settings, pick)
    others = {key: chosen(qkv, settings, pick, window=window) for key, window in OTHERS.items()}
    others |= {
        "no window": chosen(qkv, settings, pick, window=len(k)),
        "sinks that stay": chosen(qkv, settings, pick, sinks="staying"),
        "sinks that move": chosen(qkv, settings, pick, sinks="moving"),
        "a share of all keys": chosen(qkv, settings, pick, share_of_all=True),
        "the whole window": chosen(qkv, settings, pick, whole=True),
    }
    others |= {key: chosen(qkv, settings, other) for key, other in wrong.items()}
    out = attend(q, k, v, selected)
    check(out, dense(q, k, v), {key: attend(q, k, v, other) for key, other in others.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": selected}
    write(name, {"decode": settings}, arrays, window=WINDOW)


def main() -> None:
    shape = {"kv_heads": 1, "group": 2, "d": 16}
    first_clear(lambda seed: everything("prefill", shape | {"n": 250}, seed))
    # Rows that see the first key and the last of them that does, rows whose sinks go one by one, and rows without any.
    shape |= {"kv_heads": 2, "n": WINDOW + 7, "rows": 10}
    first_clear(lambda seed: everything("decode", shape, seed))
    # A share of 205 keys is 21 of them, of 207 and more 22.
    settings = {"method": "oracle_top_k", "k": 0.1015, "sink": 4, "window": 16}
    first_clear(lambda seed: sparse("oracle_top_k-window", settings, shape, by_probability, {}, seed))
    # Three pages of 8, and of 209 keys and more four; the window's first key lies within a page.
    settings = {"method": "quest", "k": 0.115, "sink": 4, "window": 16, "page": 8, "dense_layers": 0}
    wrong = {"bounds of the keys seen": by_pages(8, whole=False), "smaller pages": by_pages(4)}
    first_clear(lambda seed: sparse("quest-window", settings, shape, by_pages(8), wrong, seed))
    # The first block has keys that no row sees.
    settings = {"method": "quantized_keys", "k": 0.115, "sink": 4, "window": 16, "dense_layers": 0}
    shape |= {"kv_heads": 1, "d": 32}
    wrong = {"blocks of the keys seen": by_quantized(lambda start: start)}
    pick, made = by_quantized(apart=0.001), quantized_keys.exact
    first_clear(lambda seed: sparse("quantized_keys-window", settings, shape, pick, wrong, seed, made))


if __name__ == "__main__":
    main()
