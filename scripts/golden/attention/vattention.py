#!/usr/bin/env python3
"""vAttention's decoding (see common.py): sinks, a window, the top keys, and a sample that stands for the rest.

Read exactly are the first `sink` keys, the last `window`, and of the others the `top_k` of the largest probability,
summed over the group, or what quest.py or hash_attention.py predicts for as many. Where it is "auto", the m between sinks and window
are ranked by their largest probability p over the group, sorted into bins of an eighth of an octave, [2^a (1 + i / 8), 2^a (1 + (i + 1) / 8)),
and read from the highest bin on: a bin is read while c^2 times how many keys there are in it and below is at least noise plus their sum of
c^2, c the middle of each key's bin and noise = (0.18 epsilon)^2 (and while at most a quarter of all keys are read, which none of these
reach). r of the n visible keys are left. A pilot of about `pilot_tokens` of them, or, where that is more, the share `pilot_share` of r, rounded up, says for each head how many keys the promise takes:
relative error at most epsilon with probability at least 1 - delta. The group reads what its neediest head needs. Needed are more
keys than were drawn: the sample grows to about as many, or, where these are more than twice its size, to half of them, but to at most
eight times and at least twice its size, and is looked at again, until no head needs more. Where a head's sample is too noisy to tell, it grows about fourfold. "About k": those left that are among the first k n / r,
rounded up, in the order of a permutation of all visible keys that `seed` keys. Of a sample of b keys each counts for r / b.

With e = exp(score - max), D = sum e, N = sum e v and o = N / D estimated from what is read, sample variances s2 of e,
T of e v and R of e (v - o) (traces of covariances), z(p) the normal distribution's p quantile, c(p) = max(z(1 - p / 2),
1.24), each rule gives the root of b, the draws with replacement:

- denominator: z(1 - delta / 2) r s / (epsilon D).
- lemma: least of (a1 + a2) / (epsilon / 2) over the splits delta2 / delta in .02, .05, .1, .2, .3, .5, with
  a1 = c(delta1) r sqrt(T) / |N| and a2 = z(1 - delta2 / 2) r s / D.  tight: (a1 + (1 + epsilon) a2) / epsilon.
- ratio: c(0.9 delta) r sqrt(R) / (epsilon D |o|) + z(1 - 0.1 delta) r s / D.
- chi2: C r sqrt(R (1 + u)) / (epsilon D |o|), where C^2 R is the 1 - delta^1.05 quantile of a gamma variable of mean R and
  variance 2 Tr(S^2), S the covariance of e (v - o), by Wilson and Hilferty. Tr(S^2) / Tr(S)^2, which is between 1 / d
  and 1, is of the first 40 keys drawn (of the permutation's first 128 at most), their e (v - o) less the sample's mean, the sum over
  pairs of different ones of their squared products over that of the products of their squared norms. For keys heavier than all that were drawn,
  u = 0.5 ln(1 / delta)^3 s^1.5, s the heaviest's share of the sum of e^2, or of e^2 |v|^2 if that is more.

|N| and |o| are less the sample's noise: of |N|^2 the part r^2 T (1 / b - 1 / r), of |o|^2 r^2 R (1 / b - 1 / r) / D^2
is taken off; less than a quarter left is too noisy to tell. Without replacement it takes b / (1 + b / r), rounded up.
"""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

from common import Array, Unclear, between, check, dense, f16, first_clear, heads, importance, math, np
from common import Choose, order, scores, softmax, top, weighed, write

import hash_attention
import quantized_keys
import quest

SEED = 0x0123456789ABCDEF
SPLITS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5]
PAIRS = 40
UNSEEN = 0.5
TAIL = 1.05
PAYS = 0.18

z = NormalDist().inv_cdf


def paying(p: Array, noise: float, clear: bool) -> Array:
    """Which of the largest probabilities are cheaper to read than to sample around."""
    if noise == 0:
        return p > 0
    mantissa, exponent = np.frexp(p)
    eighth = np.floor(16 * mantissa - 8)
    if clear and (np.abs(16 * mantissa - 8 - np.round(16 * mantissa - 8)) < 1e-4).any():
        raise Unclear("a key on the edge of a bin")
    square = np.ldexp(8.5 + eighth, exponent - 4) ** 2
    read = np.zeros(len(p), bool)
    for of in np.unique(square)[::-1]:
        left, rest = of * (square <= of).sum(), noise + square[square <= of].sum()
        if clear and abs(left / rest - 1) < 1e-3:
            raise Unclear("a bin that all but pays")
        if left < rest:
            break
        read |= square == of
    return read


