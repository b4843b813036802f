"""Selection by count and by mass over groups of score rows, and scores of binary codes.

check(report, small) compares with sorting in float64; bench(put, time) measures, where
time(f) is the median of a graph replay in microseconds.
"""
import math

import torch

import taper_gpu as t
from oracle import rel
from taper_gpu import GroupSelectParams, HashScoreParams, SelectParams, call

DEV = "cuda"
MAX, SUM = t.MAX_OF_GROUP, t.SUM_OF_GROUP
COUNT, SCORE = t.BY_COUNT, t.BY_SCORE


class GroupSelect:
    """Ascending ids of each list's best entries; a list reduces `group` rows of scores. `base`: further fields of SelectParams."""

    def __init__(self, scores, capacity, group=1, reduce=MAX, lse=None, k=0, mass=COUNT, share=0.0, **base):
        rows, stride = scores.shape
        lists, dev = rows // group, scores.device
        self.ids = torch.full((lists, capacity), -1, dtype=torch.int32, device=dev)
        self.counts = torch.full((lists,), -1, dtype=torch.int32, device=dev)
        self.p = GroupSelectParams(
            base=SelectParams(scores=scores, ids=self.ids, counts=self.counts, lists=lists, stride=stride, capacity=capacity,
                              entries=stride, k=k, **base),
            lse=lse, group=group, reduce=reduce, mass=mass, share=share)

    def __call__(self):
        call("taper_select_group", self.p)
        return self.ids


class HashScore:
    """q [rows, q_heads, words] against codes [blocks, kv_heads, 64, width], both int32."""

    def __init__(self, cache, q, codes, per_head):
        rows, q_heads, words = q.shape
        stride, dev = max(cache.lens), q.device
        self.out = torch.full((rows, cache.kv_heads, stride), float("nan"), device=dev)
        self.p = HashScoreParams(
            q=q, codes=codes, **cache.where, lens=torch.tensor(cache.lens, dtype=torch.int32, device=dev), out=self.out,
            rows=rows, q_heads=q_heads, words=words, per_head=per_head, max_len=stride, stride=stride)

    def __call__(self):
        call("taper_hash_score", self.p)
        return self.out


def reduced(scores, group, reduce, lse):
    x = scores.view(-1, group, scores.shape[-1])
    if lse is not None:
        x = torch.exp(x - lse.view(-1, group, 1))
    return x.amax(1) if reduce == MAX else x.sum(1)


def best(x, k):
    """The k best of a row, ties to the lower index, ascending."""
    # NaN ranks last: below minus infinity, which no double but itself is.
    x = torch.where(x.isnan(), -math.inf, x.double().clamp_min(-1e300))
    order = torch.sort(x, descending=True, stable=True).indices
    return order[:k].sort().values


def same(ids, count, want):
    return int(count) == len(want) and torch.equal(ids[:len(want)].long(), want)


