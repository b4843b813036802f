"""Checks every kernel against float64 attention on fresh random inputs.

Outputs, partials and every cache slot that no sequence owns start as NaN. Usage:
check.py [--small] [--seed=N] [names...]; --small keeps shapes fit for compute-sanitizer, --seed repeats a run.
"""
import math
import sys
import time

import torch

import taper_gpu as t
from oracle import DEV, attend64, causal, fixed_list, rel

LIMIT = 1e-2
FAILED = []


def report(name, err, limit=LIMIT):
    ok = err < limit  # NaN fails.
    if not ok:
        FAILED.append(name)
    print(f"{'ok  ' if ok else 'FAIL'} {err:.2e} {name}", flush=True)


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
    alone = t.Decode(cache.rows(i), q[i:i + 1].contiguous(), [t.work_list(end=(n, 0), length=n)] * cache.kv_heads)
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
        given = t.Decode(cache, q, lists, **what)
        given.p.scale = 0.0
        given.plan()
        given()
        err_given = 0.0
        err = 0.0
        for i, n in enumerate(lens):
            rep = kv * g // heads
            sl = slice(i * heads, (i + 1) * heads)
            seen = torch.stack(seen_all[sl]).to(DEV).repeat_interleave(rep, 0)[:, None]
            w = torch.stack(w_all[sl]).to(DEV).repeat_interleave(rep, 0)[:, None]
            o, lse = attend64(q[i:i + 1], *cache.dense(i), seen, w)
            err = max(err, rel(f.out[i], o[0]), (f.lse[i] - lse[0]).abs().max().item())
            o_w, lse_w = attend64(0 * q[i:i + 1], *cache.dense(i), seen, w)
            err_given = max(err_given, rel(given.out[i], o_w[0]), (given.lse[i] - lse_w[0]).abs().max().item())
        report(f"decode lists {dtype} d{d} group {g} {'per query head' if per_q else ''}", err)
        report(f"decode given weights {dtype} d{d} group {g} {'per query head' if per_q else ''}", err_given)


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
        # Rows at a stride, of the second sequence.
        n2 = n + 77
        pos = torch.cat([torch.arange(0, n2 - 60, 7), torch.arange(n2 - 60, n2)])
        q = torch.randn(n2, kv * g, d, device=DEV, dtype=dtype)
        f = t.Prefill(cache, q[pos.to(DEV)], pos, t.tiles_for(pos, 1, n2))
        f()
        k2, v2 = cache.dense(1)
        o, lse = attend64(q[pos.to(DEV)], k2, v2, causal(pos, n2))
        report(f"prefill {dtype} d{d} group {g} rows at a stride",
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
        means = t.Score(cache, q, mean)
        for f in (full, bound, means):
            f()
        lse = torch.stack([torch.logsumexp(full.out[i, :, :n], -1) for i, n in enumerate(lens)])
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
            m = torch.einsum("hgd,nhd->hgn", qi, mean[rows][:, :, 0].double())
            err = max(err, rel(means.out[i, :, :nb].view(kv, g, nb), m))
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


CHECKS = {"score": check_score, "select": check_select, "pinned": check_pinned, "decode": check_decode,
          "lists": check_lists, "prefill": check_prefill, "delta": check_delta}
# What draws: oracle.py holds what it is compared with.
CHECKS |= {m: lambda small, m=m: getattr(__import__("estimates"), f"check_{m}")(report, small)
           for m in ("sample", "vattention", "values")}

# Modules beside this one that bring their own check(report, small).
CHECKS |= {m: lambda small, m=m: __import__(m).check(report, small) for m in (
    "layer", "append", "quantized", "paying", "selection", "sample_attention", "saap", "narrow", "pick",
    "choose")}


def main():
    args = [a for a in sys.argv[1:] if not a.startswith("-")]
    given = [int(a.removeprefix("--seed=")) for a in sys.argv if a.startswith("--seed=")]
    torch.manual_seed(given[0] if given else time.time_ns() % (1 << 31))
    print("seed", torch.initial_seed(), torch.cuda.get_device_name())
    for name in args or CHECKS:
        CHECKS[name]("--small" in sys.argv)
        torch.cuda.synchronize()
    print("FAILED: " + ", ".join(FAILED) if FAILED else "all passed")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
