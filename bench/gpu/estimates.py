"""Checks of what draws: samples of keys, vAttention's budgets, sampled values.

Expected: the CPU's draws, its budgets in float64, and exact attention over what was read.
"""
import math

import torch

import taper_gpu as t
from layer import Rope, angles_for, slots_for
from oracle import DEV, attend64, fixed_list, paged_list, permuted, philox, rel


def check_sample(report, small):
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


def moments64(s, v, lse_f, o_f, residual, few):
    """vAttention's moments of a sample: scores s [b], values v [b, d], in float64; of the first `few` also products."""
    b = len(s)
    top = max(lse_f.item(), s.max().item())
    e = torch.exp(s - top)
    known = math.exp(lse_f.item() - top)
    ev = (e[:, None] * v).sum(0)
    scale = residual / b
    den = known + scale * e.sum().item()
    o = (o_f * known + scale * ev) / den
    r = e[:, None] * (v - o)
    c = r - r.mean(0)
    dots = (c[:few] @ c[:few].T)**2
    norms = (c[:few]**2).sum(1)
    pairs = (norms.sum()**2 - (norms**2).sum()).item()
    alike = (dots.sum() - dots.diagonal().sum()).item() / pairs if pairs > 0 else 1.0
    return {"b": b, "den": den, "o2": (o @ o).item(), "var_d": e.var().item(),
            "heaviest": max((w.max() / w.sum()).item() for w in (e * e, e * e * (v * v).sum(1))),
            "tr_n": (e[:, None] * v).var(0).sum().item(), "tr_r": r.var(0).sum().item(),
            "alike": min(max(alike, 1 / v.shape[1]), 1.0)}


def budget64(rule, eps, delta, m, n, limit):
    """(verdict, draws) of one head."""
    whole, most, upper, rest, vector, scalar = t.quantiles(delta).values()
    sc = n * math.sqrt(m["var_d"]) / m["den"]
    draws = lambda r: math.ceil(r * r / (1 + r * r / n))
    if rule == "denominator":
        return "sample", draws(whole * sc / eps)

    def quantile(alike):
        sp = 2 * alike / 9
        return math.sqrt(max(1 - sp + upper * math.sqrt(sp), 0)**3)

    if rule in ("ratio", "chi2"):
        norm2, trace, unit = m["o2"], m["tr_r"], m["den"]
        least, add, more = (most, rest * sc, 0) if rule == "ratio" else (
            min(quantile(1), 1.0), 0, t.unseen(delta) * m["heaviest"]**1.5)
        bound = lambda norm, c=least: draws(c * n * math.sqrt(trace * (1 + more)) / (eps * unit * norm) + add)
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
        b = bound(norm, quantile(m["alike"]))
    return "sample", b


