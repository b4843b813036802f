"""Checks every kernel against float64 attention on fresh random inputs.

Outputs, partials and every cache slot that no sequence owns start as NaN. Usage:
check.py [--small] [names...]; --small keeps shapes fit for compute-sanitizer.
"""
import math
import sys
import time

import torch

import taper_gpu as t

DEV = "cuda"
LIMIT = 1e-2
FAILED = []


def rel(a, b):
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def report(name, err, limit=LIMIT):
    ok = err < limit  # NaN fails.
    if not ok:
        FAILED.append(name)
    print(f"{'ok  ' if ok else 'FAIL'} {err:.2e} {name}", flush=True)


def attend64(q, k, v, seen, ln_w=None):
    """q [rows, q_heads, d]; k, v [kv_heads, n, d]; seen [rows, n] or [q_heads, rows, n]."""
    rows, qh, d = q.shape
    g = qh // k.shape[0]
    kk = k.double().repeat_interleave(g, 0)
    vv = v.double().repeat_interleave(g, 0)
    s = torch.einsum("rhd,hnd->hrn", q.double(), kk) * d**-0.5
    if ln_w is not None:
        s = s + ln_w
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    o = torch.einsum("hrn,hnd->rhd", torch.softmax(s, -1).nan_to_num(0.0), vv)
    return o, lse.t()


def decode_case(dtype, d, kv_heads, group, lens):
    cache = t.Cache(lens, kv_heads, d, dtype)
    q = torch.randn(len(lens), kv_heads * group, d, device=DEV, dtype=dtype)
    lists = [t.work_list(end=(n, 0), length=n) for n in lens for _ in range(kv_heads)]
    f = t.Decode(cache, q, lists)
    f.plan()
    f()
    refs = [attend64(q[i:i + 1], *cache.dense(i),
                     torch.ones(1, n, dtype=torch.bool, device=DEV)) for i, n in enumerate(lens)]
    err = max(rel(f.out[i], r[0][0]) for i, r in enumerate(refs))
    lse = max((f.lse[i].double() - r[1][0]).abs().max().item() for i, r in enumerate(refs))
    return f, cache, q, err, lse


def check_decode(small):
    lens = [1, 63, 64, 65, 700] if small else [1, 63, 64, 65, 129, 1000, 5003, 40000]
    groups = [1, 4] if small else [1, 2, 3, 4, 5, 7, 8, 9, 12, 16]
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for g in groups:
                f, cache, q, err, lse = decode_case(dtype, d, 8 if g == 4 else 2, g, lens)
                report(f"decode dense {dtype} d{d} group {g}", max(err, lse))
    # The same launch over and over must give the same bits.
    first = f.out.clone()
    moved = 0.0
    for _ in range(5 if small else 200):
        f.out.fill_(float("nan"))
        f()
        moved += float((f.out != first).any())
    report("decode repeats itself", moved)
    # One sequence alone must give the very bits that it gives in the batch.
    i = len(lens) - 1
    n = lens[i]
    alone = t.Decode(cache, q[i:i + 1].contiguous(),
                     [t.work_list(end=(n, 0), length=n)] * cache.kv_heads,
                     row_table=torch.tensor([i], device=DEV, dtype=torch.int32))
    alone.plan()
    alone()
    report("decode independent of the batch", float((alone.out[0] != f.out[i]).any()))


