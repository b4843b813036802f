"""SAAP: assignment, index, classifier, choice of clusters, and a decode step of them all.

check(report, small) compares with PyTorch in float64; bench(put, time) measures, where
time(f) is the median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from oracle import rel
from taper_gpu import (AssignParams, ChooseParams, ClusteredParams, IndexParams, IndexSpan, KeyClusterParams, LinearParams,
                       NearestParams, ProbeParams, ProjectParams, RowsParams, call, words)

DEV = "cuda"

i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)


class Assign:
    def __init__(self, cache, k, centroids, positions, token_table):
        self.ids = torch.zeros(cache.blocks, cache.kv_heads, 64, dtype=torch.int16, device=DEV) - 1
        self.p = AssignParams(
            k=k, centroids=centroids, positions=positions, token_table=token_table, **cache.where, ids=self.ids,
            tokens=k.shape[0], head_dim=k.shape[2], clusters=centroids.shape[1], dtype=k.dtype)

    def __call__(self):
        call("taper_saap_assign", self.p)


class Index:
    """spans: (begin, end) tokens of each sequence."""

    def __init__(self, cache, ids, clusters, spans):
        most = max(e - b for b, e in spans)
        lists, segments = len(spans) * cache.kv_heads, max((most + 2047) // 2048, 1)
        spans = [words(IndexSpan(table=i, begin=b, end=e)) for i, (b, e) in enumerate(spans)]
        neg = lambda *s: torch.full(s, -1, dtype=torch.int32, device=DEV)
        self.offsets, self.tokens = neg(lists, clusters + 1), neg(lists, max(most, 1))
        self.p = IndexParams(
            ids=ids, **cache.where, spans=i32(spans), counts=neg(lists, segments, clusters), offsets=self.offsets,
            tokens=self.tokens, sequences=len(spans), clusters=clusters, segments=segments, capacity=max(most, 1))

    def __call__(self):
        call("taper_saap_index", self.p)


class Linear:
    def __init__(self, x, weight, bias, relu):
        rows, q_heads, inputs = x.shape
        kv, outputs, _ = weight.shape
        self.out = torch.full((rows, q_heads, outputs), float("nan"), device=DEV,
                              dtype=x.dtype if relu else torch.float32)
        self.p = LinearParams(x=x, weight=weight, bias=bias, out=self.out, rows=rows, q_heads=q_heads, kv_heads=kv,
                              inputs=inputs, outputs=outputs, dtype=x.dtype, relu=relu)

    def __call__(self):
        call("taper_saap_linear", self.p)


class Choose:
    def __init__(self, logits, index, lens, indexed, kv_heads, take, capacity):
        rows, q_heads, clusters = logits.shape
        self.work = torch.full((rows * kv_heads, 16), -1, dtype=torch.int32, device=DEV)
        self.token_ids = torch.full((rows * kv_heads, capacity), -1, dtype=torch.int32, device=DEV)
        self.p = ChooseParams(
            logits=logits, offsets=index.offsets, tokens=index.tokens, lens=i32(lens), indexed=i32(indexed), work=self.work,
            token_ids=self.token_ids, rows=rows, q_heads=q_heads, kv_heads=kv_heads, clusters=clusters, take=take, sink=1,
            index_capacity=index.tokens.shape[1], capacity=capacity)

    def __call__(self):
        call("taper_saap_choose", self.p)


class Saap:
    """A decode step: classifier on q before its rotation, choice, attention on q after it."""

    def __init__(self, cache, q_plain, q, w1, b1, w2, b2, index, indexed, take, capacity):
        self.hidden = Linear(q_plain, w1, b1, True)
        self.logits = Linear(self.hidden.out, w2, b2, False)
        self.choose = Choose(self.logits.out, index, cache.lens, indexed, cache.kv_heads, take,
                             capacity)
        self.attend = t.VAttention(cache, q, self.choose.work, [0] * len(cache.lens), 1.0, 0.05,
                                   "listed", token_ids=self.choose.token_ids)
        self.out = self.attend.out
        self.p = ClusteredParams(s=self.attend.p, c=self.choose.p)
        self.p.s.d.lists = self.p.s.d.token_ids = self.p.c.work = self.p.c.token_ids = None

    def classify(self):
        self.hidden()
        self.logits()

    def apart(self):
        self.classify()
        self.choose()
        self.attend()
        return self.out

    def choose_and_attend(self):
        call("taper_saap_attend", self.p)

    def __call__(self):
        self.classify()
        self.choose_and_attend()
        return self.out


class Probe:
    """Whole clusters between the two ranges `fixed` of each row: at most `most`, and tokens by `limits` of each list."""

    def __init__(self, cache, logits, ids, fixed, most, limits, at_least):
        rows, q_heads, clusters = logits.shape
        lists, capacity = rows * cache.kv_heads, max(cache.lens)
        self.given = i32([t.work_list((0, b), (a, n), length=n) for (a, b), n in zip(fixed, cache.lens)
                          for _ in range(cache.kv_heads)])
        self.work = torch.zeros_like(self.given)
        self.token_ids = torch.full((lists, capacity), -1, dtype=torch.int32, device=DEV)
        self.p = ProbeParams(
            logits=logits, ids=ids, **cache.where, limits=i32(limits), work=self.work,
            token_ids=self.token_ids, rows=rows, q_heads=q_heads, clusters=clusters, most=most, at_least=at_least,
            capacity=capacity)

    def __call__(self):
        self.work.copy_(self.given)
        call("taper_saap_probe", self.p)


class Project:
    """A layer of a perceptron for each map: `x` [rows, heads, inputs] by `weight` [maps, outputs, inputs], f32 or bf16."""

    def __init__(self, x, weight, bias):
        (rows, heads, inputs), (maps, outputs, _) = x.shape, weight.shape
        self.out = torch.full((rows, heads, outputs), float("nan"), device=DEV)
        self.p = ProjectParams(
            x=x, weight=weight, bias=bias, out=self.out, rows=rows, heads=heads, x_heads=heads, maps=maps, inputs=inputs,
            outputs=outputs, activation=t.LINEAR, scale=1.0, weight_bf16=weight.dtype == torch.bfloat16)

    def __call__(self):
        call("taper_project", self.p)


class Keys:
    """The cluster of each of the cache's keys in `slots`, turned back, in one launch; `apart` by a product of torch's."""

    def __init__(self, cache, slots, centroids, turns):
        kv, clusters, d = centroids.shape
        n = slots.shape[0]
        self.ids = torch.zeros(cache.blocks, kv, 64, dtype=torch.int16, device=DEV) - 1
        self.rows = torch.full((n, kv, d), float("nan"), device=DEV)
        cos, sin = turns
        self.products = torch.full((kv, n, clusters), float("nan"), device=DEV)
        self.centroids = centroids
        self.p = KeyClusterParams(k=cache.k, centroids=centroids, slots=slots, cos=cos, sin=sin, ids=self.ids, tokens=n,
                                  kv_heads=kv, head_dim=d, clusters=clusters, dtype=cache.dtype)
        self.back = RowsParams(x=cache.k, slots=slots, cos=cos, sin=sin, out=self.rows, tokens=n, heads=kv, width=d,
                               dtype=cache.dtype)
        # A table of one block for each token.
        self.nearest = NearestParams(
            products=self.products, positions=slots % 64, token_table=torch.arange(n, device=DEV, dtype=torch.int32),
            block_table=(slots // 64)[:, None].contiguous(), ids=self.ids, tokens=n, kv_heads=kv, clusters=clusters,
            table_stride=1)

    def apart(self):
        call("taper_rows", self.back)
        torch.matmul(self.rows.transpose(0, 1), self.centroids.transpose(1, 2), out=self.products)
        call("taper_saap_nearest", self.nearest)

    def __call__(self):
        call("taper_saap_key_clusters", self.p)


def check_index(report, small):
    for dtype, d, kv, clusters in ((torch.bfloat16, 128, 2, 64), (torch.float16, 64, 3, 1024),
                                   (torch.bfloat16, 64, 1, 4096)):
        lens = [2, 300, 70] if small else [2, 20000, 70]
        cache = t.Cache(lens, kv, d, dtype)
        tok = [(i, p) for i, n in enumerate(lens) for p in range(n)]
        table, pos = i32([a for a, _ in tok]), i32([b for _, b in tok])
        k = torch.randn(len(tok), kv, d, device=DEV, dtype=dtype)
        mu = torch.nn.functional.normalize(torch.randn(kv, clusters, d, device=DEV), dim=-1)
        mu = mu.to(dtype).contiguous()
        f = Assign(cache, k, mu, pos, table)
        f()
        got = f.ids[cache.table[table.long(), (pos // 64).long()].long(), :, (pos % 64).long()]
        got = got.long() & 0xFFFF
        s = torch.einsum("nhd,hcd->nhc", k.double(), mu.double())
        loss = s.amax(-1) - s.gather(-1, got[..., None])[..., 0]
        report(f"assign {dtype} d{d} {clusters} clusters", (loss.max() / s.abs().max()).item(), 1e-4)
        spans = [(1, max(n - 40, 1)) for n in lens]
        x = Index(cache, f.ids, clusters, spans)
        x()
        bad, at = 0, 0
        for i, n in enumerate(lens):
            b, e = spans[i]
            for h in range(kv):
                ids = got[at + b:at + e, h]
                order = torch.sort(ids, stable=True).indices + b
                count = torch.bincount(ids, minlength=clusters)
                off = torch.cat([torch.zeros(1, device=DEV, dtype=torch.long), count.cumsum(0)])
                bad += not torch.equal(x.offsets[i * kv + h].long(), off)
                bad += not torch.equal(x.tokens[i * kv + h, :e - b].long(), order)
            at += n
        report(f"index {dtype} d{d} {clusters} clusters", float(bad), 0.5)


def check_linear(report, small):
    for dtype in (torch.bfloat16, torch.float16):
        for rows, kv, group in ((1, 2, 4), (5, 1, 3), (3, 1, 16)):
            for inputs, outputs in ((64, 64), (128, 1024), (256, 128), (512, 64), (1024, 1024)):
                x = torch.randn(rows, kv * group, inputs, device=DEV, dtype=dtype)
                w = torch.randn(kv, outputs, inputs, device=DEV, dtype=dtype) * inputs**-0.5
                b = torch.randn(kv, outputs, device=DEV)
                for relu in (False, True):
                    f = Linear(x, w, b, relu)
                    f()
                    want = torch.einsum("rhgi,hoi->rhgo", x.double().view(rows, kv, group, inputs),
                                        w.double()) + b.double()[None, :, None]
                    want = want.clamp_min(0) if relu else want
                    want = want.flatten(1, 2)
                    err = rel(f.out, want)
                    if err > 1e-3 or relu:
                        report(f"linear {dtype} {rows}x{kv}x{group} {inputs} {outputs} {relu}", err)


def saap_case(lens, kv, group, d, dtype, clusters, take, capacity, window):
    cache = t.Cache(lens, kv, d, dtype)
    hq = kv * group
    ids = torch.randint(0, clusters, (cache.blocks, kv, 64), device=DEV).to(torch.int16)
    spans = [(1, max(n - window, 1)) for n in lens]
    index = Index(cache, ids, clusters, spans)
    index()
    rows = len(lens)
    q = torch.randn(rows, hq, d, device=DEV, dtype=dtype)
    plain = torch.randn(rows, hq, d, device=DEV, dtype=dtype)
    w1 = torch.randn(kv, 1024, d, device=DEV, dtype=dtype) * d**-0.5
    w2 = torch.randn(kv, clusters, 1024, device=DEV, dtype=dtype) * 0.1
    b1, b2 = torch.randn(kv, 1024, device=DEV), torch.randn(kv, clusters, device=DEV)
    f = Saap(cache, plain, q, w1, b1, w2, b2, index, [e for _, e in spans], take, capacity)
    return f, cache, q, ids, spans


def check_step(report, small):
    for lens, kv, group, d, dtype, clusters, take in (
            ([300, 90] if small else [9000, 90, 2100], 2, 4, 128, torch.bfloat16, 64, 9),
            ([500] if small else [5000], 1, 3, 64, torch.float16, 1024, 100),
            ([300], 1, 16, 128, torch.bfloat16, 64, 64)):
        f, cache, q, ids, spans = saap_case(lens, kv, group, d, dtype, clusters, take,
                                            max(lens), 64)
        # Beside the lists of a launch of its own, the attention over the clusters that it chooses itself.
        f.apart()
        listed = f.out.clone()
        moved = 0.0
        for _ in range(3 if small else 50):
            f.out.fill_(float("nan"))
            f()
            moved += float(rel(f.out, listed) > 1e-3)
        report(f"saap in one launch as in two, {clusters} clusters, {take} taken", moved)
        bad, err = 0, 0.0
        for i, n in enumerate(lens):
            b, e = spans[i]
            k, v = cache.dense(i)
            rows = cache.table[i, :(n + 63) // 64].long()
            cluster = ids[rows].permute(1, 0, 2).reshape(kv, -1)[:, :n].long()
            for h in range(kv):
                p = torch.softmax(f.logits.out[i, h * group:(h + 1) * group].double(), -1).sum(0)
                best = torch.sort(p, descending=True, stable=True).indices[:take]
                read = torch.isin(cluster[h], best)
                read[e:] = True
                read[:b] = True
                w = f.choose.work[i * kv + h].tolist()
                got = torch.zeros(n, dtype=torch.int32, device=DEV)
                got[f.choose.token_ids[i * kv + h, :w[7]].long()] += 1
                got[w[0]:w[2]] += 1
                got[w[1]:w[3]] += 1
                bad += not torch.equal(got, read.int())
                for g in range(group):
                    s = k[h].double() @ q[i, h * group + g].double() * d**-0.5
                    a = torch.softmax(s.masked_fill(~read, float("-inf")), -1) @ v[h].double()
                    err = max(err, rel(f.out[i, h * group + g], a))
        report(f"saap lists {clusters} clusters, {take} taken", float(bad), 0.5)
        report(f"saap output {clusters} clusters, {take} taken", err)
    # More tokens than fit: the list reads everything.
    f, cache, q, _, _ = saap_case([3000], 2, 4, 128, torch.bfloat16, 64, 60, 100, 64)
    f.apart()
    dense = t.VAttention(cache, q, [t.work_list(end=(3000, 0), length=3000)] * 2, [0], 1.0, 0.05, "listed")
    dense()
    report("saap overflow is dense", float((dense.out != f.out).any()), 0.5)


def check_keys(report, small):
    for dtype, d, kv, clusters, n in ((torch.bfloat16, 128, 8, 2048, 1), (torch.float16, 64, 3, 33, 5),
                                      (torch.bfloat16, 64, 2, 4096, 37), (torch.float16, 128, 1, 1000, 64)):
        cache = t.Cache([300, 700], kv, d, dtype)
        slots = torch.randperm(700, device=DEV)[:n]
        slots = (cache.table[1, slots // 64] * 64 + slots % 64).int()
        angle = torch.rand(n, d // 2, device=DEV) * 6
        f = Keys(cache, slots, torch.randn(kv, clusters, d, device=DEV), (angle.cos(), angle.sin()))
        block, row = (slots // 64).long(), (slots % 64).long()
        f()
        got = f.ids[block, :, row].long() & 0xFFFF
        f.ids.fill_(-1)
        f.apart()
        apart = f.ids[block, :, row].long() & 0xFFFF
        a, b = cache.k[block, :, row].double().chunk(2, -1)
        cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
        keys = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
        s = torch.einsum("nhd,hcd->nhc", keys, f.centroids.double())
        loss = s.amax(-1) - s.gather(-1, got[..., None])[..., 0]
        report(f"clusters of {n} keys {dtype} d{d} {clusters}", (loss.max() / s.abs().max()).item(), 1e-6)
        report("clusters of keys as by products", float((got != apart).double().mean()), 0.02)


def check_project(report, small):
    for rows, maps, group, inputs, outputs in ((1, 8, 4, 512, 2048), (3, 2, 4, 136, 77), (2, 1, 3, 1096, 9), (16, 8, 4, 512, 2048)):
        x = torch.randn(rows, maps * group, inputs, device=DEV)
        w, b = torch.randn(maps, outputs, inputs, device=DEV).bfloat16(), torch.randn(maps, outputs, device=DEV)
        want = torch.einsum("rhgi,hoi->rhgo", x.double().view(rows, maps, group, inputs), w.double())
        want = (want + b.double()[None, :, None]).flatten(1, 2)
        for weight in (w, w.float()):
            f = Project(x, weight, b)
            f()
            report(f"project {weight.dtype} {rows} {inputs} {outputs}", rel(f.out, want), 1e-5)


def check_ties(report, small):
    """Of clusters with equal masses, more than a warp compares with one another, the lower ones are taken."""
    n, kv = (300 if small else 9000), 2
    for clusters, take in ((64, 40), (1024, 100), (4096, 7)):
        cache = t.Cache([n], kv, 64, torch.float16)
        ids = torch.randint(0, clusters, (cache.blocks, kv, 64), device=DEV).to(torch.int16)
        index = Index(cache, ids, clusters, [(1, n - 64)])
        index()
        f = Choose(torch.zeros(1, 4 * kv, clusters, device=DEV), index, [n], [n - 64], kv, take, n)
        f()
        of = ids[cache.table[0].long()].permute(1, 0, 2).reshape(kv, -1)[:, :n].long()
        bad = 0
        for h in range(kv):
            read = of[h] < take
            read[:1] = read[n - 64:] = False
            got = f.token_ids[h, :f.work[h, 7].item()].long()
            bad += not torch.equal(got.sort().values, read.nonzero().flatten())
        report(f"saap takes the lower of equal clusters, {take} of {clusters}", float(bad), 0.5)


def check_probe(report, small):
    """Whole clusters in the order of their masses, which fall on many bins, on the first, on few or on one."""
    long = 5000 if small else 150000
    for lens, kv, group, clusters in (([long, 300, 70], 2, 4, 2048), ([long // 3], 3, 3, 33), ([700, long], 1, 16, 4096),
                                      ([long] * 9, 8, 1, 1000)):
        cache = t.Cache(lens, kv, 64, torch.float16)
        ids = torch.randint(0, clusters, (cache.blocks, kv, 64), device=DEV)
        ids[ids % 3 == 0] //= 2  # Clusters of many sizes, some of nothing.
        ids = ids.to(torch.int16)
        fixed = [(min(3, n // 2), max(n - 77, n // 2)) for n in lens]
        between = [b - a for a, b in fixed for _ in range(kv)]
        logits, compared = torch.randn(len(lens), kv * group, clusters, device=DEV), 0
        for kind, logits in (("normal", logits), ("sharp", logits * 8), ("flat", logits / 64), ("equal", logits * 0)):
            for most, share, at_least in ((clusters, 1, 0), (max(clusters // 64, 1), 1, 0), (clusters // 2, 0.1, 0),
                                          (clusters, 0.05, 1), (clusters, 0, 1), (clusters, 0.6, 1)):
                limits = [int(share * n) if share < 1 else -1 for n in between]
                f = Probe(cache, logits, ids, fixed, most, limits, at_least)
                f()
                once = f.token_ids.clone()
                f()
                bad, lists = int(not torch.equal(once, f.token_ids)), 0
                for line in range(0, len(limits), max(len(limits) // 6, 1)):
                    i, h = divmod(line, kv)
                    n, (a, b) = lens[i], fixed[i]
                    of = ids[cache.table[i, :(n + 63) // 64].long(), h].flatten()[:n].long()
                    mass = torch.softmax(logits[i, h * group:(h + 1) * group].double(), -1).sum(0)
                    order = torch.sort(mass.float(), descending=True, stable=True).indices
                    size = torch.bincount(of[a:b], minlength=clusters)[order].cumsum(0)
                    limit = limits[line] if limits[line] >= 0 else n
                    take = int((size < limit).sum()) + 1 if at_least else int((size <= limit).sum())
                    take = 0 if at_least and limit == 0 else min(take, most)
                    last = mass[order[take - 1:take + 1]]
                    if kind != "equal" and 0 < take < clusters and last[0] < last[1] * (1 + 1e-6):
                        continue  # Rounding may say either.
                    lists += 1
                    read = torch.isin(of, order[:take])
                    read[:a] = read[b:] = False
                    got = f.token_ids[line, :f.work[line, 7].item()].long()
                    bad += not torch.equal(got, read.nonzero().flatten())
                compared += lists
                report(f"probe {kind} {lens[0]} x {len(lens)}, {clusters} clusters, {most} or {share}, {lists} lists",
                       float(bad), 0.5)
        report(f"probe lists compared: {compared}", 20 / max(compared, 1), 0.5)


def check(report, small):
    check_index(report, small)
    check_probe(report, small)
    check_ties(report, small)
    check_linear(report, small)
    check_project(report, small)
    check_keys(report, small)
    check_step(report, small)


def bench_probe(put, time):
    for n, rows in ((32768, 1), (131072, 1), (524288, 1), (32768, 16)):
        cache = t.Cache([n] * rows, 8, 128, torch.bfloat16)
        ids = torch.randint(0, 2048, (cache.blocks, 8, 64), device=DEV).to(torch.int16)
        logits = torch.randn(rows, 32, 2048, device=DEV)
        for what, most, limit, at_least in (("32 clusters", 32, -1, 0), ("32 clusters, half", 32, n // 2, 0),
                                            ("2 % of the tokens", 2048, n // 50, 1)):
            f = Probe(cache, logits, ids, [(1, n - 2047)] * rows, most, [limit] * rows * 8, at_least)
            f()
            put(f"saap probe {rows} x {n} {what} us", time(lambda: call("taper_saap_probe", f.p)))


def bench(put, time):
    from bench import flashinfer_decode
    bench_probe(put, time)
    for n, take in ((171008, 51), (524288, 51)):
        try:
            put(f"saap {n} flashinfer us", time(flashinfer_decode(n, 1)))
        except ImportError:
            pass
        f, cache, q, ids, spans = saap_case([n], 8, 4, 128, torch.bfloat16, 1024, take, n // 8, 2048)
        f.apart()
        read = f.choose.work[:, 7].double().mean().item()
        put(f"saap {n} clusters' share of the tokens", read / n)
        put(f"saap {n} step us", time(f))
        put(f"saap {n} step with lists us", time(f.apart))
        for name in ("hidden", "logits", "classify", "choose", "choose_and_attend"):
            put(f"saap {n} {name} us", time(getattr(f, name)))
        put(f"saap {n} attend us", time(f.attend))
        apart = t.Decode(cache, q, f.choose.work, token_ids=f.choose.token_ids)
        put(f"saap {n} plan us", time(apart.plan))
        put(f"saap {n} attend and merge in two launches us", time(apart))
        dense = t.Decode(cache, q, [t.work_list(end=(n, 0), length=n)] * 8)
        dense.plan()
        put(f"saap {n} dense taper us", time(dense))
        put(f"saap {n} index us", time(Index(cache, ids, 1024, spans)))
        if n < 200000:
            k = torch.randn(n, 8, 128, device=DEV, dtype=torch.bfloat16)
            mu = torch.randn(8, 1024, 128, device=DEV, dtype=torch.bfloat16)
            pos = torch.arange(n, device=DEV, dtype=torch.int32)
            put(f"saap {n} assign us", time(Assign(cache, k, mu, pos, torch.zeros_like(pos)), 3))
            for dtype in (torch.float32, torch.bfloat16):
                layer = lambda outputs, inputs: (torch.randn(8, outputs, inputs, device=DEV).to(dtype),
                                                 torch.randn(8, outputs, device=DEV))
                first = Project(torch.randn(1, 32, 128, device=DEV), *layer(512, 128))
                second = Project(first.out, *layer(2048, 512))
                put(f"saap perceptron 128 to 512 to 2048 {dtype} us", time(lambda: (first(), second())))
            turn = torch.rand(1, 64, device=DEV)
            keys = Keys(cache, cache.table[0, :1] * 64, torch.randn(8, 2048, 128, device=DEV), (turn, turn))
            put("saap a key's cluster us", time(keys))
            put("saap a key's cluster by a product of torch's us", time(keys.apart))
            few = pos[-256:].contiguous()
            put("saap assign 256 tokens us",
                time(Assign(cache, k[:256].contiguous(), mu, few, torch.zeros_like(few))))
        del f, cache, q, ids, dense, apart
        torch.cuda.empty_cache()
