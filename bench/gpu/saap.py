"""SAAP: the cluster of a key, the classifier, the choice of clusters, and the decode step that the server makes of them.

check(report, small) compares with PyTorch in float64; bench(put, time) measures, where
time(f) is the median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from oracle import rel
from taper_gpu import KeyClusterParams, NearestParams, ProbeParams, ProjectParams, RowsParams, call

DEV = "cuda"

i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=DEV)


class Probe:
    """Whole clusters between the two ranges `fixed` of each row: at most `most`, and tokens by `limits` of each list."""

    def __init__(self, cache, logits, ids, fixed, most, limits, at_least):
        rows, q_heads, clusters = logits.shape
        lists, capacity = rows * cache.kv_heads, max(cache.lens)
        given = i32([t.work_list((0, b), (a, n), length=n) for (a, b), n in zip(fixed, cache.lens)
                     for _ in range(cache.kv_heads)])
        self.work = torch.full_like(given, -1)
        self.token_ids = torch.full((lists, capacity), -1, dtype=torch.int32, device=DEV)
        self.p = ProbeParams(
            logits=logits, ids=ids, **cache.where, limits=i32(limits), lists=given, work=self.work,
            token_ids=self.token_ids, rows=rows, q_heads=q_heads, clusters=clusters, most=most, at_least=at_least,
            capacity=capacity)

    def __call__(self):
        call("taper_saap_probe", self.p)


class Project:
    """A layer of a perceptron for each map: `x` [rows, heads, inputs] by `weight` [maps, outputs, inputs], f32 or bf16.
    `turns`: cosines and sines that are taken off x first."""

    def __init__(self, x, weight, bias, activation=t.LINEAR, turns=(None, None), fresh=0):
        (rows, heads, inputs), (maps, outputs, _) = x.shape, weight.shape
        self.out = torch.full((rows, heads, outputs), float("nan"), device=DEV)
        cos, sin = turns
        self.p = ProjectParams(
            x=x, cos=cos, sin=sin, weight=weight, bias=bias, out=self.out, rows=rows, heads=heads, x_heads=heads, maps=maps,
            inputs=inputs, outputs=outputs, activation=activation, scale=1.0, weight_bf16=weight.dtype == torch.bfloat16,
            dtype=t.BF16 if x.dtype == torch.float32 else x.dtype, x_f32=x.dtype == torch.float32, fresh=fresh)

    def __call__(self):
        call("taper_project", self.p)


class Step:
    """What the server queues for one row of SAAP, from the queries to the attention's outputs: `taken` of 2,048 clusters, a window
    of 2,047 tokens, a classifier of 512 hidden units, and the clusters of the new keys."""

    def __init__(self, cache, q, turns, slots, ids, taken=32, out=None):
        n, (_, hq, d), kv, clusters, hidden = cache.lens[0], q.shape, cache.kv_heads, 2048, 512
        w = lambda outputs, inputs: torch.randn(kv, outputs, inputs, device=DEV).bfloat16() * inputs**-0.5
        b = lambda outputs: torch.randn(kv, outputs, device=DEV)
        self.keys = Keys(cache, slots, torch.randn(kv, clusters, d, device=DEV), turns, ids)
        self.hidden = Project(q, w(hidden, d), b(hidden), t.RELU, turns, fresh=1)
        self.logits = Project(self.hidden.out, w(clusters, hidden), b(clusters))
        self.probe = Probe(cache, self.logits.out, ids, [(1, n - 2047)], taken, [-1] * kv, 0)
        # Cut into units by the attention itself.
        self.attend = t.Decode(cache, q, self.probe.work, token_ids=self.probe.token_ids)
        self.attend.p.units, self.attend.m.lists = None, self.probe.work
        if out is not None:
            self.attend.m.out, self.attend.m.out_f32 = out, 1

    def classify(self):
        self.hidden()
        self.logits()

    def __call__(self):
        self.keys()
        self.classify()
        self.probe()
        return self.attend()


class Keys:
    """The cluster of each of the cache's keys in `slots`, turned back, in one launch; `apart` by a product of torch's."""

    def __init__(self, cache, slots, centroids, turns, ids=None):
        kv, clusters, d = centroids.shape
        n = slots.shape[0]
        self.ids = torch.zeros(cache.blocks, kv, 64, dtype=torch.int16, device=DEV) - 1 if ids is None else ids
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


def check_turned(report, small):
    """Rows that a layer makes f32 and turns back itself, alone and beside others."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, maps, group, inputs, outputs in ((1, 8, 4, 128, 512), (5, 2, 3, 64, 77), (40, 2, 4, 128, 512)):
            x = torch.randn(rows, maps * group, inputs, device=DEV, dtype=dtype)
            angle = torch.rand(rows, inputs // 2, device=DEV) * 6
            w, b = torch.randn(maps, outputs, inputs, device=DEV).bfloat16(), torch.randn(maps, outputs, device=DEV)
            first, second = x.double().chunk(2, -1)
            cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
            back = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
            for weight in (w, w.float()):
                for turns, of in (((None, None), x.double()), ((angle.cos(), angle.sin()), back)):
                    want = torch.einsum("rhgi,hoi->rhgo", of.view(rows, maps, group, inputs), w.double())
                    want = (want + b.double()[None, :, None]).flatten(1, 2)
                    f, one = (Project(x[:n], weight, b, turns=turns) for n in (rows, 1))
                    f(), one()
                    what = f"project {dtype} {weight.dtype} {rows} {inputs} {outputs} {turns[0] is not None}"
                    report(what, rel(f.out, want), 1e-5)
                    report(what + ", a row alone", float((f.out[:1] != one.out).any()), 0.5)


def check_step(report, small):
    """A row's step, all of whose launches may overlap, beside its parts."""
    n, kv, group, d = 5000 if small else 150000, 8, 4, 128
    cache = t.Cache([n], kv, d, torch.bfloat16)
    q = torch.randn(1, kv * group, d, device=DEV, dtype=torch.bfloat16)
    angle = torch.rand(1, d // 2, device=DEV) * 6
    turns = (angle.cos(), angle.sin())
    slots = (cache.table[0, (n - 1) // 64:(n - 1) // 64 + 1] * 64 + (n - 1) % 64).int()
    ids = torch.randint(0, 2048, (cache.blocks, kv, 64), device=DEV).to(torch.int16)
    f = Step(cache, q, turns, slots, ids)
    f()
    first, bad, err = f.attend.out.clone(), 0, 0.0
    k, v = cache.dense(0)
    of = ids[cache.table[0].long()].permute(1, 0, 2).reshape(kv, -1)[:, :n].long()
    for h in range(kv):
        mass = torch.softmax(f.logits.out[0, h * group:(h + 1) * group].double(), -1).sum(0)
        read = torch.isin(of[h], mass.topk(32).indices)
        read[:1] = read[n - 2047:] = True
        got = torch.zeros(n, dtype=torch.bool, device=DEV)
        w = f.probe.work[h].tolist()
        got[f.probe.token_ids[h, :w[7]].long()] = True
        got[w[0]:w[2]] = got[w[1]:w[3]] = True
        bad += not torch.equal(got, read)
        for g in range(group):
            s = k[h].double() @ q[0, h * group + g].double() * d**-0.5
            a = torch.softmax(s.masked_fill(~read, float("-inf")), -1) @ v[h].double()
            err = max(err, rel(f.attend.out[0, h * group + g], a))
    report("saap step's lists", float(bad), 0.5)
    report("saap step's output", err)
    moved = 0
    for _ in range(3 if small else 200):
        f.attend.out.fill_(float("nan")), f.hidden.out.fill_(float("nan")), f.probe.token_ids.fill_(-1)
        f()
        moved += int((f.attend.out != first).any())
    report("saap step repeats itself", float(moved), 0.5)


def check(report, small):
    check_probe(report, small)
    check_project(report, small)
    check_turned(report, small)
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
    for n in (131072, 171008, 524288):
        try:
            put(f"saap {n} flashinfer us", time(flashinfer_decode(n, 1)))
        except ImportError:
            pass
        cache = t.Cache([n], 8, 128, torch.bfloat16, poison=False)
        q = torch.randn(1, 32, 128, device=DEV, dtype=torch.bfloat16)
        turn = torch.rand(1, 64, device=DEV)
        ids = torch.randint(0, 2048, (cache.blocks, 8, 64), device=DEV).to(torch.int16)
        for taken in (32, 100):
            f = Step(cache, q, (turn, turn), cache.table[0, -1:] * 64 + 63, ids, taken)
            put(f"saap {n}, {taken} clusters, step us", time(f))
            put(f"saap {n}, {taken} clusters, share of the tokens in them", f.probe.work[:, 7].double().mean().item() / n)
            for part in ("keys", "classify", "probe", "attend"):
                put(f"saap {n}, {taken} clusters, {part} us", time(getattr(f, part)))
        if n == 131072:
            for dtype in (torch.float32, torch.bfloat16):
                layer = lambda outputs, inputs: (torch.randn(8, outputs, inputs, device=DEV).to(dtype),
                                                 torch.randn(8, outputs, device=DEV))
                first = Project(torch.randn(1, 32, 128, device=DEV), *layer(512, 128))
                second = Project(first.out, *layer(2048, 512))
                put(f"saap perceptron 128 to 512 to 2048 {dtype} us", time(lambda: (first(), second())))
            keys = Keys(cache, cache.table[0, :1] * 64, torch.randn(8, 2048, 128, device=DEV), (turn, turn))
            put("saap a key's cluster by a product of torch's us", time(keys.apart))
        del f, cache, ids
        torch.cuda.empty_cache()
