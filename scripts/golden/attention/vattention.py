#!/usr/bin/env python3
"""vAttention's decoding with the rule `denominator` (see common.py): sinks, a window, the top keys, and a sample.

Read exactly are the first `sink` keys, the last `window`, and of the others the `top_k` of the largest probability,
summed over the group. r keys are left. A pilot of the first b0 = `pilot_tokens` of them, in the order of a permutation
of all visible keys that `seed` keys, estimates for each head D = sum e over all keys and the variance s2 of e among the
r, e = exp(score - max). With replacement b = (z r s / (epsilon D))^2 draws bound D's relative error by epsilon, z the
1 - delta / 2 quantile of the normal distribution; without it b / (1 + b / r), rounded up. The group reads what its
neediest head needs. Needed are more keys than were drawn: the sample grows to as many, but to at most one and a half
times its size, rounded up, and is looked at again, until no head needs more. Each sampled key counts for r / b.
"""

from statistics import NormalDist

from common import Array, Unclear, between, check, dense, drawn, first_clear, heads, importance, math, np
from common import scores, top, weighed, write

SEED = 0x0123456789ABCDEF


def make(name: str, settings: dict, shape: dict, data: int) -> None:
    q, k, v = heads(data, **shape)
    rows, n, kv_heads, group = len(q), len(k), k.shape[1], shape["group"]
    sink, window, pilot = settings["sink"], settings["window"], settings["pilot_tokens"]
    all_scores = scores(q, k)
    sizes = np.zeros((rows, kv_heads), int)

    def weights(
        top_k=settings["top_k"],
        epsilon=settings["epsilon"],
        one_sided=False,
        replaced=False,
        first_head=False,
        over_all=False,
        one_look=False,
        unit=False,
        seed=SEED,
        true=False,
    ) -> Array:
        z = NormalDist().inv_cdf(1 - settings["delta"] / (1 if one_sided else 2))
        chosen = np.zeros((rows, kv_heads, n))
        for r in range(rows):
            m = n - rows + r + 1
            for h in range(kv_heads):
                s = all_scores[r, h * group : (h + 1) * group, :m]
                candidates = between(m, sink, window)
                fixed = ~candidates
                fixed[top(importance(s), np.flatnonzero(candidates), top_k)] = True
                sample = drawn(fixed, seed, h)
                rest = len(sample)
                size, looks = pilot, 0
                while not (one_look and looks):
                    needed = []
                    for g in range(1 if first_head else group):
                        e = np.exp(s[g] - s[g].max())
                        seen = e[sample[:size]]
                        total = (0 if over_all else e[fixed].sum()) + rest * seen.mean()
                        b = (z * rest * seen.std(ddof=1) / (epsilon * total)) ** 2
                        needed.append(b if replaced else b / (1 + b / rest))
                    b, looks = max(needed), looks + 1
                    if true and abs(b - round(b)) < 0.01:
                        raise Unclear(f"a budget of {b}")
                    if b <= size or size == rest:
                        break
                    size = min(math.ceil(b), rest) if one_look else min(math.ceil(b), math.ceil(1.5 * size), rest)
                if true and (looks < 3 or not 1.3 * pilot < size < 0.6 * rest):
                    raise Unclear(f"{size} of {rest} after {looks} looks")
                if true:
                    sizes[r, h] = size
                chosen[r, h, :m] = fixed
                chosen[r, h, sample[:size]] = 1 if unit else rest / size
        return chosen

    chosen = weights(true=True)
    wrong = {
        "weights of one": weights(unit=True),
        "one-sided": weights(one_sided=True),
        "draws with replacement": weights(replaced=True),
        "the first head's budget": weights(first_head=True),
        "the rest's sum alone": weights(over_all=True),
        "one top key more": weights(top_k=settings["top_k"] + 1),
        "no top keys": weights(top_k=0),
        "the pilot alone": weights(epsilon=100),
        "one look": weights(one_look=True),
        "another seed": weights(seed=SEED >> 32),
    }
    out = weighed(q, k, v, chosen)
    check(out, dense(q, k, v), {key: weighed(q, k, v, other) for key, other in wrong.items()})
    arrays = {"q": q, "k": k, "v": v, "out": out, "selected": chosen > 0, "sizes": sizes}
    write(name, {"decode": settings}, arrays, seed=SEED)


def main() -> None:
    settings = {"method": "vattention", "rule": "denominator", "epsilon": 0.12, "delta": 0.2, "sink": 4, "window": 16}
    settings |= {"top_k": 20, "top": {"method": "oracle"}, "pilot_tokens": 24, "pilot_share": 0, "dense_share": 1}
    shape = {"n": 801, "kv_heads": 2, "group": 2, "d": 16, "rows": 3}
    first_clear(lambda data: make("vattention", settings, shape, data))


if __name__ == "__main__":
    main()
