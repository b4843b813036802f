#!/usr/bin/env python3
"""SANTA and S2ANTA decoding: the mean of values drawn by their probability (see common.py).

Each query head draws for itself, from all keys that its row sees. A target t in [0, 1) draws the first key, in the
order of tokens, whose inclusive cumulative probability exceeds t; S targets, k = 0..S-1, are

- systematic: (k + u) / S, one u;  stratified: (k + u_k) / S;  iid: u_k.

`prop` draws from all keys at once and divides by S. `flash` gives every tile max(1, S / tiles) systematic draws of its
own keys and weighs the tiles' means with their probabilities. `prop_lr` shares S out to the tiles by the largest
remainder of S times their probability (the lower tile first among equals), each tile drawing systematically, and
divides by S.

`scores: bernoulli` takes the probabilities from a query of which only some features are left. With M the largest |q_c|,
`draws` tries keep feature c with the chance |q_c| / M each, and h hits make it sign(q_c) M h / draws. With `mean_query`
the group keeps one set, by the mean m_c of |q_c| over its heads and M the largest m_c: a feature hit at all is q_c over
its chance 1 - (1 - m_c / M)^draws. Try b hits if the number 0x42450000 + b d + c of the head, or the group's first, is
below the chance.

`within` another method all this is of the keys that it reads, in the order sinks, window, the others ascending, and a
sample of the rest in the order of drawing; a sampled key has as many times the probability as it counts for.

u_k is the number 0x53320000 + k, a tile's u the number 0x53330000 + tile, where a number is the first word of Philox,
>> 8, over 2^24, keyed by `seed`'s low and high half and counting [layer, query head, position, number]. `counts`
[rows, q_heads, n], u32, says how often each key is drawn.
"""

from common import Array, Unclear, between, check, dense, drawn, first_clear, heads, importance, math, np, philox
from common import scores, softmax, top, write

SEED = 0x0123456789ABCDEF
LAYER = 0
DRAWS, TILES, FEATURES = 0x53320000, 0x53330000, 0x42450000
NEAR = 4e-6  # Of a target to a step of the distribution.


def uniform(head: int, position: int, number: int) -> float:
    return (philox([SEED & 0xFFFFFFFF, SEED >> 32], [LAYER, head, position, number])[0] >> 8) / 2**24


def draw(p: Array, targets: Array, misread: bool, exclusive: bool) -> Array:
    """How often each key of the distribution p is drawn."""
    steps = np.cumsum(p)
    if not misread and np.abs(targets[:, None] - steps).min() < NEAR:
        raise Unclear("a target is nearly on a step")
    keys = np.searchsorted(steps, targets, side="right")
    keys = np.clip(keys - exclusive, 0, len(p) - 1)
    return np.bincount(keys, minlength=len(p))


def shared_out(shares: Array, misread: bool) -> Array:
    """Whole numbers near the shares, with their sum."""
    whole = np.floor(shares)
    part = shares - whole
    if not misread and (np.minimum(part, 1 - part) < 1e-4).any():
        raise Unclear("a share is nearly whole")
    left = round(shares.sum() - whole.sum())
    order = np.argsort(-part, kind="stable")
    if not misread and part[order[left - 1]] - part[order[left]] < 1e-4:
        raise Unclear("remainders are nearly equal")
    whole[order[:left]] += 1
    return whole.astype(int)


