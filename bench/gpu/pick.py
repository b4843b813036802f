"""Scoring and choosing blocks in one launch.

check(report, small) compares with sorted scores; bench(put, time) measures, where time(f)
is the median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from append import Append
from oracle import attend64, rel
from selection import GroupSelect, least_paying
from taper_gpu import PickParams, call

DEV = "cuda"


class Pick:
    """The k pages of each list whose bounds score best, best head of a group counting; `shares`: that hold
    the largest share of the mass by their bounds, all heads of a group counting, or of any by
    MAX_SHARE_OF_GROUP; and with `noise` only those that are cheaper to read than to sample around. `ahead`: of several layers
    at once, (first, each row's queries [layers, q_heads, width], each layer's lower bounds)."""

    def __init__(self, cache, q, view, lower, lists, k=1, begins=None, ends=None, ks=None, capacity=None, shares=False,
                 target=t.BLOCKS, pitch=0, fresh=0, noise=0.0, reduce=t.SUM_OF_GROUP, team=0, ahead=None):
        rows, q_heads, width = q.shape
        count, dev, per_block = rows * cache.kv_heads, q.device, view.shape[2] if view.dim() == 4 else 1
        page = 64 // per_block
        stride, capacity = (max(cache.lens) + page - 1) // page, capacity or k
        i32 = lambda *s: torch.full(s, -1, dtype=torch.int32, device=dev)
        first, queries, lowers = ahead or (0, [], [])
        addresses = lambda of: torch.tensor([x.data_ptr() for x in of], device=dev) if of else None
        all_of = count * max(len(lowers), 1)
        self.keys, self.ids = i32(all_of, stride), i32(all_of, capacity)
        self.work = torch.full((all_of, 16), -1, dtype=lists.dtype, device=dev)
        self.sync = torch.zeros(1 + all_of, 32, dtype=torch.int32, device=dev)
        self.held = queries, lowers
        group = q_heads // cache.kv_heads
        self.masses = torch.zeros(all_of, t.team_size(cache.kv_heads), group, 2, dtype=torch.int64, device=dev)
        self.p = PickParams(
            q=q, view=view, lower=lower, **cache.where, lens=torch.tensor(cache.lens, dtype=torch.int32, device=dev),
            begins=begins, ends=ends, ks=ks, lists=lists, keys=self.keys, ids=self.ids, work=self.work,
            sync=self.sync, masses=self.masses, rows=rows, q_heads=q_heads, width=width, dtype=q.dtype, per_block=per_block,
            pitch=pitch, stride=stride, capacity=capacity, k=k, reduce=reduce if shares else t.MAX_OF_GROUP, target=target,
            scale=width**-0.5, fresh=fresh, noise=noise, team_most=team, layers=len(lowers), first=first,
            queries=addresses(queries), views=addresses(lowers))

    def __call__(self):
        call("taper_pick", self.p)
        return self.ids


def paged_bounds(k, page):
    """Bounds of pages of keys [blocks, kv_heads, 64, d] beside each other: minima, then maxima; as views of both and
    the distance of two pages."""
    blocks, kv, _, d = k.shape
    pages = k.reshape(blocks, kv, 64 // page, page, d)
    both = torch.cat([pages.amin(3), pages.amax(3)], -1).contiguous()
    return both[..., d:], both[..., :d], 2 * d


def check(report, small):
    lens = [1, 64, 700, 5000] if small else [1, 64, 700, 5000, 130000, 1048576]
    i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
    for dtype, d, kv, group, coarse in (
            (torch.bfloat16, 128, 2, 4, False), (torch.float16, 64, 3, 3, False), (torch.bfloat16, 128, 1, 16, True),
            (torch.float16, 128, 8, 1, False), (torch.bfloat16, 64, 2, 12, True)):
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
        lists = i32([t.work_list(length=n) for n in lens for _ in range(kv)])
        f = Pick(cache, q, hi, lo, lists, 1, begins, ends, ks, max(blocks))
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
                s = (x.clamp_min(0) @ hi[rows, h].double().T + x.clamp_max(0) @ lo[rows, h].double().T).amax(0)
                b, e = begins[i * kv + h].item(), ends[i * kv + h].item()
                s[:b], s[e:] = -torch.inf, -torch.inf
                k = min(ks[i * kv + h].item(), max(e - b, 0))
                got = f.ids[i * kv + h]
                w = f.work[i * kv + h].tolist()
                bad += int(w[4] != (i * kv + h) * max(blocks) or w[5] != k)
                got, rest = got[:k].long(), got[k:]
                bad += int(bool((rest != -1).any()) or bool((got[1:] <= got[:-1]).any()))
                want = torch.sort(s, descending=True, stable=True).indices[:k].sort().values
                if coarse:
                    bad += int(not torch.equal(got, want))
                elif k:  # Rounding may swap what is nearly equal.
                    bad += int(s[got].min() < s[want].min() - 1e-4 * s[want].abs().max())
        report(f"pick {dtype} d{d} kv {kv} group {group} ties {coarse}", bad + repeats, 0.5)
    check_shares(report, small)


def check_shares(report, small):
    """Pages of the largest share of the mass, as lists that attention reads: against float64."""
    # First: a process's first launch of a kernel, whose shared memory is over 48 KB only with what the kernel declares.
    for dtype, d, kv, group, page, lens in (
            (torch.float16, 64, 1, 4, 16, [20500]), (torch.bfloat16, 128, 2, 4, 16, [700, 5000]), (torch.float16, 64, 3, 3, 4, [300, 2500]),
            (torch.bfloat16, 128, 1, 16, 64, [4000]), (torch.bfloat16, 64, 2, 12, 8, [1000, 64]),
            (torch.bfloat16, 128, 8, 4, 16, [2000] * 5), (torch.float16, 128, 8, 1, 32, [5000, 70])):
        lens = lens if small else [n * 9 for n in lens]
        cache = t.Cache(lens, kv, d, dtype)
        q = torch.randn(len(lens), kv * group, d, device=DEV, dtype=dtype)
        hi, lo, pitch = paged_bounds(cache.k.nan_to_num(), page)
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
        sink, window, k = 70, 133, 40
        fixed, begins, ends, ks = [], [], [], []
        for n in lens:
            for h in range(kv):
                apart = n > sink + window + 8
                fixed.append(t.work_list((0, n - window) if apart else (0, 0), (sink, n) if apart else (n, 0), length=n))
                begins.append(sink // page if apart else 0)
                ends.append(-(-(n - window) // page) if apart else 0)
                ks.append(min((k, 1, 7)[h % 3], ends[-1] - begins[-1]))
        fixed = i32(fixed)
        f = Pick(cache, q, hi, lo, fixed, k, i32(begins), i32(ends), i32(ks), shares=True, target=t.TOKENS, pitch=pitch)
        work, found = f.work, lambda of, j: int((of.ids[j] != -1).sum())
        bad = repeats = 0
        for again in range(2 if small else 20):
            f.ids.fill_(-1), work.fill_(-1)
            f()
            if again:
                repeats += int(not torch.equal(f.ids, first) or not torch.equal(work, lists))
            first, lists = f.ids.clone(), work.clone()
        bad += int(bool(f.sync.any()) or bool(f.masses.any()))
        seen = torch.zeros(len(lens), kv, max(lens), dtype=torch.bool, device=DEV)
        # A quarter of the pages of the shortest row would be sampled if all held the same.
        noise = 3 * page / min(lens)
        some = Pick(cache, q, hi, lo, fixed, k, i32(begins), i32(ends), i32(ks), shares=True, target=t.TOKENS, pitch=pitch,
                    noise=noise, reduce=t.MAX_SHARE_OF_GROUP)
        some()
        for i, n in enumerate(lens):
            rows = cache.table[i, :(n + 63) // 64].long()
            flat = lambda x: x[rows].double().permute(1, 0, 2, 3).reshape(kv, -1, d)[:, :-(-n // page)]
            up, down = flat(hi), flat(lo)
            for h in range(kv):
                j, x = i * kv + h, q[i, h * group:(h + 1) * group].double()
                s = (x.clamp_min(0) @ up[h].T + x.clamp_max(0) @ down[h].T) * d**-0.5
                mass = torch.softmax(s, -1).sum(0)[begins[j]:ends[j]]
                got = f.ids[j, :ks[j]].long() - begins[j]
                bad += int(found(f, j) != ks[j] or bool((got[1:] <= got[:-1]).any()))
                if ks[j]:  # Rounding may swap what is nearly equal.
                    bad += int(mass[got].min() < mass.sort(descending=True).values[ks[j] - 1] * (1 - 1e-3))
                # By the shares that it found, exactly those that pay.
                few = found(some, j)
                most = torch.softmax(s, -1).amax(0)[begins[j]:ends[j]]
                shares = some.keys[j, :ends[j] - begins[j]].bitwise_and(0x7FFFFFFF).view(torch.float32)
                bad += int(not torch.allclose(shares.double(), most, rtol=2e-3, atol=1e-12))
                want = torch.nonzero(shares >= least_paying(shares, noise, ks[j])).flatten() + begins[j]
                bad += int(not torch.equal(some.ids[j, :few].long(), want))
                there = torch.zeros(n + page, dtype=torch.bool, device=DEV)
                for p in some.ids[j, :few].tolist():
                    there[p * page:(p + 1) * page] = True
                there[:fixed[j, 2]] = False
                there[fixed[j, 1] if fixed[j, 3] else 0:] = False
                bad += int(some.work[j, 7] != there.sum())
                w, want = work[j].tolist(), torch.zeros(max(lens), dtype=torch.bool, device=DEV)
                bad += int(w[:4] != fixed[j, :4].tolist() or w[12] != n)
                for p in f.ids[j, :ks[j]].tolist():
                    want[p * page:(p + 1) * page] = True
                want[:w[2]] = False
                want[w[1] if w[3] else 0:] = False
                at = w[6] + torch.arange(w[7], device=DEV)
                tokens = f.ids.flatten()[at // page].long() * page + at % page
                seen[i, h, tokens] = True
                bad += int(w[7] != want.sum().item() or not torch.equal(seen[i, h], want))
                seen[i, h, w[0]:w[2]] = True
                seen[i, h, w[1]:w[3]] = True
        name = f"{dtype} d{d} kv {kv} group {group} pages of {page}"
        report(f"pick by shares {name}", bad + repeats, 0.5)
        report(f"pick beside an append {name}", beside_append(f, cache, lo, page, 2 if small else 50), 0.5)
        at = (i32(begins), i32(ends), i32(ks))
        report(f"pick of several layers {name}", of_layers(cache, q, fixed, k, at, (page, noise), 2 if small else 20), 0.5)
        shift = page.bit_length() - 1
        plan = t.Decode(cache, q, work, token_ids=f.ids, token_shift=shift)
        plan.plan()
        plan()
        err = 0.0
        for i, n in enumerate(lens):
            read = seen[i, :, :n].repeat_interleave(group, 0)[:, None]
            want = attend64(q[i:i + 1], *cache.dense(i), read)[0][0]
            err = max(err, rel(plan.out[i], want))
        report(f"attention over them {name}", err)


def of_layers(cache, q, fixed, k, at, page_noise, times):
    """How often lists of several layers at once differ from each layer's own."""
    (page, noise), (rows, q_heads, d), layers, bad = page_noise, q.shape, 3, 0
    queries = [torch.randn(1 + layers, q_heads, d, device=DEV, dtype=q.dtype) for _ in range(rows)]
    bounds = [paged_bounds(torch.randn_like(cache.k), page) for _ in range(layers)]
    for more in (dict(), dict(noise=noise, reduce=t.MAX_SHARE_OF_GROUP)):
        how = dict(shares=True, target=t.TOKENS, pitch=2 * d, **more)
        alone = [Pick(cache, torch.stack([x[1 + i] for x in queries]), hi, lo, fixed, k, *at, team=1, **how)
                 for i, (hi, lo, _) in enumerate(bounds)]
        for one in alone:
            one()
        together = [Pick(cache, q, bounds[0][0], bounds[0][1], fixed, k, *at, team=team, **how,
                         ahead=(1, queries, [lo for _, lo, _ in bounds])) for team in (1, 2)]
        for f in together:
            for _ in range(times):
                f.ids.fill_(-1), f.work.fill_(-1)
                f()
                # Teams of other sizes add in another order.
                if f is together[0]:
                    bad += int(not torch.equal(f.ids, torch.cat([one.ids for one in alone])))
                    bad += int(not torch.equal(f.work, torch.cat([one.work for one in alone])))
                bad += int(bool(f.sync.any()) or bool(f.masses.any()))
        bad += int((together[0].ids == together[1].ids).float().mean() < 0.9)
    return bad


