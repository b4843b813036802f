"""SAAP: the cluster of a key, the classifier, the choice of clusters.

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


def check(report, small):
    check_probe(report, small)
    check_project(report, small)
    check_keys(report, small)


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
    bench_probe(put, time)
    for dtype in (torch.float32, torch.bfloat16):
        layer = lambda outputs, inputs: (torch.randn(8, outputs, inputs, device=DEV).to(dtype),
                                         torch.randn(8, outputs, device=DEV))
        first = Project(torch.randn(1, 32, 128, device=DEV), *layer(512, 128))
        second = Project(first.out, *layer(2048, 512))
        put(f"saap perceptron 128 to 512 to 2048 {dtype} us", time(lambda: (first(), second())))
    cache, turn = t.Cache([64], 8, 128, torch.bfloat16), torch.rand(1, 64, device=DEV)
    keys = Keys(cache, cache.table[0, :1] * 64, torch.randn(8, 2048, 128, device=DEV), (turn, turn))
    put("saap a key's cluster us", time(keys))
    put("saap a key's cluster by a product of torch's us", time(keys.apart))