def judge64(q, k, v, lse_f, o_f, points, seen, rule, eps, delta, pilot_tokens, got, lean=0.0):
    """The CPU's rules for one group that reads what is `seen`: (state, sampled keys, looks). A look may take the points that
    `got` keys are in where those that it wants come near them: a budget is what it is but for rounding, by which it may
    `lean` to either side."""
    n = len(points)
    passes = ~seen[points]
    res = int(passes.sum())
    fixed = n - res
    upto = passes.cumsum(0)
    of = lambda b: min(n, -(-b * n // res))
    pilot = max(pilot_tokens, math.ceil(0.01 * res))
    limit = 0.5 * n - fixed
    if res <= pilot or pilot >= limit:
        return "whole", 0, 0
    noisy, walked = 0, of(pilot)
    for look in range(1, 1000):
        draws = points[:walked][passes[:walked]]
        m = len(draws)
        most = limit * (2 if 4 * m < limit else 1)
        few = min(40, int(upto[min(walked, 128) - 1]))
        verdicts = []
        for j in range(len(q) if m > 1 else 0):
            sc = k[draws] @ q[j] * k.shape[1]**-0.5
            verdicts.append(budget64(rule, eps, delta,
                                     moments64(sc, v[draws], lse_f[j], o_f[j], res, few), res, most))
        bad = next((x for x in verdicts if x[0] != "sample" or x[1] >= most), None if m > 1 else ("noisy",))
        if bad is None:
            b = max(x[1] for x in verdicts)
            if b <= m * (1 + 2e-3 * (m == got)):
                return "sampled", m, look
            grown = round(t.grown(m, b) * (1 + lean))
        elif bad[0] == "noisy" and noisy < 4:
            noisy, grown = noisy + 1, 4 * max(m, 2)
        else:
            return "dense", 0, look
        if grown >= res or grown >= limit:
            return "dense", 0, look
        to = walked + of(grown - m)
        if to >= n:
            return "dense", 0, look
        # The points that end behind the last of `got` keys, of which the wanted number may be off by little.
        if got > m and abs(int(upto[to - 1]) - got) <= 2 + 1e-2 * got:
            to = int((upto < got).sum()) + 1
        walked = to


def vattention_case(report, dtype, d, kv, g, rule, eps, shift, lens, blocks=0, tokens=0, heavy=0, pilot=64,
                    page=0):
    layer, sink, win = 5, 16, 64
    cache = t.Cache(lens, kv, d, dtype)
    cache.v += shift  # An output of zero mean makes every pilot too noisy.
    if heavy:  # A few keys that a small sample misses: it grows when it meets one.
        few = torch.randint(0, 64, (cache.blocks, kv, 1, 1), device=DEV)
        cache.k *= 1 + heavy * (torch.arange(64, device=DEV)[:, None] == few)
    q = torch.randn(len(lens), kv * g, d, device=DEV, dtype=dtype)
    bid, tid, made = [], [], []
    for n in lens:
        if page:
            made += [paged_list(n, h, sink, win, blocks, page, tid) for h in range(kv)]
        else:
            made += [fixed_list(n, h, sink, win, blocks, tokens, bid, tid) for h in range(kv)]
    as_i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
    seeds = torch.randint(0, 2**62, (len(lens),)).tolist()
    ids = dict(block_ids=as_i32(bid), token_ids=as_i32(tid), token_shift=page.bit_length() - 1 if page else 0,
               out_f32=page > 0)
    f = t.VAttention(cache, q, [m[0] for m in made], seeds, eps, 0.1, rule, layer=layer, pilot_tokens=pilot, **ids)
    f()
    gap = err = errors = 0.0
    states, looks, moved = [], [], 0
    for i, n in enumerate(lens):
        k, v = (x.double() for x in cache.dense(i))
        read = torch.zeros(kv * g, 1, n, dtype=torch.bool, device=DEV)
        w = torch.zeros(kv * g, 1, n, device=DEV, dtype=torch.float64)
        for h in range(kv):
            seen = made[i * kv + h][1].to(DEV)
            hs = slice(h * g, (h + 1) * g)
            o_f, lse_f = attend64(q[i:i + 1, hs], k[h:h + 1], v[h:h + 1], seen[None])
            order = permuted(n, seeds[i], layer, h, n - 1).to(DEV)
            got, count = f.state[i * kv + h].item(), f.counts[i * kv + h].item()
            judged = lambda lean: judge64(q[i, hs].double(), k[h], v[h], lse_f[0], o_f[0], order, seen, rule, eps, 0.1,
                                          pilot, count, lean)
            near = lambda came: came[0] != "sampled" or abs(count - came[1]) <= 2 + 0.01 * came[1]
            state, asked, look = first = judged(0.0)
            # A key more or less of a look may be a heavy one, which moves all that comes after.
            if got == t.SAMPLED and not near(first):
                others = (judged(lean) for lean in (1e-3, -1e-3, 2e-3, -2e-3, 4e-3, -4e-3))
                state, asked, look = next((came for came in others if came[0] == "sampled" and near(came)), first)
            order = order[~seen[order]]
            res = len(order)
            looks.append(look)
            states.append(state)
            moved += got != {"sampled": t.SAMPLED, "dense": t.DENSE, "whole": t.WHOLE}[state]
            gap = max(gap, float(f.residual[i * kv + h].item() != res))
            if got != t.SAMPLED:
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
    report(f"vattention {rule} {dtype} d{d} kv {kv} group {g} blocks {blocks} tokens {tokens} pages of {page} (error "
           f"against dense {errors:.3f}, {len(states) - states.count('sampled')} of {len(states)} lists dense, "
           f"up to {max(looks)} looks)", err)
    # A budget near the limit may fall on its other side by rounding.
    report(f"vattention {rule} {dtype} d{d} kv {kv} group {g} budgets", gap + (moved > 1), 0.02)
    return f, cache, q, [m[0] for m in made], seeds, layer, ids


def check_vattention(report, small):
    b16, f16 = torch.bfloat16, torch.float16
    lens = [700, 2000] if small else [700, 9000, 40000]
    cases = [(b16, 128, 2, 4, "chi2", 0.1, 0.5, lens, 5, 0), (f16, 64, 2, 4, "ratio", 0.1, 0.5, lens)]
    if small:
        cases.append((b16, 128, 1, 12, "chi2", 0.2, 0.1, lens, 3, 40))
        cases.append((b16, 128, 2, 4, "chi2", 0.2, 0.5, [5000], 3, 40, 1, 10))
        cases.append((b16, 128, 3, 4, "chi2", 0.2, 0.5, [1500, 3000], 10, 0, 0, 20, 16))
        cases.append((b16, 128, 2, 4, "chi2", 0.2, 0.5, [5000], 0, 1100))
    else:
        cases += [(b16, 128, 2, 4, "lemma", 0.3, 0.5, lens, 0, 300),
                  (b16, 64, 2, 4, "tight", 0.3, 0.5, lens), (f16, 128, 2, 4, "denominator", 0.1, 0.5, lens),
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [131072], 100, 0),
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [1, 70, 5003, 130000], 20, 500),
                  (b16, 128, 2, 1, "chi2", 0.2, 0.2, [60000]), (f16, 128, 3, 3, "chi2", 0.2, 0.2, lens, 9, 9),
                  (b16, 128, 1, 16, "chi2", 0.2, 0.2, lens, 9, 100), (f16, 64, 4, 8, "chi2", 0.2, 0.2, lens),
                  (b16, 64, 2, 12, "chi2", 0.3, 0.1, [50000, 3000], 20, 0),
                  # Tokens alone, of which the drawing warps keep some.
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [131072, 9000], 0, 3000),
                  (f16, 64, 3, 3, "ratio", 0.2, 0.5, [60000, 1000], 0, 9000),
                  # Noisy pilots: they grow, and some lists go dense.
                  (b16, 128, 4, 4, "chi2", 0.5, 0.03, [100000], 20, 0),
                  (b16, 128, 4, 2, "chi2", 0.5, 0.01, [100000, 20000], 0, 100),
                  # Rare heavy keys, small first looks.
                  (b16, 128, 8, 4, "chi2", 0.1, 0.5, [120000], 20, 0, 1),
                  (b16, 128, 2, 8, "chi2", 0.5, 0.5, [90000], 20, 0, 1.5),
                  (f16, 128, 2, 4, "chi2", 0.1, 0.5, [30000, 9000], 5, 100, 1, 16),
                  (b16, 64, 4, 4, "chi2", 0.2, 0.5, [20000, 3000], 0, 0, 1, 2),
                  (b16, 128, 2, 12, "ratio", 0.2, 0.5, [40000], 5, 100, 1),
                  # Pages; the bitmap of them covers 131,072 tokens at pages of 4.
                  (b16, 128, 8, 4, "chi2", 0.06, 0.5, [131072, 130000, 300], 700, 0, 0, 64, 16),
                  (b16, 128, 2, 4, "chi2", 0.1, 0.5, [140001, 9000], 500, 0, 0, 64, 4),
                  (f16, 64, 3, 3, "ratio", 0.2, 0.5, [20000], 50, 0, 1, 64, 32),
                  (b16, 128, 1, 16, "chi2", 0.2, 0.2, [40000], 100, 0, 0, 64, 64),
                  (b16, 128, 4, 4, "chi2", 0.06, 0.5, [120000], 100, 0, 1, 16),
                  (f16, 64, 3, 3, "chi2", 0.2, 0.2, [20000], 9, 9, 1, 2),
                  # Values whose mean is ten times their spread.
                  (b16, 128, 2, 4, "chi2", 0.006, 10, [40000, 9000], 5, 100),
                  (f16, 128, 2, 8, "chi2", 0.006, 10, [40000]), (b16, 64, 3, 3, "ratio", 0.05, 10, [30000], 0, 0, 1),
                  # A first look of many tiles a thread block.
                  (b16, 128, 2, 4, "chi2", 0.02, 0.5, [40000], 5, 0, 0, 8000)]
    for case in cases:
        f, cache, q, lists, seeds, layer, ids = vattention_case(report, *case)
        if case[0] is b16 and case[3] in (4, 12):
            first, moved = f.out.clone(), 0.0
            for _ in range(3 if small else 100):
                f.out.fill_(float("nan"))
                f()
                moved += float((f.out != first).any())
            report("vattention repeats itself", moved)
            i = len(cache.lens) - 1
            alone = t.VAttention(cache.rows(i), q[i:i + 1].contiguous(), lists[i * cache.kv_heads:], seeds[i:],
                                 case[5], 0.1, case[4], layer=layer, pilot_tokens=f.p.pilot_tokens, **ids)
            alone()
            report("vattention independent of the batch", float((alone.out[0] != first[i]).any()))
    check_fresh(report, small)