def least_paying(x, noise, most):
    """The least of shares [n] that is cheaper to take than to sample around, at most `most` of them; NaN is none."""
    noise = float(torch.tensor(noise, dtype=torch.float32)) * 2.0**54
    bins = ((x[~x.isnan()].view(torch.int32) >> 20) - 800).clamp(0, 255).long()
    counts = torch.bincount(bins, minlength=256).tolist()
    square = lambda b: (17 + 2 * (b % 8))**2 << 2 * (b // 8) >> 8
    left, total = len(x), sum(n * square(b) for b, n in enumerate(counts))
    for b in range(255, -1, -1):
        if not counts[b]:
            continue
        pays = float(square(b)) * float(left) >= float(total) + noise
        left -= counts[b]
        if not pays or len(x) - left > most:
            return math.inf if b == 255 else 2.0**((b + 1) // 8 - 27) * (1 + (b + 1) % 8 / 8)
        total -= counts[b] * square(b)
    return 0.0


def spread(kind, rows, n):
    x = torch.randn(rows, n, device=DEV)
    if kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "equal":
        x = torch.zeros_like(x)
    elif kind == "narrow":
        x = 1 + x * 1e-6
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0) * (x.abs() > 0.5) + (x > 2) * x
    elif kind == "nan":
        x[:, ::9] = float("nan")
        x[:, 1::7] = float("-inf")
    elif kind == "wide":
        x = x.sign() * torch.exp(x * 20)
    return x.contiguous()


def check_count(report, small):
    # The small sizes, fit for racecheck, still include one that two thread blocks share.
    sizes = [1, 700, 9000] if small else [
        1, 33, 1000, 2048, 2049, 4097, 8192, 8193, 20000, 33000, 131072, 140000, 524289, 1100000]
    for n in sizes:
        for kind in ("ties", "wide") if small else ("normal", "ties", "equal", "narrow", "zeros",
                                                    "wide", "nan"):
            bad, lists = 0, 2 if small else 3
            x = spread(kind, lists, n)
            x[0, : n // 7] = float("-inf")
            for k in {n // 20, n} if small else {0, 1, n // 20, n // 2, n - 1, n, n + 5}:
                cap = max(k, 1)
                f = GroupSelect(x, cap, k=k)
                f()
                for i in range(lists):
                    bad += not same(f.ids[i], f.counts[i], best(x[i], min(k, n)))
            # Of shares those that pay: x's own scale does for a sum of squares.
            x = x.abs().clamp_max(30) / 1024
            for noise in (1e-9, 1e-4, 1.0):
                for k in {n // 20, n}:
                    f = GroupSelect(x, max(k, 1), k=k, noise=noise)
                    f()
                    for i in range(lists):
                        want = torch.nonzero(x[i] >= least_paying(x[i], noise, k)).flatten()
                        bad += not same(f.ids[i], f.counts[i], want)
            report(f"select {n} {kind}", float(bad), 0.5)
    # Bounds, counts and capacities of each list's own; the work lists patched.
    n, lists = 3000, 5
    x = spread("ties", lists, n)
    begins = torch.tensor([0, 5, 2999, 3000, 100], dtype=torch.int32, device=DEV)
    ends = torch.tensor([3000, 2000, 3000, 3000, 101], dtype=torch.int32, device=DEV)
    ks = torch.tensor([7, 3000, 4, 4, 0], dtype=torch.int32, device=DEV)
    given = torch.tensor([t.work_list(length=n)] * lists, dtype=torch.int32, device=DEV)
    work = torch.full_like(given, -1)
    f = GroupSelect(x, 2500, ks=ks, begins=begins, ends=ends, given=given, work=work)
    f()
    bad = 0
    for i in range(lists):
        b, e = int(begins[i]), int(ends[i])
        want = best(x[i, b:e], min(int(ks[i]), e - b)) + b
        bad += not same(f.ids[i], f.counts[i], want)
        want_work = given[i].tolist()
        want_work[6:8] = [i * 2500, len(want)]
        bad += work[i].tolist() != want_work
    report("select bounds and work lists", float(bad), 0.5)


def check_group(report, small):
    for group in (1, 3, 4, 8, 16):
        for reduce in (MAX, SUM):
            n = 900 if small else 40000
            x = spread("normal", 2 * group, n)
            lse = torch.logsumexp(x, -1) if reduce == SUM else None
            k = n // 15
            f = GroupSelect(x, k, group, reduce, lse, k=k)
            f()
            y = reduced(x, group, reduce, lse)
            bad = 0
            for i in range(2):
                if reduce == MAX:
                    bad += not same(f.ids[i], f.counts[i], best(y[i], k))
                else:
                    # Sums may round otherwise: no entry left out may beat one taken by more.
                    taken = torch.zeros(n, dtype=torch.bool, device=DEV)
                    taken[f.ids[i].long()] = True
                    bad += int(taken.sum()) != k
                    bad += bool(y[i][~taken].max() > y[i][taken].min() * (1 + 1e-5))
            report(f"select group {group} {'max' if reduce == MAX else 'sum'}", float(bad), 0.5)


def check_mass(report, small):
    sizes = [1, 9000] if small else [1, 100, 2048, 5000, 33000, 131072, 600000]
    for n in sizes:
        for kind in ("normal", "ties", "equal"):
            for share in (0.9, 1.0) if small else (0.0, 0.1, 0.9, 0.999, 1.0):
                x = spread(kind, 2, n)
                x = x.abs() if kind != "equal" else x + 0.25
                if n > 3:
                    x[:, 3] = 0.0
                f = GroupSelect(x, n, mass=SCORE, share=share)
                f()
                bad = sum(not mass_holds(x[i].double(), f.ids[i], int(f.counts[i]), share) for i in range(2))
                report(f"select mass {n} {kind} {share}", float(bad), 0.5)


def mass_holds(w, ids, k, share):
    """The fewest best entries that reach the share, within 1e-5 of the total."""
    n, total = len(w), w.sum()
    if share <= 0 or total == 0:
        return k == 0
    if share >= 1:
        return same(ids, k, (w > 0).nonzero().flatten())
    order = torch.sort(w, descending=True, stable=True).indices
    run = torch.cumsum(w[order], 0)
    slack = 1e-5 * total
    if k == 0 or k > n or run[k - 1] < share * total - slack:
        return False
    reached = run[k - 2] if k > 1 else 0.0
    return bool(reached <= share * total + slack) and same(ids, k, order[:k].sort().values)


def popcount(x):
    x = x.long() & 0xFFFFFFFF
    n = torch.zeros_like(x)
    for _ in range(32):
        n += x & 1
        x >>= 1
    return n


def check_hash(report, small):
    lens = [1, 70, 300] if small else [1, 64, 5001, 20000]
    for kv, group, words, per_head in ((2, 4, 1, True), (1, 3, 1, True), (2, 1, 4, False),
                                       (1, 16, 2, False), (2, 7, 3, False), (1, 16, 4, True)):
        cache = t.Cache(lens, kv, 64, torch.bfloat16)
        width = group * words if per_head else words
        bits = lambda *s: torch.randint(-2**31, 2**31, s, device=DEV).to(torch.int32)
        codes = bits(cache.blocks, kv, 64, width)
        q = bits(len(lens), kv * group, words)
        f = HashScore(cache, q, codes, per_head)
        f()
        bad = 0.0
        for i, n in enumerate(lens):
            c = codes[cache.table[i, :(n + 63) // 64].long()].permute(1, 0, 2, 3)
            c = c.reshape(kv, -1, group if per_head else 1, words)[:, :n]
            x = c.transpose(1, 2) ^ q[i].view(kv, group, 1, words)
            want = (32 * words - 2 * popcount(x).sum(-1)).float().sum(1)
            bad += float((f.out[i, :, :n] != want).any())
        report(f"hash scores {kv}x{group} {words} words", bad, 0.5)


def check_labels(report, small):
    lens = [1, 70, 300] if small else [1, 70, 9000]
    for dtype in (torch.bfloat16, torch.float16):
        for kv, group in ((2, 4), (1, 3), (1, 16)):
            cache = t.Cache(lens, kv, 64, dtype)
            labels = torch.randn(cache.blocks, kv, 64, 16, device=DEV, dtype=dtype)
            q = torch.randn(len(lens), kv * group, 16, device=DEV, dtype=dtype)
            f = t.Score(cache, q, labels, scale=0.25)
            f()
            err = 0.0
            for i, n in enumerate(lens):
                x = labels[cache.table[i, :(n + 63) // 64].long()].permute(1, 0, 2, 3)
                x = x.reshape(kv, -1, 16)[:, :n].double().repeat_interleave(group, 0)
                want = 0.25 * torch.einsum("hd,hnd->hn", q[i].double(), x)
                err = max(err, rel(f.out[i, :, :n], want))
            report(f"score 16 labels {dtype} group {group}", err)


def check(report, small):
    check_count(report, small)
    check_group(report, small)
    check_mass(report, small)
    check_hash(report, small)
    check_labels(report, small)


def bench(put, time):
    lists = 8
    for n in (32768, 131072, 524288, 1048576):
        x = torch.randn(lists, n, device=DEV)
        k = n // 20
        put(f"select {n} 5% of tokens us", time(GroupSelect(x, k, k=k)))
        lse = torch.logsumexp(x, -1)
        put(f"select {n} top-p 0.9 us", time(GroupSelect(x, n, lse=lse, mass=SCORE, share=0.9)))
        put(f"select {n} torch.topk us", time(lambda: torch.topk(x, k)))
        g = torch.randn(lists * 4, n, device=DEV)
        put(f"select {n} 5% of tokens, sum of 4 heads us",
            time(GroupSelect(g, k, 4, SUM, torch.logsumexp(g, -1), k=k)))
        put(f"select {n} what pays of the largest of 4 heads us",
            time(GroupSelect(g, n // 4, 4, MAX, torch.logsumexp(g, -1), k=n // 4, noise=3e-4)))
        y = x[:, :n // 64].contiguous()
        put(f"select {n} 5% of blocks us", time(GroupSelect(y, k // 64, k=k // 64)))
        put(f"select {n} find_k 0.95 of block masses us",
            time(GroupSelect(y.exp(), n // 64, mass=SCORE, share=0.95)))
    for n in (131072, 524288):
        cache = t.Cache([n], 8, 64, torch.bfloat16, poison=False)
        q = torch.randint(-2**31, 2**31, (1, 32, 1), device=DEV).to(torch.int32)
        codes = torch.randint(-2**31, 2**31, (cache.blocks, 8, 64, 4), device=DEV).to(torch.int32)
        put(f"score {n} hash codes, 16 B a token us",
            time(HashScore(cache, q, codes, True)))
        labels = torch.randn(cache.blocks, 8, 64, 16, device=DEV, dtype=torch.bfloat16)
        q = torch.randn(1, 32, 16, device=DEV, dtype=torch.bfloat16)
        put(f"score {n} 16 labels us", time(t.Score(cache, q, labels)))
        means = torch.randn(cache.blocks, 8, 1, 128, device=DEV, dtype=torch.bfloat16)
        q = torch.randn(1, 32, 128, device=DEV, dtype=torch.bfloat16)
        if n == 131072:
            keys = t.Cache([n], 8, 128, torch.bfloat16, poison=False)
            wide = torch.randn(1, 32, 128, device=DEV, dtype=torch.bfloat16)
            put(f"score {n} all keys us", time(t.Score(keys, wide, keys.k)))
        put(f"score {n} block means us", time(t.Score(cache, q, means)))
