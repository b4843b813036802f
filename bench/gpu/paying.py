"""The tokens that pay, by their quantized keys: scored and chosen in one launch.

check(report, small) compares with shares in float64 of the scores that another launch gives; bench(put, time) measures,
where time(f) is the median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from quantized import Lse, Quantize, QuantizedScore, Steps, apart_by_block, copied
from selection import MAX, SUM, GroupSelect, least_paying
from taper_gpu import PickTokensParams, call

DEV = "cuda"


class PickTokens:
    """Of the tokens between `begins` and `ends` of each list those that pay, at most `ks` of them."""

    def __init__(self, cache, q, index, noise, ks, begins, ends, reduce=MAX, fresh=0):
        rows, q_heads, d = q.shape
        lens, kv = cache.lens, cache.kv_heads
        lists, group = rows * kv, q_heads // kv
        stride, capacity = (max(lens) + 63) // 64 * 64, max(max(ks), 1)
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
        apart = [e > b for b, e in zip(begins, ends)]
        self.lists = i32([t.work_list((0, e) if a else (0, 0), (b, n) if a else (n, 0), length=n)
                          for n, a, b, e in zip([n for n in lens for _ in range(kv)], apart, begins, ends)])
        self.ids = torch.full((lists, capacity), -1, dtype=torch.int32, device=DEV)
        self.work = torch.full((lists, 16), -1, dtype=torch.int32, device=DEV)
        most = t.team_size(kv)
        self.sync = torch.zeros(1 + lists, 32, dtype=torch.int32, device=DEV)
        self.sums = torch.zeros(lists, most, group, 4, dtype=torch.int64, device=DEV)
        self.bins = torch.zeros(lists, most, 256, dtype=torch.int32, device=DEV)
        self.p = PickTokensParams(
            q=q, index=index, **cache.where, lens=i32(lens), begins=i32(begins), ends=i32(ends), ks=i32(ks),
            lists=self.lists, scores=torch.full((rows, q_heads, stride), float("nan"), device=DEV), ids=self.ids, work=self.work,
            sync=self.sync, sums=self.sums, bins=self.bins, rows=rows, q_heads=q_heads, head_dim=d, dtype=q.dtype, stride=stride,
            capacity=capacity, reduce=reduce, fresh=fresh, scale=d**-0.5, noise=noise)

    def __call__(self):
        call("taper_pick_tokens", self.p)
        return self.ids

    def clean(self):
        """Whether everything that launches meet by is as it was."""
        return not any(bool(x.any()) for x in (self.sync, self.sums, self.bins))


def shares(scores, group, reduce):
    """Of scores [heads, n] of one row: each list's shares of the mass, float64, of which NaN is none."""
    x = torch.exp(scores.double() - torch.logsumexp(scores.double(), -1, keepdim=True)).view(-1, group, scores.shape[-1])
    if reduce == SUM:
        return x.sum(1)
    return torch.where(x.isnan(), -1.0, x).amax(1).masked_fill(x.isnan().all(1), float("nan"))


def differs(ids, share, begin, end, noise, k, rounding=2e-5):
    """Whether ids are not those of `share` [n] that pay; what is within rounding of the least share may be either."""
    own = share[begin:end]
    for nudge in (0.0, rounding / 10, -rounding / 10):
        least = least_paying((own * (1 + nudge)).float(), noise, k)
        got = torch.zeros(len(own), dtype=torch.bool, device=DEV)
        got[ids.long() - begin] = True
        wrong = got != (own >= least)
        if not bool((wrong & ((own / least - 1).abs() > rounding)).any()):
            return 0
    return 1


def bounds(lens, kv, sink=4, window=64):
    """First candidates and ends of each list; none of rows that are too short, and of some heads."""
    apart = lambda n, h: n > sink + window + 8 and (h != 1 or n % 2 == 0)
    begins = [sink if apart(n, h) else 0 for n in lens for h in range(kv)]
    return begins, [n - window if apart(n, h) else 0 for n in lens for h in range(kv)]