def row(
    settings: dict, p: Array, head: int, position: int, misread: bool, exclusive: bool = False
) -> tuple[Array, Array]:
    """How often each key is drawn, and what each draw of it weighs, for probabilities p [m] of one head."""
    samples, m = settings["samples"], len(p)
    k = np.arange(samples)
    if settings["kernel"] == "prop":
        u = np.array([uniform(head, position, DRAWS + i) for i in range(samples)])
        targets = {"systematic": (k + u[0]) / samples, "stratified": (k + u) / samples, "iid": u}
        return draw(p, targets[settings["variant"]], misread, exclusive), np.full(m, 1 / samples)
    tile = settings["tile"]
    starts = range(0, m, tile)
    mass = np.array([p[start : start + tile].sum() for start in starts])
    flash = settings["kernel"] == "flash"
    draws = np.full(len(mass), max(1, samples // len(mass))) if flash else shared_out(samples * mass, misread)
    counts, weight = np.zeros(m, int), np.full(m, 1 / samples)
    for t, start in enumerate(starts):
        here = slice(start, start + tile)
        if draws[t]:
            targets = (np.arange(draws[t]) + uniform(head, position, TILES + t)) / draws[t]
            counts[here] = draw(p[here] / mass[t], targets, misread, exclusive)
        if flash:
            weight[here] = mass[t] / draws[t]
    return counts, weight


def kept_features(
    q: Array, draws: int, mean_query: bool, head: int, position: int, misread: bool, plain: bool = False, step: int = 0
) -> Array:
    """What is left of a group's queries [group, d], of which `head` is the first."""
    group, d = q.shape

    def hits(chance: Array, of: int) -> Array:
        count = np.zeros(d, int)
        for b in range(draws):
            numbers = range(FEATURES + b * (step or d), FEATURES + b * (step or d) + d)
            u = np.array([uniform(of, position, number) for number in numbers])
            if not misread and np.abs(u - chance).min() < 2e-7:
                raise Unclear("a feature's chance is nearly its draw")
            count += u < chance
        return count

    if not mean_query:
        rows = []
        for g in range(group):
            size = np.abs(q[g])
            rows.append(np.sign(q[g]) * size.max() * hits(size / size.max(), head + g) / draws)
        return np.array(rows)
    size = np.abs(q).mean(axis=0)
    chance = size / size.max()
    all_chances = 1 - (1 - chance) ** draws
    return np.where(hits(chance, head) > 0, q if plain else q / np.where(all_chances > 0, all_chances, 1), 0)


def bernoulli(name: str, settings: dict, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    rows, q_heads, n, group = len(q), q.shape[1], len(k), shape["group"]

    def output(misread=True, features=lambda q, h, p: None, position=lambda r: n - rows + r, exact=False) -> Array:
        def left(q: Array, h: int, p: int) -> Array:
            own = kept_features(q, settings["draws"], settings["mean_query"], h, p, misread)
            other = features(q, h, p) if misread else None
            return own if other is None else other

        out = np.zeros(q.shape)
        for r in range(rows):
            thinned = q[r].copy()
            for h in range(0, q_heads, group):
                thinned[h : h + group] = q[r, h : h + group] if exact else left(q[r, h : h + group], h, position(r))
            whole = np.repeat(thinned[None], rows, axis=0)
            p = softmax(scores(whole, k))[r]
            m = n - rows + r + 1
            for h in range(q_heads):
                drawn, weight = row(settings, p[h, :m], h, n - rows + r, misread)
                out[r, h] = (drawn * weight) @ v[:m, h // group]
        return out

    draws, shared = settings["draws"], settings["mean_query"]
    d = shape["d"]
    wrong = {
        "whole queries": output(exact=True),
        "positions from the row": output(position=lambda r: r),
        "another mean_query": output(features=lambda q, h, p: kept_features(q, draws, not shared, h, p, True)),
        "a try more": output(features=lambda q, h, p: kept_features(q, draws + 1, shared, h, p, True)),
        "the KV head's number": output(features=lambda q, h, p: kept_features(q, draws, shared, h // group, p, True)),
        "tries in other places": output(
            features=lambda q, h, p: kept_features(q, draws, shared, h, p, True, step=d + 1)
        ),
    }
    if shared:
        wrong["features as they are"] = output(features=lambda q, h, p: kept_features(q, draws, True, h, p, True, True))
    out = output(misread=False)
    check(out, dense(q, k, v), wrong)
    write(name, {"decode": settings}, {"q": q, "k": k, "v": v, "out": out}, seed=SEED)


def within(name: str, settings: dict, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    rows, q_heads, n, group = len(q), q.shape[1], len(k), shape["group"]
    inner, all_scores = settings["within"], scores(q, k)
    sink, window = inner["sink"], inner["window"]

    def read(s: Array, h: int, more: int) -> tuple[Array, Array]:
        """The keys that a group of scores [group, m] reads, and what each counts for."""
        m = s.shape[1]
        free = between(m, sink, window)
        at = np.flatnonzero(~free)
        if inner["method"] == "oracle_top_k":
            best = np.sort(top(importance(s), np.flatnonzero(free), inner["k"] + more))
            return np.concatenate([at, best]), np.ones(len(at) + len(best))
        order = drawn(~free, SEED, h)
        size = inner["rate"] + more
        counts = np.full(size, len(order) / size)
        return np.concatenate([at, order[:size]]), np.concatenate([np.ones(len(at)), counts])

    def output(misread=True, more=0, ascending=False, unit=False, everything=False) -> Array:
        out = np.zeros(q.shape)
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(q_heads):
                kv = h // group
                keys, counts = read(all_scores[r, kv * group : (kv + 1) * group, :m], kv, more)
                if everything:
                    keys, counts = np.arange(m), np.ones(m)
                if ascending:
                    order = np.argsort(keys)
                    keys, counts = keys[order], counts[order]
                e = (1 if unit else counts) * np.exp(all_scores[r, h, keys] - all_scores[r, h, keys].max())
                times, weight = row(settings, e / e.sum(), h, n - rows + r, misread)
                out[r, h] = (times * weight) @ v[keys, kv]
        return out

    wrong = {
        "all keys": output(everything=True),
        "a key more": output(more=1),
        "a key less": output(more=-1),
        "in the order of tokens": output(ascending=True),
    }
    if inner["method"] == "random_sample":
        wrong["weights of one"] = output(unit=True)
    out = output(misread=False)
    check(out, dense(q, k, v), wrong)
    write(name, {"decode": settings}, {"q": q, "k": k, "v": v, "out": out}, seed=SEED)


def make(name: str, settings: dict, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    rows, q_heads, n, group = len(q), q.shape[1], len(k), shape["group"]
    p = softmax(scores(q, k))

    def output(
        misread=True, head=lambda h: h, position=lambda r: n - rows + r, exclusive=False, **other: int | str
    ) -> tuple[Array, Array]:
        counts, out = np.zeros((rows, q_heads, n), np.uint32), np.zeros(q.shape)
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(q_heads):
                drawn, weight = row(settings | other, p[r, h, :m], head(h), position(r), misread, exclusive)
                counts[r, h, :m] = drawn
                out[r, h] = (drawn * weight) @ v[:m, h // group]
        return out, counts

    out, counts = output(misread=False)
    wrong = {
        "the KV head's draws": output(head=lambda h: h // group),
        "positions from the row": output(position=lambda r: r),
        "positions from one": output(position=lambda r: n - rows + r + 1),
        "exclusive steps": output(exclusive=True),
    }
    if settings["kernel"] == "prop":
        others = [other for other in ["systematic", "stratified", "iid"] if other != settings["variant"]]
        wrong |= {other: output(variant=other) for other in others}
    else:
        other = "flash" if settings["kernel"] == "prop_lr" else "prop_lr"
        wrong |= {
            "tiles of 64": output(tile=64),
            "all at once": output(kernel="prop", variant="systematic"),
            other: output(kernel=other),
        }
    if settings["kernel"] != "flash":
        assert (counts.sum(axis=2) == settings["samples"]).all()
    check(out, dense(q, k, v), {key: other for key, (other, _) in wrong.items()})
    write(name, {"decode": settings}, {"q": q, "k": k, "v": v, "out": out, "counts": counts}, seed=SEED)


def main() -> None:
    shape = {"n": 397, "kv_heads": 2, "group": 3, "d": 32, "rows": 2}
    wide = {"n": 261, "kv_heads": 2, "group": 2, "d": 64, "rows": 2}
    prop = {"method": "santa", "samples": 64, "variant": "systematic", "kernel": "prop"}
    for name, settings, shape in [
        ("santa-systematic", prop, shape),
        ("santa-stratified", prop | {"variant": "stratified"}, wide),
        ("santa-iid", prop | {"variant": "iid"}, shape),
        ("santa-flash", {"method": "santa", "samples": 64, "kernel": "flash", "tile": 32}, shape),
        # Fewer samples than tiles: one in each.
        ("santa-flash-few", {"method": "santa", "samples": 8, "kernel": "flash", "tile": 32}, shape),
        ("santa-prop_lr", {"method": "santa", "samples": 64, "kernel": "prop_lr", "tile": 32}, shape),
        ("santa-wide", prop, {"n": 149, "kv_heads": 1, "group": 4, "d": 128, "rows": 2}),
    ]:
        first_clear(lambda seed: make(name, settings, shape, seed))
    small = {"n": 301, "kv_heads": 2, "group": 3, "d": 32, "rows": 2}
    thin = prop | {"scores": "bernoulli", "draws": 3}
    first_clear(lambda seed: bernoulli("santa-bernoulli", thin | {"mean_query": False}, small, seed))
    first_clear(lambda seed: bernoulli("santa-mean_query", thin | {"mean_query": True}, small, seed))
    few = {"method": "oracle_top_k", "k": 80, "sink": 4, "window": 16}
    first_clear(lambda seed: within("santa-within-top_k", prop | {"within": few}, small, seed))
    some = {"method": "random_sample", "rate": 90, "sink": 4, "window": 16}
    flash = {"method": "santa", "samples": 40, "kernel": "flash", "tile": 32, "within": some}
    first_clear(lambda seed: within("santa-within-sample", flash, small, seed))


if __name__ == "__main__":
    main()
