#!/usr/bin/env python3
"""Exact top-p decoding (see common.py): the fewest keys with which the mass that is read reaches p.

p is of the mass of all visible keys, the sinks' and the window's included; the paper's code leaves those out.
"""

from common import Array, Choose, Unclear, between, clear, decode, first_clear, heads, importance, math, np, selection


def chooser(p: float, sink: int, window: int, crossing: bool = True, of_rest: bool = False) -> Choose:
    def choose(q: Array, keys: Array, _: int) -> Array:
        mass = importance(q @ keys.T / math.sqrt(q.shape[1])) / len(q)
        candidates = between(len(keys), sink, window)
        chosen = ~candidates
        ranked = np.flatnonzero(candidates)
        ranked = ranked[np.argsort(-mass[ranked], kind="stable")]
        read = 0.0 if of_rest else mass[chosen].sum()
        goal = p * mass[ranked].sum() if of_rest else p
        # reached[i]: the mass that is read with the i best.
        reached = read + np.concatenate([[0.0], np.cumsum(mass[ranked])])
        needed = int(np.argmax(reached >= goal))
        clear(reached[needed], goal)
        if needed:
            clear(reached[needed - 1], goal)
            clear(mass[ranked[needed - 1]], mass[ranked[needed]])
        chosen[ranked[: needed if crossing else max(needed - 1, 0)]] = True
        return chosen

    return choose


def make(name: str, p: float, shape: dict, seed: int) -> None:
    sink, window = 4, 16
    settings = {"method": "oracle_top_p", "p": p, "sink": sink, "window": window}
    wrong = {
        "the crossing key left out": chooser(p, sink, window, crossing=False),
        "p of the rest": chooser(p, sink, window, of_rest=True),
        "a longer window": chooser(p, sink, window + 1),
        "a sink more": chooser(p, sink + 1, window),
    }
    q, k, v = heads(seed, **shape)
    # With a low p the sinks and the window are enough for some lists and not for others.
    enough = selection(q, k, chooser(p, sink, window)).sum(axis=2) == sink + window
    if p < 0.5 and not 0 < enough.sum() < enough.size:
        raise Unclear("the sinks and the window are enough for all or for none")
    decode(name, settings, (q, k, v), chooser(p, sink, window), wrong)


def main() -> None:
    shape = {"n": 397, "kv_heads": 2, "group": 3, "d": 32, "rows": 3}
    first_clear(lambda seed: make("oracle_top_p", 0.9, shape, seed))
    shape = {"n": 301, "kv_heads": 2, "group": 2, "d": 32, "rows": 4}
    first_clear(lambda seed: make("oracle_top_p-low", 0.25, shape, seed))


if __name__ == "__main__":
    main()