def check_lists(small):
    """Ranges, blocks and weighted tokens in one list, different for every head."""
    for dtype, d, kv, g, per_q in ((torch.bfloat16, 128, 2, 4, False),
                                   (torch.float16, 64, 3, 3, False),
                                   (torch.bfloat16, 128, 2, 2, True)):
        lens = [900, 333] if small else [900, 20000, 333, 8192]
        cache = t.Cache(lens, kv, d, dtype)
        q = torch.randn(len(lens), kv * g, d, device=DEV, dtype=dtype)
        heads = kv * g if per_q else kv
        lists, bid, tid, tw, seen_all, w_all = [], [], [], [], [], []
        for n in lens:
            for h in range(heads):
                seen = torch.zeros(n, dtype=torch.bool)
                w = torch.zeros(n, dtype=torch.float64)
                sink, win = 4 + h, n - 150 - h
                seen[:sink] = True
                seen[win:] = True
                nb = (n + 63) // 64
                pick = [b for b in torch.randperm(nb)[:max(1, nb // 6)].tolist()
                        if b > 0 and b < win // 64]
                for b in sorted(pick):
                    seen[b * 64:b * 64 + 64] = True
                    w[b * 64:b * 64 + 64] = 0.7
                free = (~seen).nonzero().flatten()
                ids = free[torch.randperm(len(free))[:len(free) // 3]].sort().values
                lw = torch.rand(len(ids), dtype=torch.float32) * 2
                seen[ids] = True
                w[ids] = lw.double() + 0.3
                lists.append(t.work_list((0, win), (sink, n), (len(bid), len(pick)),
                                         (len(tid), len(ids)), 0.7, 0.3, n))
                bid += sorted(pick)
                tid += ids.tolist()
                tw += lw.tolist()
                seen_all.append(seen)
                w_all.append(w)
        as_i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
        what = dict(list_heads=heads, block_ids=as_i32(bid), token_ids=as_i32(tid),
                    token_ln_weight=torch.tensor(tw or [0.0], device=DEV))
        f = t.Decode(cache, q, lists, **what)
        f.plan()
        f()
        one = t.VAttention(cache, q, lists, [0] * len(lens), 1.0, 0.05, "listed", **what)
        one()
        first, moved = one.out.clone(), 0.0
        for _ in range(3 if small else 50):
            one.out.fill_(float("nan"))
            one()
            moved += float((one.out != first).any())
        report("lists in one launch repeat themselves", moved)
        err = err_one = 0.0
        for i, n in enumerate(lens):
            rep = kv * g // heads
            sl = slice(i * heads, (i + 1) * heads)
            seen = torch.stack(seen_all[sl]).to(DEV).repeat_interleave(rep, 0)[:, None]
            w = torch.stack(w_all[sl]).to(DEV).repeat_interleave(rep, 0)[:, None]
            o, lse = attend64(q[i:i + 1], *cache.dense(i), seen, w)
            err = max(err, rel(f.out[i], o[0]), (f.lse[i] - lse[0]).abs().max().item())
            err_one = max(err_one, rel(one.out[i], o[0]), (one.lse[i] - lse[0]).abs().max().item())
        report(f"decode lists {dtype} d{d} group {g} {'per query head' if per_q else ''}", err)
        report(f"lists in one launch {dtype} d{d} group {g} {'per query head' if per_q else ''}", err_one)


def check_pinned(small):
    """The same kernels over a cache in pinned host memory."""
    lens = [300, 77] if small else [5000, 333]
    for dtype, d in ((torch.bfloat16, 128), (torch.float16, 64)):
        cache = t.Cache(lens, 2, d, dtype, pinned=True)
        q = torch.randn(len(lens), 8, d, device=DEV, dtype=dtype)
        err, bid, tid, made = 0.0, [], [], []
        for n in lens:
            made += [fixed_list(n, h, 4, 30, 2, 60, bid, tid) for h in range(2)]
        as_i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
        f = t.Decode(cache, q, [m[0] for m in made], block_ids=as_i32(bid), token_ids=as_i32(tid))
        f.plan()
        f()
        w = t.Values(cache, q, [1, 2], 64)
        w()
        for i in range(len(lens)):
            seen = torch.stack([m[1] for m in made[2 * i:2 * i + 2]]).to(DEV).repeat_interleave(4, 0)
            o, lse = attend64(q[i:i + 1], *cache.dense(i), seen[:, None])
            err = max(err, rel(f.out[i], o[0]), (f.lse[i] - lse[0]).abs().max().item())
            _, lse = attend64(q[i:i + 1], *cache.dense(i), torch.ones_like(seen[:1, None]))
            err = max(err, (w.lse[i] - lse[0]).abs().max().item())
        report(f"pinned {dtype} d{d} lists, values", err)


def causal(pos, n, sink=0, window=0):
    key = torch.arange(n, device=DEV)
    p = pos.to(DEV)[:, None]
    seen = key <= p
    if window:
        seen &= (key < sink) | (key + window > p)
    return seen


def check_prefill(small):
    n = 333 if small else 3000
    shapes = [(torch.bfloat16, 128, 2, 4), (torch.float16, 64, 1, 3)]
    if not small:
        shapes += [(torch.float16, 128, 2, 1), (torch.bfloat16, 64, 2, 8)]
    for dtype, d, kv, g in shapes:
        cache = t.Cache([n, n + 77], kv, d, dtype)
        k, v = cache.dense(0)
        for first, sink, window in ((0, 0, 0), (n // 3, 0, 0), (0, 4, 100), (0, 70, 64),
                                    (n // 2, 0, 129)):
            pos = torch.arange(first, n)
            q = torch.randn(len(pos), kv * g, d, device=DEV, dtype=dtype)
            f = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), sink=sink, window=window)
            f()
            o, lse = attend64(q, k, v, causal(pos, n, sink, window))
            report(f"prefill {dtype} d{d} group {g} from {first} sink {sink} window {window}",
                   max(rel(f.out, o), (f.lse - lse).abs().max().item()))
        # Early keys that dwarf the later ones force the running maximum up, late.
        for factor in (6, 60):
            big = t.Cache([n], kv, d, dtype)
            big.k[big.table[0, 1].item()] *= factor
            pos = torch.arange(n)
            q = torch.randn(n, kv * g, d, device=DEV, dtype=dtype)
            f = t.Prefill(big, q, pos, t.tiles_for(pos, 0, n))
            f()
            o, lse = attend64(q, *big.dense(0), causal(pos, n))
            gap = ((f.lse - lse).abs() / lse.abs().clamp_min(1)).max().item()
            report(f"prefill {dtype} d{d} group {g} rising scores x{factor}",
                   max(rel(f.out, o), gap))
        # Rows gathered at a stride, f32 output, of the second sequence.
        n2 = n + 77
        pos = torch.cat([torch.arange(0, n2 - 60, 7), torch.arange(n2 - 60, n2)])
        q = torch.randn(n2, kv * g, d, device=DEV, dtype=dtype)
        f = t.Prefill(cache, q, pos, t.tiles_for(pos, 1, n2), out_f32=True,
                      q_rows=pos.to(device=DEV, dtype=torch.int32))
        f()
        k2, v2 = cache.dense(1)
        o, lse = attend64(q[pos.to(DEV)], k2, v2, causal(pos, n2))
        report(f"prefill {dtype} d{d} group {g} gathered rows",
               max(rel(f.out, o), (f.lse - lse).abs().max().item()))
        check_csr(cache, q, n2, kv, g, k2, v2, dtype, d)


def check_csr(cache, q, n, kv, g, k, v, dtype, d):
    pos = torch.arange(n)
    tiles = t.tiles_for(pos, 1, n)
    heads = kv * g
    begin, ids = [0], []
    seen = torch.zeros(heads, n, n, dtype=torch.bool)
    for h in range(heads):
        for i in range(len(tiles)):
            last = min(n - 1, i * 128 + 127) // 64
            pick = [b for b in range(last + 1) if b >= last - 1 or torch.rand(()) < 0.3]
            if i == 1 and h == 0:
                pick = []
            ids += pick
            begin.append(len(ids))
            for b in pick:
                seen[h, i * 128:i * 128 + 128, b * 64:b * 64 + 64] = True
    seen = seen.to(DEV) & causal(pos, n)
    as_i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
    f = t.Prefill(cache, q, pos, tiles, csr=(as_i32(begin), as_i32(ids)), csr_heads=heads)
    f()
    o, lse = attend64(q, k, v, seen)
    live = lse > -math.inf
    bad = ((f.lse > -math.inf) != live).any().item()
    gap = (f.lse[live] - lse[live]).abs().max().item()
    report(f"prefill {dtype} d{d} group {g} block lists", max(rel(f.out, o), gap, float(bad)))


def check_delta(small):
    n, gamma, sink, window = (700, 16, 4, 64) if small else (4000, 64, 4, 300)
    dtype, d, kv, g = torch.bfloat16, 128, 2, 4
    cache = t.Cache([n], kv, d, dtype)
    k, v = cache.dense(0)
    q = torch.randn(n, kv * g, d, device=DEV, dtype=dtype)
    pos = torch.arange(n)
    dense, _ = attend64(q, k, v, causal(pos, n))
    sparse, _ = attend64(q, k, v, causal(pos, n, sink, window))
    for propagate in (True, False):
        f = t.Delta(cache, q, gamma, sink, window, propagate)
        f()
        want = sparse.clone()
        j = (pos // gamma * gamma).to(DEV)
        if propagate:
            want = sparse + (dense[j] - sparse[j])
        want[::gamma] = dense[::gamma]
        want[f.tail:] = dense[f.tail:]
        report(f"delta gamma {gamma} propagate {propagate}", rel(f.out, want))


def check_score(small):
    lens = [1, 65, 700] if small else [1, 64, 65, 1000, 20001]
    for dtype, d, kv, g in ((torch.bfloat16, 128, 2, 4), (torch.float16, 64, 1, 3),
                            (torch.bfloat16, 128, 2, 12), (torch.float16, 32, 2, 2)):
        cache = t.Cache(lens, kv, d, dtype, poison=False)
        q = torch.randn(len(lens), kv * g, d, device=DEV, dtype=dtype)
        pages = cache.k.view(cache.blocks, kv, 4, 16, d)
        hi, lo = pages.amax(3).contiguous(), pages.amin(3).contiguous()
        mean = cache.k.float().mean(2, keepdim=True).to(dtype).contiguous()
        full = t.Score(cache, q, cache.k, tiles=True)
        bound = t.Score(cache, q, hi, lo)
        means = t.Score(cache, q, mean, reduce=t.GROUP_MAX)
        for f in (full, bound, means):
            f()
        lse = torch.stack([torch.logsumexp(full.out[i, :, :n], -1) for i, n in enumerate(lens)])
        mass = t.Score(cache, q, cache.k, reduce=t.GROUP_MASS, lse=lse)
        mass()
        err = 0.0
        for i, n in enumerate(lens):
            nb = (n + 63) // 64
            rows = cache.table[i, :nb].long()
            qi = q[i].double().view(kv, g, d) * d**-0.5
            k = cache.dense(i)[0].double()
            s = torch.einsum("hgd,hnd->hgn", qi, k)
            err = max(err, rel(full.out[i, :, :n].view(kv, g, n), s))
            p16 = (n + 15) // 16
            h, l = (x[rows].double().permute(1, 0, 2, 3).reshape(kv, -1, d)[:, :p16]
                    for x in (hi, lo))
            up = torch.maximum(qi[:, :, None] * h[:, None], qi[:, :, None] * l[:, None]).sum(-1)
            err = max(err, rel(bound.out[i, :, :p16].view(kv, g, p16), up))
            m = torch.einsum("hgd,nhd->hgn", qi, mean[rows][:, :, 0].double()).amax(1)
            err = max(err, rel(means.out[i, :, :nb], m))
            want = torch.softmax(s, -1).sum(1)
            err = max(err, rel(mass.out[i, :, :n], want))
            top = full.tile_max[i, :, :nb]
            z = torch.logsumexp(top + full.tile_sum[i, :, :nb].log(), -1)
            err = max(err, (z - lse[i]).abs().max().item())
        report(f"score views {dtype} width {d} group {g}", err)


def check_select(small):
    for lists, n, k in ((3, 100, 7), (2, 5000, 5000), (4, 3333, 1), (5, 70001, 4096)):
        if small and n > 6000:
            continue
        for levels in (0, 5):  # Few levels: ties everywhere.
            s = torch.randn(lists, n, device=DEV)
            if levels:
                s = (s * 2).round().clamp(-levels, levels)
            lo = torch.randint(0, n // 3, (lists,), device=DEV, dtype=torch.int32)
            hi = torch.randint(n // 2, n + 1, (lists,), device=DEV, dtype=torch.int32)
            f = t.Select(s, k, lo, hi)
            f()
            bad = 0
            for i in range(lists):
                a, b = lo[i].item(), hi[i].item()
                m = min(k, b - a)
                order = torch.sort(s[i, a:b], descending=True, stable=True).indices[:m]
                want = (order + a).sort().values.to(torch.int32)
                bad += int(f.counts[i].item() != m or not torch.equal(f.ids[i, :m], want))
            report(f"select {k} of {n} {'with ties' if levels else ''}", float(bad))


def philox(key, c):
    m = 0xFFFFFFFF
    k0, k1 = key
    a, b, c2, d = c
    for _ in range(10):
        p, q = a * 0xD2511F53, c2 * 0xCD9E8D57
        a, b, c2, d = (q >> 32) ^ b ^ k0, q & m, (p >> 32) ^ d ^ k1, p & m
        k0, k1 = (k0 + 0x9E3779B9) & m, (k1 + 0xBB67AE85) & m
    return a, b, c2, d


def permuted(n, seed, layer, head, position):
    """The whole permutation of 0..n-1, in order."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    keys = [*philox(key, (layer, head, position, 0x50450000)),
            *philox(key, (layer, head, position, 0x50450001))][:6]
    half = max(((n - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    i = torch.arange(1 << (2 * half), dtype=torch.int64)
    left, right = i >> half, i & mask
    for k in keys:
        x = ((right + k) & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x85EBCA77 & 0xFFFFFFFF
        left, right = right, left ^ ((x ^ (x >> 13)) & mask)
    point = (left << half) | right
    return point[point < n]


def check_sample(small):
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    lens = [1, 200, 777] if small else [1, 200, 5000, 131072]
    heads, want, layer = 2, 1500, 3
    lists, bid, tid, kept = [], [], [], []
    for n in lens:
        for h in range(heads):
            read = torch.zeros(n, dtype=torch.bool)
            sink, win = min(4, n), max(n - 50, 0)
            read[:sink], read[win:] = True, True
            blocks = [b for b in torch.randperm((n + 63) // 64)[:3].tolist()]
            ids = torch.randperm(n)[:n // 10].tolist()
            for b in blocks:
                read[b * 64:b * 64 + 64] = True
            read[ids] = True
            lists.append(t.work_list((0, win), (sink, n), (len(bid), len(blocks)),
                                     (len(tid), len(ids)), 0.0, 0.0, n))
            bid += blocks
            tid += ids
            kept.append(read)
    as_i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
    seeds = torch.randint(0, 2**62, (len(lens),)).tolist()
    f = t.Sample(as_i32(lists), heads, seeds, [n - 1 for n in lens], want, max(lens), layer,
                 as_i32(bid), as_i32(tid))
    f()
    bad = 0
    for i, n in enumerate(lens):
        for h in range(heads):
            order = permuted(n, seeds[i], layer, h, n - 1)
            order = order[~kept[i * heads + h][order]][:want].to(torch.int32)
            got = f.ids[i * heads + h].cpu()
            m = f.counts[i * heads + h].item()
            bad += int(m != len(order) or not torch.equal(got[:m], order))
    report("sample draws the points of the CPU's permutation", float(bad))


def moments64(s, v, lse_f, o_f, residual):
    """vAttention's moments of a sample: scores s [b], values v [b, d], in float64."""
    b = len(s)
    top = max(lse_f.item(), s.max().item())
    e = torch.exp(s - top)
    known = math.exp(lse_f.item() - top)
    ev, e2v = (e[:, None] * v).sum(0), (e[:, None]**2 * v).sum(0)
    scale = residual / b
    den = known + scale * e.sum().item()
    o = (o_f * known + scale * ev) / den
    r = e[:, None] * (v - o)
    c = r - r.mean(0)
    few = min(b, 40)
    dots = (c[:few] @ c[:few].T)**2
    mixed = (dots.sum() - dots.diagonal().sum()).item() * b * (b - 1) / (few * (few - 1))
    return {"b": b, "den": den, "o2": (o @ o).item(), "var_d": e.var().item(),
            "tr_n": (e[:, None] * v).var(0).sum().item(), "tr_r": r.var(0).sum().item(),
            "tr2": ((c * c).sum(1)**2).sum().item() / (b - 1)**2 + mixed / (b - 1)**2}


def budget64(rule, eps, delta, m, n, limit):
    """(verdict, draws) of one head."""
    whole, most, upper, rest, vector, scalar = t.quantiles(delta)
    sc = n * math.sqrt(m["var_d"]) / m["den"]
    draws = lambda r: math.ceil(r * r / (1 + r * r / n))
    if rule == "denominator":
        return "sample", draws(whole * sc / eps)

    def quantile(trace, trace2):
        sp = 2 * trace2 / (9 * trace**2)
        return math.sqrt(max(1 - sp + upper * math.sqrt(sp), 0)**3)

    if rule in ("ratio", "chi2"):
        norm2, trace, unit = m["o2"], m["tr_r"], m["den"]
        least = most if rule == "ratio" else min(quantile(1, 1), 1.0)
        bound = lambda norm, c=least: draws(c * n * math.sqrt(trace) / (eps * unit * norm) + rest * sc)
    else:
        norm2, trace, unit = m["o2"] * m["den"]**2, m["tr_n"], 1.0
        mul, add = (2 / eps, 2 / eps) if rule == "lemma" else (1 / eps, (1 + eps) / eps)
        bound = lambda norm: draws(min(a * n * math.sqrt(trace) / norm * mul + z * sc * add
                                       for a, z in zip(vector, scalar)))
    if bound(math.sqrt(norm2)) > limit:
        return "dense", 0
    left = norm2 - n * n * trace * (1 / m["b"] - 1 / n) / unit**2
    if left < 0.25 * norm2:
        return "noisy", 0
    norm = math.sqrt(left)
    b = bound(norm)
    if rule == "chi2" and b <= limit:
        b = bound(norm, quantile(trace, m["tr2"]))
    return "sample", b


def fixed_list(n, h, sink, win, blocks, tokens, bid, tid):
    """A list of sink, window, some blocks and some tokens; and which keys it reads."""
    sink, win = min(sink, n), max(min(win, n - sink), 0)
    seen = torch.zeros(n, dtype=torch.bool)
    seen[:sink], seen[n - win:] = True, True
    b0, t0 = len(bid), len(tid)
    first, last = (sink + 63) // 64, (n - win) // 64
    if blocks and last - first > blocks:
        for b in sorted((torch.randperm(last - first)[:blocks] + first).tolist()):
            seen[b * 64:b * 64 + 64] = True
            bid.append(b)
    if tokens:
        free = (~seen).nonzero().flatten()
        ids = free[torch.randperm(len(free))[:min(tokens, len(free) // 4)]].sort().values
        seen[ids] = True
        tid += ids.tolist()
    return t.work_list((0, n - win), (sink, n), (b0, len(bid) - b0), (t0, len(tid) - t0),
                       length=n), seen


def judge64(q, k, v, lse_f, o_f, order, res, n, fixed, rule, eps, delta):
    """The CPU's rules for one group: (state, draws)."""
    want = max(64, math.ceil(0.01 * res))
    limit = 0.5 * n - fixed
    if res <= want or want >= limit:
        return "whole", 0
    for r in range(5):
        draws = order[:want]
        verdicts = []
        for j in range(len(q)):
            sc = k[draws] @ q[j] * k.shape[1]**-0.5
            verdicts.append(budget64(rule, eps, delta,
                                     moments64(sc, v[draws], lse_f[j], o_f[j], res), res, limit))
        bad = next((x for x in verdicts if x[0] != "sample" or x[1] >= limit), None)
        if bad is None:
            return "sampled", min(max(max(x[1] for x in verdicts), want), res)
        if bad[0] != "noisy" or r == 4 or 4 * want >= limit:
            return "dense", 0
        want *= 4
    return "dense", 0


def vattention_case(dtype, d, kv, g, rule, eps, shift, lens, blocks=0, tokens=0):
    layer, sink, win = 5, 16, 64
    cache = t.Cache(lens, kv, d, dtype)
    cache.v += shift  # An output of zero mean makes every pilot too noisy.
    q = torch.randn(len(lens), kv * g, d, device=DEV, dtype=dtype)
    bid, tid, made = [], [], []
    for n in lens:
        made += [fixed_list(n, h, sink, win, blocks, tokens, bid, tid) for h in range(kv)]
    as_i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
    seeds = torch.randint(0, 2**62, (len(lens),)).tolist()
    ids = dict(block_ids=as_i32(bid), token_ids=as_i32(tid))
    f = t.VAttention(cache, q, [m[0] for m in made], seeds, eps, 0.1, rule, layer=layer, **ids)
    f()
    gap = err = errors = 0.0
    states, moved = [], 0
    for i, n in enumerate(lens):
        k, v = (x.double() for x in cache.dense(i))
        read = torch.zeros(kv * g, 1, n, dtype=torch.bool, device=DEV)
        w = torch.zeros(kv * g, 1, n, device=DEV, dtype=torch.float64)
        for h in range(kv):
            seen = made[i * kv + h][1].to(DEV)
            hs = slice(h * g, (h + 1) * g)
            o_f, lse_f = attend64(q[i:i + 1, hs], k[h:h + 1], v[h:h + 1], seen[None])
            order = permuted(n, seeds[i], layer, h, n - 1).to(DEV)
            order = order[~seen[order]]
            res = len(order)
            state, asked = judge64(q[i, hs].double(), k[h], v[h], lse_f[0], o_f[0], order, res, n,
                                   n - res, rule, eps, 0.1)
            got = f.state[i * kv + h].item()
            states.append(state)
            moved += got != {"sampled": 1, "dense": 2, "whole": 3}[state]
            gap = max(gap, float(f.residual[i * kv + h].item() != res))
            count = f.counts[i * kv + h].item()
            if got != 1:
                read[hs] = True
                gap = max(gap, float(count != 0))
                continue
            if state == "sampled":
                gap = max(gap, max(abs(count - asked) - 2, 0) / asked)
            read[hs, 0] = seen
            read[hs, 0, order[:count]] = True
            w[hs, 0, order[:count]] = math.log(res / count)
        o, lse = attend64(q[i:i + 1], k, v, read, w)
        err = max(err, rel(f.out[i], o[0]), (f.lse[i] - lse[0]).abs().max().item())
        exact, _ = attend64(q[i:i + 1], k, v, torch.ones(1, n, dtype=torch.bool, device=DEV))
        errors = max(errors, ((f.out[i].double() - exact[0]).norm(dim=-1) /
                              exact[0].norm(dim=-1)).max().item())
    report(f"vattention {rule} {dtype} d{d} kv {kv} group {g} blocks {blocks} tokens {tokens} (error "
           f"against dense {errors:.3f}, {len(states) - states.count('sampled')} of {len(states)} lists dense)", err)
    # A budget near the limit may fall on its other side by rounding.
    report(f"vattention {rule} {dtype} d{d} kv {kv} group {g} budgets", gap + (moved > 1), 0.02)
    return f, cache, q, [m[0] for m in made], seeds, layer, ids


def check_vattention(small):
    b16, f16 = torch.bfloat16, torch.float16
    lens = [700, 2000] if small else [700, 9000, 40000]
    cases = [(b16, 128, 2, 4, "chi2", 0.1, 0.5, lens, 5, 0), (f16, 64, 2, 4, "ratio", 0.1, 0.5, lens)]
    if small:
        cases.append((b16, 128, 1, 12, "chi2", 0.2, 0.1, lens, 3, 40))
    else:
        cases += [(b16, 128, 2, 4, "lemma", 0.3, 0.5, lens, 0, 300),
                  (b16, 64, 2, 4, "tight", 0.3, 0.5, lens), (f16, 128, 2, 4, "denominator", 0.1, 0.5, lens),
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [131072], 100, 0),
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [1, 70, 5003, 130000], 20, 500),
                  (b16, 128, 2, 1, "chi2", 0.2, 0.2, [60000]), (f16, 128, 3, 3, "chi2", 0.2, 0.2, lens, 9, 9),
                  (b16, 128, 1, 16, "chi2", 0.2, 0.2, lens, 9, 100), (f16, 64, 4, 8, "chi2", 0.2, 0.2, lens),
                  (b16, 64, 2, 12, "chi2", 0.3, 0.1, [50000, 3000], 20, 0),
                  # Noisy pilots: they grow, and some lists go dense.
                  (b16, 128, 4, 4, "chi2", 0.5, 0.03, [100000], 20, 0),
                  (b16, 128, 4, 2, "chi2", 0.5, 0.01, [100000, 20000], 0, 100)]
    for case in cases:
        f, cache, q, lists, seeds, layer, ids = vattention_case(*case)
        if case[0] is b16 and case[3] in (4, 12):
            first, moved = f.out.clone(), 0.0
            for _ in range(3 if small else 100):
                f.out.fill_(float("nan"))
                f()
                moved += float((f.out != first).any())
            report("vattention repeats itself", moved)
            i = len(cache.lens) - 1
            alone = t.VAttention(cache, q[i:i + 1].contiguous(), lists[i * cache.kv_heads:], seeds[i:],
                                 case[5], 0.1, case[4], layer=layer, positions=[cache.lens[i] - 1],
                                 row_table=torch.tensor([i], device=DEV, dtype=torch.int32), **ids)
            alone()
            report("vattention independent of the batch", float((alone.out[0] != first[i]).any()))


def check_values(small):
    lens = [1, 65, 700] if small else [1, 63, 65, 1000, 20001]
    shapes = [(torch.bfloat16, 128, 2, 4), (torch.float16, 64, 1, 3)]
    if not small:
        shapes += [(torch.bfloat16, 128, 8, 4), (torch.float16, 128, 2, 1), (torch.bfloat16, 64, 4, 8),
                   (torch.bfloat16, 128, 1, 16), (torch.float16, 128, 2, 12), (torch.bfloat16, 128, 3, 5)]
    for dtype, d, kv, g in shapes:
        cache = t.Cache(lens, kv, d, dtype)
        q = torch.randn(len(lens), kv * g, d, device=DEV, dtype=dtype)
        exact = [attend64(q[i:i + 1], *cache.dense(i), torch.ones(1, n, dtype=torch.bool, device=DEV))
                 for i, n in enumerate(lens)]
        # Values that name one of d runs of tokens: the output counts the draws of each.
        names = t.Cache(lens, kv, d, dtype)
        names.k, names.table = cache.k, cache.table
        want = torch.zeros(len(lens), kv * g, d, device=DEV, dtype=torch.float64)
        for i, n in enumerate(lens):
            run = torch.arange(n, device=DEV) * d // n
            hot = torch.nn.functional.one_hot(run, d).to(dtype)
            for b in range((n + 63) // 64):
                part = hot[b * 64:b * 64 + 64]
                names.v[cache.table[i, b], :, :len(part)] = part
            k = cache.dense(i)[0].double().repeat_interleave(g, 0)
            p = torch.softmax(torch.einsum("hd,hnd->hn", q[i].double(), k) * d**-0.5, -1)
            want[i] = p @ hot.double()
        seeds = torch.randint(0, 2**62, (len(lens),)).tolist()
        for rule, slack in (("systematic", 1.02), ("stratified", 2.02), ("independent", None)):
            f = t.Values(names, q, seeds, 128, rule)
            f()
            counts = f.out.double() * 128
            bad = float((counts.sum(-1) != 128).any()) + float((counts != counts.round()).any())
            off = (counts - want * 128).abs()
            bad += float((off > (slack or 8 * (want * 128).sqrt() + 8)).any())
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} counts", bad)
            lse = max((f.lse[i].double() - x[1][0]).abs().max().item() for i, x in enumerate(exact))
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} lse", lse)
        first, moved = f.out.clone(), 0.0
        for _ in range(3 if small else 50):
            f.out.fill_(float("nan"))
            f()
            moved += float((f.out != first).any())
        i = len(lens) - 1
        alone = t.Values(names, q[i:].contiguous(), seeds[i:], 128, "independent", lens=lens[i:],
                         row_table=torch.tensor([i], device=DEV, dtype=torch.int32))
        alone()
        report(f"values {dtype} d{d} kv {kv} group {g} repeats itself, alone and in a batch",
               moved + float((alone.out[0] != first[i]).any()))
        # Over many seeds the mean goes to the exact output, by its own standard error.
        runs = 8 if small else 512
        table = torch.full((runs,), i, device=DEV, dtype=torch.int32)
        many = q[i:].expand(runs, -1, -1).contiguous()
        for rule in t.TARGETS:
            f = t.Values(cache, many, torch.randint(0, 2**62, (runs,)).tolist(), 16, rule,
                         row_table=table, lens=[lens[i]] * runs)
            f()
            x = f.out.double()
            z = (x.mean(0) - exact[i][0][0]) / (x.std(0) / runs**0.5).clamp_min(1e-3)
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} unbiased (z)", z.square().mean().sqrt().item(),
                   2.0 if small else 1.3)


CHECKS = {"score": check_score, "select": check_select, "sample": check_sample,
          "vattention": check_vattention, "values": check_values, "pinned": check_pinned, "decode": check_decode, "lists": check_lists,
          "prefill": check_prefill, "delta": check_delta}

# Modules beside this one that bring their own check(report, small).
CHECKS |= {m: lambda small, m=m: __import__(m).check(report, small) for m in (
    "layer", "append", "selection", "sample_attention", "saap", "narrow", "pick")}


def main():
    args = [a for a in sys.argv[1:] if not a.startswith("-")]
    torch.manual_seed(time.time_ns() % (1 << 31))
    print("seed", torch.initial_seed(), torch.cuda.get_device_name())
    for name in args or CHECKS:
        CHECKS[name]("--small" in sys.argv)
        torch.cuda.synchronize()
    print("FAILED: " + ", ".join(FAILED) if FAILED else "all passed")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
