#!/usr/bin/env python3
"""SANTA and S2ANTA decoding: the mean of values drawn by their probability (see common.py).

Each query head draws for itself, from all keys that its row sees. A target t in [0, 1) draws the first key, in the
order of tokens, whose inclusive cumulative probability exceeds t; S targets, k = 0..S-1, are

- systematic: (k + u) / S, one u;  stratified: (k + u_k) / S;  iid: u_k.

`prop` draws from all keys at once and divides by S. `flash` gives every tile max(1, S / tiles) systematic draws of its
own keys and weighs the tiles' means with their probabilities. `prop_lr` shares S out to the tiles by the largest
remainder of S times their probability (the lower tile first among equals), each tile drawing systematically, and
divides by S.

u_k is the number 0x53320000 + k, a tile's u the number 0x53330000 + tile, where a number is the first word of Philox,
>> 8, over 2^24, keyed by `seed`'s low and high half and counting [layer, query head, position, number]. `counts`
[rows, q_heads, n], u32, says how often each key is drawn.
"""

from common import Array, Unclear, check, dense, first_clear, heads, math, np, philox, scores, softmax, write

SEED = 0x0123456789ABCDEF
LAYER = 0
DRAWS, TILES = 0x53320000, 0x53330000
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
    ]:
        first_clear(lambda seed: make(name, settings, shape, seed))


if __name__ == "__main__":
    main()