def check_fresh(report, small):
    """Rows of one sequence whose last tokens the launch ahead writes, where what is asked for early finds NaN."""
    for dtype, n, rows, window in ((torch.bfloat16, 3000, 1, 1), (torch.bfloat16, 40000, 4, 1), (torch.float16, 9000, 3, 2)):
        d, kv, g = 128, 2, 4
        cache, busy = t.Cache([n], kv, d, dtype), t.Cache([2000 if small else 60000], kv, d, dtype)
        cache.v += 0.5
        positions = list(range(n - rows, n))
        as_i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)
        qkv = torch.randn(rows, (kv * g + 2 * kv) * d, device=DEV, dtype=dtype)
        rope = Rope(cache, qkv, angles_for(n, d)[n - rows:], slots_for(cache, as_i32([0] * rows), as_i32(positions)), kv * g)
        ahead = t.Decode(busy, torch.randn(1, kv * g, d, device=DEV, dtype=dtype),
                         [t.work_list(end=(busy.lens[0], 0), length=busy.lens[0])] * kv)
        ahead.plan()
        lists = [t.work_list((0, p + 1 - window), (16, p + 1), length=p + 1) for p in positions for _ in range(kv)]
        seeds = torch.randint(0, 2**62, (rows,)).tolist()
        # Scouts go with asking early.
        make = lambda scouts, positions: t.VAttention(cache.rows(*[0] * rows), rope.q, lists, seeds, 0.1, 0.1,
                                                      positions=positions, scouts=scouts)
        late, early = make(0, positions), make(1, positions)
        rope()
        torch.cuda.synchronize()
        late()
        bad = float(late.out.isnan().any())
        for _ in range(3 if small else 30):
            for p in positions:
                for x in (cache.k, cache.v):
                    x[cache.table[0, p // 64], :, p % 64] = float("nan")
            ahead()
            rope()
            early()
            bad += float((early.out != late.out).any())
        report(f"vattention {dtype} {rows} rows that the launch ahead writes, window {window}", bad)
        # Positions that say nothing of how many tokens there are: what was asked for is not the sample's.
        for apart in (-5, 7, 1 << 20):
            late, early = (make(scouts, [p + apart for p in positions]) for scouts in (0, 1))
            late(), early()
            report(f"vattention {dtype} {rows} rows at {apart} from their tokens",
                   float((early.out != late.out).any()) + float(early.out.isnan().any()))


def check_values(report, small):
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
            # And so do the draws themselves.
            ids, n = f.ids.long(), torch.tensor(lens, device=DEV)[:, None, None]
            named = torch.nn.functional.one_hot((ids * d // n).clamp(0, d - 1), d).sum(2)
            bad += float(((ids < 0) | (ids >= n)).any()) + float((named != counts).any())
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} counts", bad)
            lse = max((f.lse[i].double() - x[1][0]).abs().max().item() for i, x in enumerate(exact))
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} lse", lse)
        first, moved = f.out.clone(), 0.0
        for _ in range(3 if small else 50):
            f.out.fill_(float("nan"))
            f()
            moved += float((f.out != first).any())
        i = len(lens) - 1
        alone = t.Values(names.rows(i), q[i:].contiguous(), seeds[i:], 128, "independent")
        alone()
        report(f"values {dtype} d{d} kv {kv} group {g} repeats itself, alone and in a batch",
               moved + float((alone.out[0] != first[i]).any()))
        # Beside a block that all but holds the mass, that of other ranks rounds to 0: nothing of theirs counts.
        heavy = t.Cache(lens, kv, d, dtype)
        heavy.k, heavy.v, heavy.table = cache.k.clone(), cache.v.clone(), cache.table
        heavy.k[cache.table[i, 0]], heavy.v[cache.table[i, 0]] = 4.0, 1.0
        for rule in t.TARGETS:
            f = t.Values(heavy.rows(i), q[i:].abs().contiguous(), seeds[i:], 16, rule)
            f()
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} one block holds the mass", (f.out - 1).abs().max().item())
        # Over many seeds the mean goes to the exact output, by its own standard error.
        runs = 8 if small else 512
        many = q[i:].expand(runs, -1, -1).contiguous()
        for rule in t.TARGETS:
            f = t.Values(cache.rows(*[i] * runs), many, torch.randint(0, 2**62, (runs,)).tolist(), 16, rule)
            f()
            x = f.out.double()
            z = (x.mean(0) - exact[i][0][0]) / (x.std(0) / runs**0.5).clamp_min(1e-3)
            report(f"values {rule} {dtype} d{d} kv {kv} group {g} unbiased (z)", z.square().mean().sqrt().item(),
                   2.0 if small else 1.3)