def check_case(report, dtype, d, kv, group, lens, reduce, small):
    cache = t.Cache(lens, kv, d, dtype)
    cache.k *= torch.randn(d, device=DEV).exp().to(dtype)
    apart_by_block(cache)
    q = torch.randn(len(lens), kv * group, d, device=DEV, dtype=dtype)
    index = Quantize(cache, [(i, 0, n) for i, n in enumerate(lens)])()
    scores = QuantizedScore(cache, q, index)()
    begins, ends = bounds(lens, kv)
    bad = moved = dirty = chosen = 0
    for noise, part in ((1e-9, 1), (1e-6, 1), (1e-4, 4), (1.0, 1)):
        ks = [max(e - b, 0) // part for b, e in zip(begins, ends)]
        f = PickTokens(cache, q, index, noise, ks, begins, ends, reduce)
        f()
        counts = f.work[:, 7].tolist()
        for i, n in enumerate(lens):
            share = shares(scores[i, :, :n], group, reduce)
            for h in range(kv):
                at = i * kv + h
                k = counts[at]
                want = f.lists[at].tolist()
                want[6:8] = [at * f.ids.shape[1], k]
                got = f.ids[at, :k]
                bad += f.work[at].tolist() != want or not 0 <= k <= ks[at] or bool((f.ids[at, k:] != -1).any())
                bad += bool((got[1:] <= got[:-1]).any())
                if ends[at] > begins[at]:
                    bad += differs(got, share[h], begins[at], ends[at], noise, ks[at])
                chosen += k
        first, taken = f.ids.clone(), f.work.clone()
        dirty += not f.clean()
        # Again and again, and rows alone, whose teams are larger.
        for _ in range(2 if small else 10):
            f.ids.fill_(-1), f.work.fill_(-1)
            f()
            moved += not torch.equal(f.ids, first) or not torch.equal(f.work, taken)
            dirty += not f.clean()
        for i, n in enumerate(lens):
            one = slice(i * kv, i * kv + kv)
            alone = PickTokens(cache.rows(i), q[i:i + 1].contiguous(), index, noise, ks[one], begins[one], ends[one],
                               reduce, fresh=(0, 1, 70, n)[i % 4])
            alone()
            for h in range(kv):
                k = counts[i * kv + h]
                moved += not torch.equal(alone.ids[h, :k], first[i * kv + h, :k]) or alone.work[h, 7].item() != k
    name = f"{dtype} d{d} {kv}x{group} {'max' if reduce == MAX else 'sum'}"
    report(f"tokens that pay {name}, {chosen} chosen", float(bad), 0.5)
    report(f"tokens that pay {name} whatever the team and the batch", float(moved), 0.5)
    report(f"tokens that pay {name} leave what they met by", float(dirty), 0.5)


def check(report, small):
    lens = [1, 64, 150, 700] if small else [1, 64, 77, 150, 1000, 5003, 33000, 140001]
    shapes = [(2, 4, MAX), (1, 16, SUM)] if small else [
        (2, 1, MAX), (1, 3, SUM), (8, 4, MAX), (2, 8, MAX), (1, 12, MAX), (1, 16, SUM), (3, 5, MAX)]
    # First: a process's first launch of a kernel, whose shared memory is over 48 KB only with what the kernel declares.
    if not small:
        check_case(report, torch.bfloat16, 64, 3, 1, [3, 90, 700, 2500, 20000], MAX, True)
    for dtype, d in ((torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 64), (torch.float16, 128)):
        for kv, group, reduce in shapes[:1 if small and d == 64 else None]:
            check_case(report, dtype, d, kv, group, lens, reduce, small)
    if not small:
        check_case(report, torch.bfloat16, 128, 2, 4, [1100000], MAX, True)
        check_case(report, torch.bfloat16, 128, 8, 4, [3000 + 77 * i for i in range(40)], MAX, True)
    check_none(report)
    check_far(report)


def check_far(report):
    """Scores that are all far from 0, on either side, of rows whose last block is not full."""
    bad = 0
    for n in (5003, 70, 641):
        for sign in (1, -1):
            cache = t.Cache([n], 2, 128, torch.bfloat16)
            cache.k += 32
            q = sign * torch.randn(1, 8, 128, device=DEV, dtype=torch.bfloat16).abs()
            index = Quantize(cache, [(0, 0, n)])()
            f = PickTokens(cache, q, index, 1e-6, [n - 68] * 2, [4] * 2, [n - 64] * 2)
            f()
            share = shares(QuantizedScore(cache, q, index)()[0, :, :n], 4, MAX)
            for h, k in enumerate(f.work[:, 7].tolist()):
                bad += differs(f.ids[h, :k], share[h], 4, n - 64, 1e-6, n - 68, 5e-4)
    report("tokens that pay of scores far from 0", float(bad), 0.5)


def check_none(report):
    """A head whose query is no number has no shares; its group's others choose. A key that is none leaves its list nothing."""
    n = 5000
    cache = t.Cache([n], 2, 128, torch.bfloat16)
    q = torch.randn(1, 8, 128, device=DEV, dtype=torch.bfloat16)
    q[0, 6, 77] = float("nan")
    cache.k[cache.table[0, (2 * 1 + 1) * 79 // 8], 0, 7, 5] = float("nan")
    index = Quantize(cache, [(0, 0, n)])()
    f = PickTokens(cache, q, index, 1e-6, [n] * 2, [4] * 2, [n - 64] * 2)
    f()
    share = shares(QuantizedScore(cache, q, index)()[0, :, :n], 4, MAX)
    k = f.work[:, 7].tolist()
    report("tokens that pay of what is no number", float(k[0] != 0 or k[1] == 0 or differs(
        f.ids[1, :k[1]], share[1], 4, n - 64, 1e-6, n)), 0.5)


def apart(cache, q, index, n, noise, ks):
    """The same in three launches."""
    scores = QuantizedScore(cache, q, index)
    lse = Lse(scores)
    rows, heads, stride = scores.out.shape
    pays = GroupSelect(scores.out.view(rows * heads, stride), ks, heads // cache.kv_heads, MAX, lse.lse, k=ks, noise=noise)
    return scores, Steps(scores, lse, pays)


def bench(put, time):
    kv, group, d = 8, 4, 128
    rate = copied(put, time, "paying")
    for batch, n in ((1, 2048), (1, 8192), (1, 32768), (1, 131072), (1, 524288), (4, 32768), (16, 8192), (16, 32768)):
        cache = t.Cache([n] * batch, kv, d, torch.bfloat16, poison=False)
        index = Quantize(cache, [(i, 0, n) for i in range(batch)])()
        q = torch.randn(batch, kv * group, d, device=DEV, dtype=torch.bfloat16)
        key = f"b{batch} {n}"
        put(f"paying {key} floor us", batch * n * kv * 20 * d / 64 / rate)
        scores, steps = apart(cache, q, index, n, 3e-4, n // 4)
        put(f"paying {key} scores us", time(scores))
        put(f"paying {key} in three launches us", time(steps))
        lists = batch * kv
        f = PickTokens(cache, q, index, 3e-4, [n // 4] * lists, [0] * lists, [n] * lists)
        put(f"paying {key} in one us", time(f))
        del cache, index, scores, steps, f
        torch.cuda.empty_cache()
