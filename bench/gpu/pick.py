"""Scoring and choosing blocks in one launch.

check(report, small) compares with sorted scores; bench(put, time) measures, where time(f)
is the median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from taper_gpu import DTYPE, I32, P, call, ptr, struct

DEV = "cuda"

PickParams = struct("PickParams", [(n, P) for n in (
    "q view lower block_table row_table lens begins ends ks keys ids counts work sync").split()] + [
    (n, I32) for n in "rows q_heads kv_heads width dtype table_stride stride capacity k overlap".split()])


class Pick:
    """The k blocks of each list whose bounds or means score best, best head of a group counting."""

    def __init__(self, cache, q, view, lower=None, k=1, begins=None, ends=None, ks=None, work=None,
                 capacity=None, row_table=None, lens=None, overlap=True):
        rows, q_heads, width = q.shape
        lists, dev = rows * cache.kv_heads, q.device
        stride, capacity = (max(cache.lens) + 63) // 64, capacity or k
        i32 = lambda *s: torch.full(s, -1, dtype=torch.int32, device=dev)
        self.lens = torch.tensor(lens or cache.lens, dtype=torch.int32, device=dev)
        self.keys, self.ids, self.counts = i32(lists, stride), i32(lists, capacity), i32(lists)
        self.sync = torch.zeros(lists, 32, dtype=torch.int32, device=dev)
        self.keep = (cache, q, view, lower, begins, ends, ks, work, row_table)
        self.p = PickParams(
            *[ptr(x) for x in (q, view, lower, cache.table, row_table, self.lens, begins, ends, ks,
                               self.keys, self.ids, self.counts, work, self.sync)],
            rows, q_heads, cache.kv_heads, width, DTYPE[q.dtype], cache.table.stride(0), stride,
            capacity, k, int(overlap))

    def __call__(self):
        call("taper_pick_blocks", self.p)
        return self.ids


def check(report, small):
    lens = [1, 64, 700, 5000] if small else [1, 64, 700, 5000, 130000, 1048576]
    i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
    for dtype, d, kv, group, bounds, coarse in (
            (torch.bfloat16, 128, 2, 4, True, False), (torch.float16, 64, 3, 3, True, False),
            (torch.bfloat16, 128, 1, 16, False, True), (torch.float16, 128, 8, 1, False, False),
            (torch.bfloat16, 64, 2, 12, True, True)):
        blocks = [(n + 63) // 64 for n in lens]
        cache = t.Cache([64], kv, d, dtype)  # Its table is made for the longer lens below.
        cache.lens, cache.blocks = lens, sum(blocks)
        order = torch.randperm(cache.blocks, device=DEV).to(torch.int32)
        cache.table = torch.zeros(len(lens), max(blocks), dtype=torch.int32, device=DEV)
        at = 0
        for i, n in enumerate(blocks):
            cache.table[i, :n] = order[at:at + n]
            at += n
        hi = torch.randn(cache.blocks, kv, d, device=DEV).to(dtype)
        lo = (hi - torch.rand_like(hi)).to(dtype)
        q = torch.randn(len(lens), kv * group, d, device=DEV).to(dtype)
        if coarse:  # Small integers: many ties.
            hi, lo, q = (x.clamp(-1, 1).round() for x in (hi, lo, q))
        begins = i32([min(h, n) for n in blocks for h in range(kv)])
        ends = i32([n - (n > 4) for n in blocks for _ in range(kv)])
        ks = i32([(0, 1, 7, 40000, max(n // 20, 1))[(i + h) % 5]
                  for i, n in enumerate(blocks) for h in range(kv)])
        work = i32([t.work_list(length=n) for n in lens for _ in range(kv)])
        f = Pick(cache, q, hi, lo if bounds else None, 1, begins, ends, ks, work, max(blocks))
        bad, repeats = 0, 0
        for again in range(2 if small else 20):
            f.ids.fill_(-1)
            f()
            if again:
                repeats += int(not torch.equal(f.ids, first))
            first = f.ids.clone()
        for i, n in enumerate(blocks):
            rows = cache.table[i, :n].long()
            for h in range(kv):
                x = q[i, h * group:(h + 1) * group].double()
                s = x.clamp_min(0) @ hi[rows, h].double().T if bounds else x @ hi[rows, h].double().T
                if bounds:
                    s = s + x.clamp_max(0) @ lo[rows, h].double().T
                s = s.amax(0)
                b, e = begins[i * kv + h].item(), ends[i * kv + h].item()
                s[:b], s[e:] = -torch.inf, -torch.inf
                k = min(ks[i * kv + h].item(), max(e - b, 0))
                got = f.ids[i * kv + h]
                bad += int(f.counts[i * kv + h].item() != k)
                w = work[i * kv + h].tolist()
                bad += int(w[4] != (i * kv + h) * max(blocks) or w[5] != k)
                got, rest = got[:k].long(), got[k:]
                bad += int(bool((rest != -1).any()) or bool((got[1:] <= got[:-1]).any()))
                want = torch.sort(s, descending=True, stable=True).indices[:k].sort().values
                if coarse:
                    bad += int(not torch.equal(got, want))
                elif k:  # Rounding may swap what is nearly equal.
                    bad += int(s[got].min() < s[want].min() - 1e-4 * s[want].abs().max())
        report(f"pick {dtype} d{d} kv {kv} group {group} bounds {bounds} ties {coarse}", bad + repeats, 0.5)


def bench(put, time):
    kv, d, dtype = 8, 128, torch.bfloat16
    for n in (32768, 131072, 524288, 1048576):
        cache = t.Cache([n], kv, d, dtype, poison=False)
        q = torch.randn(1, 32, d, device=DEV, dtype=dtype)
        hi, lo = cache.k.amax(2, keepdim=True).contiguous(), cache.k.amin(2, keepdim=True).contiguous()
        k = n // 64 // 20
        put(f"pick {n} 5% of the blocks by bounds us", time(Pick(cache, q, hi, lo, k)))
        put(f"pick {n} 5% of the blocks by means us", time(Pick(cache, q, hi, None, k)))
        score = t.Score(cache, q, hi, lo, reduce=t.GROUP_MAX)
        score()
        top = t.Select(score.out[0], k)

        def both():
            score()
            top()
        put(f"pick {n} the same by bounds in two launches us", time(both))
        del cache, score, top, hi, lo, both
        torch.cuda.empty_cache()