def quantile(share: float, least: float = 1.24) -> float:
    """Of a vector's norm, in units of the root of its covariance's trace."""
    return max(z(1 - share / 2), least)


def needed(
    settings: dict,
    known: tuple[float, Array],
    e: Array,
    v: Array,
    rest: int,
    least: float = 1.24,
    noise: bool = True,
    pairs: int = PAIRS,
    unseen: float = UNSEEN,
    one_sided: bool = False,
    by_weight: bool = False,
    replaced: bool = False,
) -> float | None:
    """Keys that one head needs by a sample e [b], v [b, d] of `rest` keys, with sums of those known; None: too noisy."""
    rule, epsilon, delta = settings["rule"], settings["epsilon"], settings["delta"]
    b = len(e)
    total = known[0] + rest * e.mean()
    ev = e[:, None] * v
    numerator = known[1] + rest * ev.mean(axis=0)
    deviation = rest * e.std(ddof=1) / total
    left = rest**2 * (1 / b - 1 / rest)

    def spread(x: Array) -> float:
        return float(x.var(axis=0, ddof=1).sum())

    def size(vector: Array, off: float) -> float | None:
        square = float(vector @ vector)
        left = square - (off if noise else 0)
        if abs(left - square / 4) < 0.01 * square:
            raise Unclear("the noise is nearly three quarters")
        return None if left < square / 4 else math.sqrt(left)

    if rule == "denominator":
        root = z(1 - delta / (1 if one_sided else 2)) * deviation / epsilon
    elif rule in ["lemma", "tight"]:
        norm = size(numerator, left * spread(ev))
        if norm is None:
            return None
        roots = []
        for share in SPLITS:
            a1 = quantile(delta * (1 - share), least) * rest * math.sqrt(spread(ev)) / norm
            a2 = z(1 - delta * share / 2) * deviation
            roots.append((a1 + a2) / (epsilon / 2) if rule == "lemma" else (a1 + (1 + epsilon) * a2) / epsilon)
        root = min(roots)
    else:
        output = numerator / total
        x = e[:, None] * (v - output)
        norm = size(output, left * spread(x) / total**2)
        if norm is None:
            return None
        scale = rest * math.sqrt(spread(x)) / (epsilon * total * norm)
        if rule == "ratio":
            root = quantile(0.9 * delta, least) * scale + z(1 - 0.1 * delta) * deviation
        else:
            x = x - x.mean(axis=0)
            few = x[:pairs] @ x[:pairs].T
            norms = np.diag(few)
            different = ((few**2).sum() - (norms**2).sum()) / (norms.sum() ** 2 - (norms**2).sum())
            part = 2 / 9 * min(max(different, 1 / v.shape[1]), 1)
            factor = (1 - part + z(1 - delta**TAIL) * math.sqrt(part)) ** 1.5
            shares = [w.max() / w.sum() for w in ([e**2] if by_weight else [e**2, e**2 * (v**2).sum(1)])]
            heavier = unseen * math.log(1 / delta) ** 3 * max(shares) ** 1.5
            root = factor * scale * math.sqrt(1 + heavier)
    return root**2 if replaced else root**2 / (1 + root**2 / rest)