def beside_append(f, cache, lower, page, times):
    """How often pages are chosen otherwise while the launch ahead renews the bounds of each row's last tokens."""
    newest = min(3, min(cache.lens))
    append = Append(cache, [(i, n - newest, n) for i, n in enumerate(cache.lens)], pages=lower, page=page)
    last = [cache.table[i, (n - 1) // 64].item() for i, n in enumerate(cache.lens)]
    bounds = torch.as_strided(lower, (cache.blocks, cache.kv_heads, 64 // page, 2 * cache.head_dim),
                              (cache.kv_heads * 64 // page * 2 * cache.head_dim, 64 // page * 2 * cache.head_dim,
                               2 * cache.head_dim, 1))
    found = []
    for fresh in (0, *[newest] * times):
        for block, n in zip(last, cache.lens):  # A page whose oldest row is a new one is not what it was.
            bounds[block, :, (n - 1) % 64 // page] = 100.0
        f.p.fresh = fresh
        append()
        f()
        found.append((f.ids.clone(), f.work.clone()))
    f.p.fresh = 0
    return sum(not (torch.equal(a, found[0][0]) and torch.equal(b, found[0][1])) for a, b in found[1:])


def bench_paged(put, time):
    """A step as the model takes it: pages by their shares of the mass, then vAttention over them; 9% of the keys in
    pages, and a sample of 1% that is looked at once."""
    kv, d = 8, 128
    for n, eps in ((32768, 0.675), (131072, 0.2475), (524288, 0.1125)):
        for page in (16, 32, 64):
            if n // page > 32768:
                continue
            torch.manual_seed(1)
            cache = t.Cache([n], kv, d, torch.bfloat16, poison=False)
            cache.v += 0.5
            q = torch.randn(1, 32, d, device=DEV, dtype=torch.bfloat16)
            hi, lo, pitch = paged_bounds(cache.k, page)
            fixed = torch.tensor([t.work_list((0, n - 100), (128, n), length=n)] * kv, dtype=torch.int32, device=DEV)
            whole = lambda x: torch.full((kv,), x // page, dtype=torch.int32, device=DEV)
            k, shift = int(n * 0.09) // page, page.bit_length() - 1
            pick = Pick(cache, q, hi, lo, fixed, k, whole(128), whole(n - 100 + page - 1), shares=True, target=t.TOKENS,
                        pitch=pitch)
            pick()
            f = t.VAttention(cache, q, pick.work, [7], eps, 0.05, token_ids=pick.ids, token_shift=shift, out_f32=True)

            def step():
                pick()
                f()
            key = f"paged b1 {n} page {page}"
            put(f"{key} pick us", time(pick))
            put(f"{key} vattention us", time(f))
            put(f"{key} density", f.keys_read() / (n * kv))
            put(f"{key} largest sample", f.counts.max().item() / n)
            put(f"{key} with predictor us", time(step))
            del cache, hi, lo, pick, f, step
            torch.cuda.empty_cache()


def bench(put, time):
    kv, d, dtype = 8, 128, torch.bfloat16
    for n in (32768, 131072, 524288, 1048576):
        cache = t.Cache([n], kv, d, dtype, poison=False)
        q = torch.randn(1, 32, d, device=DEV, dtype=dtype)
        hi, lo = cache.k.amax(2, keepdim=True).contiguous(), cache.k.amin(2, keepdim=True).contiguous()
        k = n // 64 // 20
        lists = torch.tensor([t.work_list(length=n)] * kv, dtype=torch.int32, device=DEV)
        put(f"pick {n} 5% of the blocks by bounds us", time(Pick(cache, q, hi, lo, lists, k)))
        score = t.Score(cache, q, hi, lo)
        score()
        top = GroupSelect(score.out[0], k, q.shape[1] // kv, k=k)

        def both():
            score()
            top()
        put(f"pick {n} the same by bounds in two launches us", time(both))
        del cache, score, top, hi, lo, both
        torch.cuda.empty_cache()
    bench_paged(put, time)
