#!/usr/bin/env python3
"""vAttention's decoding with the tail `hard` (see common.py): a promise that holds whatever key was not predicted.

Read exactly are sinks, window, and `top_k` keys, as in vattention.py. The first 32 others, in the order of the seed's
permutation, are read too, and first used as a sample of all the rest for a guess, of each head: max, the largest score
read, D = sum exp(score - max), and the output c = sum exp(score - max) v / D.

Pages are 16 keys from multiples of 16 on. A key of a page weighs at most w = exp(s - max), s = sum over channels of the
larger of q min and q max over sqrt(d), min and max the page's keys' (Quest); nu is the largest norm of its values. Pages
with keys left are ordered by the largest, over the group, of w (nu + |c|) / (D |c|), and the first are read whole: so
many that the keys read for them, and the other keys left times the next page's such number times
(4 / 3) ln(64 / delta) / epsilon, are together fewest.

r keys are left then. b of them, drawn on in the same order, are enough if for every head, with the sums D and o = N / D
over what is read and the sample, L = ln(64 / delta), w and nu of the heaviest page left in each, and
E(x, y) = r ((sqrt(x) + y sqrt(2 L / b)) sqrt(2 L / b) + (4 / 3) y L / b):

    X = E(mean of e^2 |v - c|^2 over the sample, w (nu + |c|)),  Y = E(mean of e^2, w) < D,
    (X + |o - c| Y) / (D - Y) <= epsilon / (1 + epsilon) |o|.

The sample starts with `pilot_tokens` and doubles. Each of its keys counts for r / b.
"""

from common import Array, Unclear, between, check, clear, dense, drawn, f16, first_clear, importance, math, np
from common import scores, top, weighed, write

SEED = 0x0123456789ABCDEF
PAGE, GUESS, LOOKS = 16, 32, 8


def heads(seed: int, n: int, kv_heads: int, group: int, d: int, rows: int) -> tuple[Array, Array, Array]:
    """Keys that are short but for two stretches, and values that lean one way: what bounds of pages can tell apart."""
    rng = np.random.default_rng(seed)
    k = 0.1 * rng.normal(size=(n, kv_heads, d))
    v = 0.4 * rng.normal(size=(n, kv_heads, d)) + 1 + 0.5 * rng.normal(size=(kv_heads, d))
    q = rng.normal(size=(rows, kv_heads, group, d)) + 0.7 * rng.normal(size=(kv_heads, 1, d))
    for h in range(kv_heads):
        for start in rng.choice(np.arange(80, n - 80), size=2, replace=False):
            # One key of the stretch is heavy for some head, and a neighbour is not quite.
            toward = q[0, h, rng.integers(group)]
            k[start, h] += 3.2 * toward / math.sqrt(d)
            k[start + 21, h] += 2.0 * toward / math.sqrt(d)
            v[start, h] -= 1.5
    return f16(q.reshape(rows, kv_heads * group, d)), f16(k), f16(v)