def make(
    name: str,
    settings: dict,
    shape: dict,
    data: int,
    lean: float = 0.0,
    noisy: bool = False,
    predict: Callable[[int], Choose] | None = None,
    artefacts: dict[str, Array] | None = None,
    guess: Callable[[Array, Array], Array] | None = None,
    made=heads,
) -> None:
    """`predict`: which keys are read exactly, for as many predicted ones; the oracle's unless it is given. `guess`: scores by which those
    are told that pay, where not by all true ones."""
    q, k, v = made(data, **shape)
    v = f16(v + lean)
    rows, n, kv_heads, group = len(q), len(k), k.shape[1], shape["group"]
    sink, window, rule = settings["sink"], settings["window"], settings["rule"]
    all_scores = scores(q, k)
    sizes = np.zeros((rows, kv_heads), int)

    def weights(
        top_k=settings["top_k"],
        pays=PAYS,
        largest=True,
        first_head=False,
        oracle=predict is None and guess is None,
        told=guess,
        over_all=False,
        one_look=False,
        unit=False,
        exactly=False,
        seed=SEED,
        true=False,
        pilot_share=settings["pilot_share"],
        other: dict | None = None,
        **how: float | bool,
    ) -> Array:
        chosen = np.zeros((rows, kv_heads, n))
        too_noisy = most_looks = 0
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(kv_heads):
                s = all_scores[r, h * group : (h + 1) * group, :m]
                candidates = between(m, sink, window)
                fixed = ~candidates
                if top_k == "auto":
                    at = np.flatnonzero(candidates)
                    own = s if oracle or told is None else told(q[r, h * group : (h + 1) * group], k[:m, h])
                    p = softmax(own)[:, at]
                    share, noise = p.max(0) if largest else p.sum(0), (pays * settings["epsilon"]) ** 2
                    read = paying(share, noise, true)
                    fixed[at[read]] = True
                elif oracle:
                    fixed[top(importance(s), np.flatnonzero(candidates), top_k)] = True
                elif top_k:
                    fixed = predict(top_k)(q[r, h * group : (h + 1) * group], k[:m, h], h)
                places, rest = order(fixed, seed, h), int((~fixed).sum())
                left = np.array([not fixed[key] for key in places])
                pilot = max(settings["pilot_tokens"], math.ceil(pilot_share * rest))
                aim, size, points, looks = pilot, 0, 0, 0
                while True:
                    # The points in which the missing keys are expected.
                    points = min(points - (-(aim - size) * m // rest), m)
                    if exactly:
                        points = int(np.searchsorted(left.cumsum(), aim)) + 1
                    sample = np.array(places[:points])[left[:points]]
                    size = len(sample)
                    if aim >= rest or one_look and looks:
                        break
                    budgets = []
                    for g in range(1 if first_head else group):
                        e = np.exp(s[g] - s[g].max())
                        known = (0 if over_all else e[fixed].sum(), e[fixed] @ v[:m, h][fixed])
                        pairs = {"pairs": min(PAIRS, left[:128].sum())} | how
                        budgets.append(needed(settings | (other or {}), known, e[sample], v[sample, h], rest, **pairs))
                    looks += 1
                    if None in budgets:
                        too_noisy += 1
                        aim = min(4 * size, rest)
                        continue
                    b = max(budgets)
                    if true and abs(b - round(b)) < 0.01:
                        raise Unclear(f"a budget of {b}")
                    if b <= size:
                        break
                    b = math.ceil(b)
                    aim = min(b, rest) if one_look else min(b, max(2 * size, min(b // 2, 8 * size)), rest)
                most_looks = max(most_looks, looks)
                if true and (looks < 2 and not noisy or not 1.3 * pilot < size < 0.6 * rest):
                    raise Unclear(f"{size} of {rest} after {looks} looks")
                if true:
                    sizes[r, h] = size
                chosen[r, h, :m] = fixed
                chosen[r, h, sample] = 1 if unit else rest / size
        if true and noisy != (too_noisy > 0):
            raise Unclear(f"{too_noisy} looks are too noisy")
        if true and most_looks < 3:
            raise Unclear("no sample is looked at three times")
        return chosen

    chosen = weights(true=True)
    wrong = {
        "weights of one": weights(unit=True),
        "draws with replacement": weights(replaced=True),
        "the first head's budget": weights(first_head=True),
        "the rest's sum alone": weights(over_all=True),
        "more top keys": weights(pays=PAYS / 1.5)
        if settings["top_k"] == "auto"
        else weights(top_k=settings["top_k"] + (1 if predict is None else 16)),
        "no top keys": weights(top_k=0),
        "the pilot alone": weights(other={"epsilon": 100}),
        "one look": weights(one_look=True),
        "exactly as many": weights(exactly=True),
        "another seed": weights(seed=SEED >> 32),
    }
    if settings["pilot_share"] > 0:
        wrong["no share in the pilot"] = weights(pilot_share=0)
    if settings["top_k"] == "auto":
        wrong["all of the group count"] = weights(largest=False)
    if predict or guess:
        wrong["the oracle's keys"] = weights(oracle=True)
    if guess:
        wrong["sure of scores"] = weights(told=partial(guess, doubt=quantized_keys.sure))
    if rule == "denominator":
        wrong["one-sided"] = weights(one_sided=True)
    else:
        rules = [other for other in ["denominator", "lemma", "tight", "ratio", "chi2"] if other != rule]
        wrong |= {f"the rule {other}": weights(other={"rule": other}) for other in rules}
        wrong["noise and all"] = weights(noise=False)
    if rule in ["tight", "ratio"]:
        wrong["a scalar's quantile"] = weights(least=0.0)
    if rule == "chi2":
        wrong |= {"nothing unseen": weights(unseen=0.0), "all pairs": weights(pairs=n)}
        wrong["heavy by weight alone"] = weights(by_weight=True)
    out = weighed(q, k, v, chosen)
    check(out, dense(q, k, v), {key: weighed(q, k, v, other) for key, other in wrong.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": chosen > 0, "sizes": sizes}
    arrays |= {f"artefact.{key}": x for key, x in (artefacts or {}).items()}
    write(name, {"decode": settings}, arrays, seed=SEED)


def main() -> None:
    settings = {"method": "vattention", "rule": "denominator", "epsilon": 0.12, "delta": 0.2, "sink": 4, "window": 16}
    settings |= {"top_k": 20, "top": {"method": "oracle"}, "pilot_tokens": 24, "pilot_share": 0, "dense_share": 1}
    shape = {"n": 801, "kv_heads": 2, "group": 2, "d": 16, "rows": 3}
    first_clear(lambda data: make("vattention", settings, shape, data))
    shape |= {"n": 601, "rows": 2}
    # The quantile of a vector is another one where delta is large.
    for rule, epsilon, delta, lean in [
        ("lemma", 0.9, 0.2, 3.0),
        ("tight", 0.4, 0.5, 2.0),
        ("ratio", 0.15, 0.5, 1.5),
        ("chi2", 0.1, 0.1, 1.5),
    ]:
        own = settings | {"rule": rule, "epsilon": epsilon, "delta": delta}
        first_clear(lambda data: make(f"vattention-{rule}", own, shape, data, lean))
    own = settings | {"rule": "chi2", "epsilon": 0.4, "delta": 0.2, "pilot_tokens": 12}
    first_clear(lambda data: make("vattention-noisy", own, shape, data, 0.2, noisy=True))

    own = settings | {"rule": "chi2", "epsilon": 0.1, "delta": 0.1}
    by_share = own | {"pilot_tokens": 12, "pilot_share": 0.05}
    first_clear(lambda data: make("vattention-pilot_share", by_share, shape, data, 1.5))
    auto = own | {"top_k": "auto", "pilot_tokens": 12, "epsilon": 0.2}
    first_clear(lambda data: make("vattention-auto", auto, shape | {"n": 1501, "kv_heads": 1}, data, 0.5))
    auto |= {"top": {"method": "quantized_keys"}}
    wide = {"n": 1501, "kv_heads": 1, "group": 2, "d": 32, "rows": 2}
    how = {"guess": quantized_keys.guessed, "made": quantized_keys.exact}
    first_clear(lambda data: make("vattention-quantized_keys", auto, wide, data, 0.5, **how))
    paged = own | {"top_k": 32, "epsilon": 0.12, "top": {"method": "quest", "page": 8}}

    def by_pages(top_k: int) -> Choose:
        return quest.chooser(top_k, paged["sink"], paged["window"], 8)

    first_clear(lambda data: make("vattention-quest", paged, shape, data, 1.5, predict=by_pages))
    hashed = own | {"top_k": 32, "epsilon": 0.12, "top": {"method": "hash_attention"}}
    shape = {"n": 501, "kv_heads": 1, "group": 2, "d": 32, "rows": 2}

    def by_codes(data: int) -> None:
        query, key = hash_attention.networks(data, 1, 2, 1)

        def predict(top_k: int) -> Choose:
            return hash_attention.chooser(1, query, key, hashed | {"k": top_k})

        learned = hash_attention.artefact(query, key)
        make("vattention-hash_attention", hashed, shape, data, 1.5, predict=predict, artefacts=learned)

    first_clear(by_codes)
    wide = own | {"epsilon": 0.2, "top_k": 8, "sink": 2, "window": 4, "pilot_tokens": 12}
    shape = {"n": 151, "kv_heads": 1, "group": 4, "d": 128, "rows": 2}
    first_clear(lambda data: make("vattention-wide", wide, shape, data, 1.0))


if __name__ == "__main__":
    main()