def bounds(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The largest score [pages, group] and norm [pages] of each page for queries [group, d], keys and values [m, d]."""
    starts = range(0, len(k), PAGE)
    low, high = (np.array([f(k[s : s + PAGE], axis=0) for s in starts]) for f in [np.min, np.max])
    most = np.maximum(q * low[:, None], q * high[:, None]).sum(axis=2) / math.sqrt(q.shape[1])
    return most, np.array([np.linalg.norm(v[s : s + PAGE], axis=1).max() for s in starts])


def make(settings: dict, shape: dict, seed: int) -> None:
    q, k, v = heads(seed, **shape)
    rows, n, kv_heads, group = len(q), len(k), k.shape[1], shape["group"]
    sink, window, pilot = settings["sink"], settings["window"], settings["pilot_tokens"]
    epsilon, delta = settings["epsilon"], settings["delta"]
    all_scores = scores(q, k)
    sizes, promoted = np.zeros((rows, kv_heads), int), np.zeros((rows, kv_heads), int)

    def weights(
        true=False,
        promote=True,
        guess=True,
        looks=LOOKS,
        strict=True,
        centred=True,
        reach=True,
        first_head=False,
        fixed_pages: int | None = None,
        page_norm=True,
        order=1,
    ) -> Array:
        chosen = np.zeros((rows, kv_heads, n))
        log = math.log(2 * 4 * looks / delta)
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(kv_heads):
                at = slice(h * group, (h + 1) * group)
                s, values = all_scores[r, at, :m], v[:m, h]
                candidates = between(m, sink, window)
                fixed = ~candidates
                fixed[top(importance(s), np.flatnonzero(candidates), settings["top_k"])] = True
                sample = drawn(fixed, SEED, h)[:GUESS]
                seen = fixed.copy()
                seen[sample] = True
                largest = s[:, seen].max(axis=1)
                e = np.exp(s - largest[:, None])
                count = len(drawn(fixed, SEED, h)) / GUESS
                weight = np.where(fixed, 1, 0) + np.isin(np.arange(m), sample) * count
                sums = e @ weight
                centre = (e * weight) @ values / sums[:, None]
                norm = np.linalg.norm(centre, axis=1)
                if guess:
                    fixed = seen
                most, norms = bounds(q[r, at], k[:m, h], values)
                heavy = np.exp(most - largest) * (norms[:, None] + norm) / (sums * norm)
                heavy = (heavy[:, :1] if first_head else heavy).max(axis=1)
                page = np.arange(m) // PAGE
                left = np.bincount(page[~fixed], minlength=len(heavy))
                ranked = np.flatnonzero(left)
                ranked = ranked[np.argsort(-order * heavy[ranked], kind="stable")]
                costs = []
                for i in range(len(ranked)):
                    others = left[ranked[i:]].sum() * heavy[ranked[i]] * 4 / 3 * log / epsilon
                    costs.append(left[ranked[:i]].sum() + others)
                best = int(np.argmin(costs))
                if true:
                    two = np.sort(costs)
                    clear(two[0], two[1])
                    if best:
                        clear(heavy[ranked[best - 1]], heavy[ranked[best]])
                best = best if fixed_pages is None else max(best + fixed_pages, 0)
                best = best if promote else 0
                fixed = fixed | np.isin(page, ranked[:best])
                rest = m - fixed.sum()
                sample = drawn(fixed, SEED, h)
                others = ranked[best:]
                if not len(others):
                    chosen[r, h, :m] = 1
                    continue
                far = np.exp(most[others].max(axis=0) - largest)  # Relative to the guess's largest score.
                nu = norms[others].max() if page_norm else 0.0
                b = pilot
                for look in range(LOOKS):
                    b = min(b, rest)
                    drawn_now = sample[:b]
                    sure = []
                    for g in range(1 if first_head else group):
                        w = float(far[g]) if reach else 0.0
                        w = w if strict else float(e[g, drawn_now].max())
                        c, x = (centre[g] if centred else 0 * centre[g]), e[g, drawn_now]

                        def error(square: float, largest_one: float) -> float:
                            root = math.sqrt(2 * log / b)
                            return rest * ((math.sqrt(square) + largest_one * root) * root + 4 / 3 * largest_one * log / b)

                        apart = ((values[drawn_now] - c) ** 2).sum(axis=1)
                        big_x = error((x**2 * apart).mean(), w * (nu + np.linalg.norm(c)))
                        big_y = error((x**2).mean(), w)
                        total = e[g, fixed].sum() + rest * x.mean()
                        out = (e[g, fixed] @ values[fixed] + rest * (x[:, None] * values[drawn_now]).mean(axis=0)) / total
                        goal = epsilon / (1 + epsilon) * np.linalg.norm(out)
                        found = (big_x + np.linalg.norm(out - c) * big_y) / (total - big_y) if big_y < total else math.inf
                        if true and abs(found - goal) < 1e-3 * goal:
                            raise Unclear("a bound is nearly met")
                        sure.append(found <= goal)
                    if all(sure):
                        break
                    b *= 2
                b = min(b, rest)
                if true and not (all(sure) and 2 <= look <= 6 and 1.5 * pilot < b < 0.7 * rest and 1 <= best < 30):
                    raise Unclear(f"{b} of {rest} keys after {look + 1} looks, {best} pages")
                if true:
                    sizes[r, h], promoted[r, h] = b, best
                chosen[r, h, :m] = fixed
                chosen[r, h, sample[:b]] = rest / b
        return chosen

    chosen = weights(true=True)
    wrong = {
        "no page promoted": weights(promote=False),
        "a page more": weights(fixed_pages=1),
        "a page less": weights(fixed_pages=-1),
        "the lightest pages": weights(order=-1),
        "the guess not read": weights(guess=False),
        "the sample's own largest": weights(strict=False),
        "no heaviest key": weights(reach=False),
        "no centre": weights(centred=False),
        "the first head's": weights(first_head=True),
        "one look's share of delta": weights(looks=1),
    }
    out = weighed(q, k, v, chosen)
    # Bounds that hold for every key leave little error.
    check(out, dense(q, k, v), {key: weighed(q, k, v, other) for key, other in wrong.items()}, far=0.01)
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": chosen > 0, "sizes": sizes, "promoted": promoted}
    write("vattention-hard", {"decode": settings}, arrays, seed=SEED)


def main() -> None:
    settings = {"method": "vattention", "tail": "hard", "epsilon": 0.7, "delta": 0.4, "sink": 4, "window": 16}
    settings |= {"top_k": 8, "top": {"method": "oracle"}, "pilot_tokens": 16, "dense_share": 1}
    shape = {"n": 1501, "kv_heads": 2, "group": 2, "d": 8, "rows": 2}
    first_clear(lambda seed: make(settings, shape, seed))


if __name__ == "__main__":
    main()
