"""Probability sums over sampled rows, lists of blocks from columns and slashes, prefill over
them with single columns and split along keys, and SampleAttention made of these.

check(report, small) compares with float64; bench(put, time) measures, where time(f) is the
median of a graph replay in microseconds.
"""
import math

import torch

import taper_gpu as t
from oracle import attend64, causal, rel
from selection import SCORE, SUM, GroupSelect
from taper_gpu import ColumnsParams, ReduceParams, Slice, StripesParams, call

DEV = "cuda"


class Reduce:
    """Sums of probabilities of `slices`, tuples (q_row, rows, position, table)."""

    def __init__(self, cache, q, slices):
        _, q_heads, d = q.shape
        n = len(slices)
        nb = max((s[2] + s[1] + 63) // 64 for s in slices)
        splits = (nb + 31) // 32
        nan = lambda *s: torch.full(s, float("nan"), device=DEV)
        self.columns, self.diagonals, self.lse = nan(n, q_heads, nb * 64), nan(n, q_heads, nb * 64), nan(n, q_heads, 64)
        slices = [t.words(Slice(q_row=row, rows=r, position=p, table=i)) for row, r, p, i in slices]
        self.p = ReduceParams(
            q=q, k=cache.k, **cache.where, slices=torch.tensor(slices, dtype=torch.int32, device=DEV),
            parts=nan(n, q_heads, splits, 64, 2), tile_diagonals=nan(n, q_heads, nb, 128), columns=self.columns,
            diagonals=self.diagonals, lse=self.lse, slice_count=n, q_heads=q_heads, head_dim=d, dtype=q.dtype, max_blocks=nb,
            splits=splits, scale=d**-0.5)

    def __call__(self):
        call("taper_reduce", self.p)


class SparsePrefill(t.Prefill):
    """Prefill with extra columns, or in parts."""

    def __init__(self, cache, q, positions, tiles, columns=(None, None, None), splits=0, **more):
        super().__init__(cache, q, positions, tiles, column_begin=columns[0], column_counts=columns[1], column_ids=columns[2],
                         splits=splits, **more)
        if splits:
            rows, (_, heads, d) = positions.numel(), q.shape
            nan = lambda *s: torch.full(s, float("nan"), device=DEV)
            part_o, part_lse = nan(rows, heads, splits, d), nan(rows, heads, splits)
            self.p.out, self.p.lse = part_o, part_lse
            units = torch.arange(rows * heads + 1, device=DEV, dtype=torch.int32) * splits
            self.out, self.lse = nan(rows, heads, d), nan(rows, heads)
            self.m = t.MergeParams(part_o=part_o, part_lse=part_lse, list_units=units, out=self.out, lse=self.lse, rows=rows,
                                   q_heads=heads, list_heads=heads, head_dim=d, dtype=q.dtype, out_f32=1)
        self.splits = splits

    def __call__(self):
        super().__call__()
        if self.splits:
            call("taper_merge", self.m)
        return self.out


def in_parts(tiles, splits):
    return [[*tile[:7], part] for tile in tiles for part in range(splits)]


class Stripes:
    """Blocks of each head and tile from the columns and slashes chosen per head, by `each` blocks at a time."""

    def __init__(self, columns, slashes, tiles, heads, blocks, each=1):
        words = (blocks + 31) // 32
        i32 = lambda x: torch.as_tensor(x, dtype=torch.int32).to(DEV)
        need = torch.zeros(len(tiles), dtype=torch.int64)
        need[torch.tensor([x[6] for x in tiles])] = torch.tensor([x[5] // 64 + 1 for x in tiles])
        begin = torch.cumsum(need.repeat(heads), 0)
        self.begin = i32(torch.cat([torch.zeros(1, dtype=torch.int64), begin]))
        self.blocks = torch.full((int(begin[-1]),), -1, dtype=torch.int32, device=DEV)
        self.counts = torch.full((heads, len(tiles)), -1, dtype=torch.int32, device=DEV)
        self.p = StripesParams(
            columns=columns.ids, column_counts=columns.counts, slashes=slashes.ids, slash_counts=slashes.counts,
            tiles=i32(tiles), list_begin=self.begin,
            bitmaps=torch.full((heads * 2 * words,), -1, dtype=torch.int32, device=DEV), blocks=self.blocks,
            counts=self.counts, heads=heads, tile_count=len(tiles), words=words,
            column_stride=columns.ids.shape[1], slash_stride=slashes.ids.shape[1], slash=t.TWO_BLOCKS, each=each)

    def __call__(self):
        call("taper_stripes", self.p)


class DropColumns:
    """Columns [heads, stride] of each head that a tile's blocks do not hold: ids at begin."""

    def __init__(self, columns, counts, tiles, list_begin, list_counts, blocks):
        heads, stride = columns.shape
        i32 = lambda x: torch.as_tensor(x, dtype=torch.int32).to(DEV)
        self.ids = torch.full((heads * len(tiles), stride), -1, dtype=torch.int32, device=DEV)
        self.counts = torch.full((heads, len(tiles)), -1, dtype=torch.int32, device=DEV)
        self.p = ColumnsParams(
            columns=columns, counts=counts, tiles=i32(tiles), list_begin=list_begin, list_counts=list_counts, blocks=blocks,
            column_begin=i32(torch.arange(heads * len(tiles)) * stride), column_ids=self.ids, column_counts=self.counts,
            heads=heads, list_heads=list_counts.shape[0], tile_count=len(tiles), column_stride=stride)

    def __call__(self):
        call("taper_drop_columns", self.p)


class SampleAttention:
    """The whole prompt of one sequence: sums, choice by block, lists, attention. `share`: a list a KV
    head, from the sum over its group."""

    def __init__(self, cache, q, alpha_c, alpha_s, share=False):
        n, q_heads, d = q.shape
        group = q_heads // cache.kv_heads if share else 1
        heads = q_heads // group
        first = n - min(64, n)
        self.sums = Reduce(cache, q, [(first, n - first, first, 0)])
        nb = (n + 63) // 64
        self.columns, self.diagonals = torch.empty(2, q_heads, nb, device=DEV)
        pick = lambda x, share: GroupSelect(x, nb, group, reduce=SUM, mass=SCORE, share=share)
        self.pick_columns = pick(self.columns, alpha_c)
        self.pick_slashes = pick(self.diagonals, alpha_s)
        pos = torch.arange(n)
        tiles = t.tiles_for(pos, 0, n)
        self.lists = Stripes(self.pick_columns, self.pick_slashes, tiles, heads, nb)
        self.attend = SparsePrefill(cache, q, pos, tiles, csr=(self.lists.begin, self.lists.blocks),
                                    csr_heads=heads, csr_counts=self.lists.counts, lse=False)

    def add_up(self):
        for blocks, keys in ((self.columns, self.sums.columns), (self.diagonals, self.sums.diagonals)):
            torch.sum(keys.view(*blocks.shape, 64), -1, out=blocks)

    def select(self):
        self.sums()
        self.add_up()
        self.pick_columns()
        self.pick_slashes()
        self.lists()

    def __call__(self):
        self.select()
        return self.attend()


def probabilities(q, k, position):
    """[heads, rows, keys] in float64 of rows at `position`.. against keys [kv, n, d]."""
    rows, qh, d = q.shape
    kk = k.double().repeat_interleave(qh // k.shape[0], 0)
    s = torch.einsum("rhd,hnd->hrn", q.double(), kk) * d**-0.5
    pos = torch.arange(position, position + rows, device=DEV)[:, None]
    return torch.softmax(s.masked_fill(torch.arange(k.shape[1], device=DEV) > pos, -math.inf), -1)


def check_reduce(report, small):
    for dtype, d, kv, group in ((torch.bfloat16, 128, 2, 4), (torch.float16, 64, 1, 3),
                                (torch.bfloat16, 64, 1, 16), (torch.float16, 128, 2, 1)):
        lens = [130, 300] if small else [130, 5000, 9001]
        cache = t.Cache(lens, kv, d, dtype)
        slices, rows = [], 0
        for i, n in enumerate(lens):
            for r, end in ((64, n), (17, n - 3), (64, 64), (1, n // 2)):
                slices.append((rows, r, end - r, i))
                rows += r
        q = torch.randn(rows, kv * group, d, device=DEV, dtype=dtype) * 2
        f = Reduce(cache, q, slices)
        f()
        err = [0.0] * 2
        for s, (at, r, pos, i) in enumerate(slices):
            k, _ = cache.dense(i)
            k = k[:, :pos + r]
            p = probabilities(q[at:at + r], k, pos)
            nb = (pos + r + 63) // 64
            col = torch.zeros(kv * group, nb * 64, dtype=torch.float64, device=DEV)
            col[:, :pos + r] = p.sum(1)
            diag = torch.zeros_like(col)
            off = (torch.arange(pos, pos + r, device=DEV)[:, None] -
                   torch.arange(pos + r, device=DEV))
            seen = off >= 0
            diag.index_add_(1, off[seen], p[:, seen])
            err[0] = max(err[0], rel(f.columns[s, :, :nb * 64], col))
            err[1] = max(err[1], rel(f.diagonals[s, :, :nb * 64], diag))
        report(f"reduce {dtype} d{d} group {group} columns", err[0])
        report(f"reduce {dtype} d{d} group {group} diagonals", err[1])


def stripes_wanted(columns, slashes, tile, each):
    first, last = tile[4] // 64, tile[5] // 64
    want = set()
    for qb in range(first, last + 1):
        own = qb // each
        large = {c for c in columns if c <= own} | {0, own}
        for b in slashes:
            large |= {x for x in (own - b, own - b - 1) if x >= 0}
        want |= {x for c in large for x in range(c * each, (c + 1) * each) if x <= qb}
    return sorted(want)


def check_stripes(report, small):
    class Chosen:
        pass
    few = ((500, 2, 1, 0), (5000, 6, 1, 0), (500, 2, 2, 37), (5000, 6, 3, 1037), (5000, 2, 33, 70))
    for n, heads, each, start in few if small else few + (
            (20001, 12, 1, 0), (70000, 2, 1, 0), (70000, 2, 2, 10001), (300000, 2, 64, 250001)):
        nb = (n + 64 * each - 1) // (64 * each)
        tiles = t.tiles_for(torch.arange(start, n), 0, n)
        made, sets = [], []
        for density in (0.02, 0.05):
            c = Chosen()
            c.ids = torch.full((heads, nb), -1, dtype=torch.int32, device=DEV)
            c.counts = torch.zeros(heads, dtype=torch.int32, device=DEV)
            kept = []
            for i in range(heads):
                x = (torch.rand(nb) < density * (i % 3)).nonzero().flatten()
                c.ids[i, :len(x)] = x.to(DEV)
                c.counts[i] = len(x)
                kept.append(x.tolist())
            made.append(c)
            sets.append(kept)
        f = Stripes(*made, tiles, heads, nb, each=each)
        f()
        begin, counts, blocks = f.begin.cpu(), f.counts.cpu(), f.blocks.cpu()
        bad = 0
        for h in range(heads):
            for tile in tiles:
                b, m = int(begin[h * len(tiles) + tile[6]]), int(counts[h, tile[6]])
                bad += blocks[b:b + m].tolist() != stripes_wanted(sets[0][h], sets[1][h], tile, each)
        report(f"stripes {n} tokens {heads} heads by {each} from {start}", float(bad), 0.5)


def check_columns(report, small):
    """Blocks and single tokens together, every head and tile its own."""
    for dtype, d, kv, group, per_head in ((torch.bfloat16, 128, 2, 4, True),
                                          (torch.float16, 64, 1, 3, False)):
        n = 333 if small else 3000
        cache = t.Cache([n], kv, d, dtype)
        q = torch.randn(n, kv * group, d, device=DEV, dtype=dtype)
        pos = torch.arange(n)
        tiles = t.tiles_for(pos, 0, n)
        heads = kv * group if per_head else kv
        begin, blocks, cb, cc, ci = [0], [], [], [], []
        seen = torch.zeros(heads, n, n, dtype=torch.bool)
        for h in range(heads):
            for tile in sorted(tiles, key=lambda x: x[6]):
                top = tile[5] // 64
                pick = sorted({0, top, max(top - 1, 0)} |
                              set(torch.randint(0, top + 1, (3,)).tolist()))
                if tile[6] == 1 and h == 0:
                    pick = []  # Columns alone.
                free = torch.ones(tile[5] + 1, dtype=torch.bool)
                rows = slice(tile[0], tile[0] + tile[1])
                for b in pick:
                    free[b * 64:b * 64 + 64] = False
                    seen[h, rows, b * 64:b * 64 + 64] = True
                ids = free.nonzero().flatten()
                if pick:
                    ids = ids[torch.randperm(len(ids))[:len(ids) * (h % 3) // 4]].sort().values
                for i in ids.tolist():
                    seen[h, rows, i] = True
                blocks += pick
                begin.append(len(blocks))
                cb.append(len(ci))
                cc.append(len(ids))
                ci += ids.tolist()
        i32 = lambda x: torch.tensor(x or [0], dtype=torch.int32, device=DEV)
        f = SparsePrefill(cache, q, pos, tiles, csr=(i32(begin), i32(blocks)), csr_heads=heads,
                          columns=(i32(cb), i32(cc), i32(ci)), column_heads=heads)
        f()
        seen = seen.to(DEV).repeat_interleave(kv * group // heads, 0) & causal(pos, n)
        want, lse = attend64(q, *cache.dense(0), seen)
        err_lse = (f.lse.double() - lse).nan_to_num(0.0).abs().max().item()
        report(f"prefill columns {dtype} d{d} group {group}", max(rel(f.out, want), err_lse))


def check_splits(report, small):
    for dtype, d, kv, group in ((torch.bfloat16, 128, 2, 4), (torch.float16, 64, 1, 3)):
        n = 333 if small else 9001
        cache = t.Cache([n], kv, d, dtype)
        for rows, window in ((1, 0), (70, 0), (130, 0), (130, 200)):
            pos = torch.arange(n - rows, n)
            q = torch.randn(rows, kv * group, d, device=DEV, dtype=dtype)
            for splits in (1, 3, 8):
                tiles = in_parts(t.tiles_for(pos, 0, n), splits)
                f = SparsePrefill(cache, q, pos, tiles, splits=splits, window=window,
                                  sink=70 if window else 0)
                f()
                want, lse = attend64(q, *cache.dense(0), causal(pos, n, 70, window))
                err_lse = (f.lse.double() - lse).abs().max().item()
                report(f"prefill {rows} rows in {splits} parts, window {window} {dtype} d{d}",
                       max(rel(f.out, want), err_lse))


def check_whole(report, small):
    """alpha 1 is dense; less keeps the promise of each pattern's mean mass."""
    n = 500 if small else 6000
    cache = t.Cache([n], 2, 128, torch.bfloat16)
    q = torch.randn(n, 8, 128, device=DEV, dtype=torch.bfloat16)
    pos = torch.arange(n)
    dense = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n))
    dense()
    for share in (False, True):
        f = SampleAttention(cache, q, 1.0, 1.0, share)
        f()
        report(f"sample attention, alpha 1, share {share}", rel(f.attend.out, dense.out))
    f = SampleAttention(cache, q, 0.9, 0.0)
    f()
    col = f.columns
    kept = min((col[h, f.pick_columns.ids[h, :int(f.pick_columns.counts[h])].long()].sum() /
                col[h].sum()).item() for h in range(8))
    report(f"sample attention keeps {kept:.4f} of 0.9", 0.0 if kept > 0.9 - 1e-4 else 1.0)


def check_drop(report, small):
    for n, heads, list_heads in ((1000, 4, 2), (5000 if small else 100000, 6, 6)):
        tiles = t.tiles_for(torch.arange(n), 0, n)
        nb, stride = (n + 63) // 64, 200
        i32 = lambda x: torch.as_tensor(x, dtype=torch.int32).to(DEV)
        counts = torch.randint(0, stride + 1, (heads,))
        columns = torch.stack([torch.randperm(n)[:stride].sort().values for _ in range(heads)])
        begin, blocks, held = [], [], torch.zeros(list_heads, len(tiles), dtype=torch.int64)
        for h in range(list_heads):
            for tile in range(len(tiles)):
                begin.append(len(blocks))
                b = torch.randperm(nb)[:int(torch.randint(0, nb // 2, ()))].sort().values.tolist()
                held[h, tile] = len(b)
                blocks += b
        f = DropColumns(i32(columns), i32(counts), tiles, i32(begin), i32(held), i32(blocks))
        f()
        bad = 0
        for h in range(heads):
            for tile in tiles:
                at = (h * list_heads // heads) * len(tiles) + tile[6]
                own = set(blocks[begin[at]:begin[at] + held.flatten()[at]])
                want = [c for c in columns[h, :counts[h]].tolist() if c <= tile[5] and c // 64 not in own]
                m = f.counts[h, tile[6]].item()
                row = f.ids[h * len(tiles) + tile[6]].tolist()
                bad += row[:m] != want or any(x != -1 for x in row[m:])
        report(f"columns beside blocks {n} {heads}/{list_heads}", float(bad), 0.5)


def check(report, small):
    check_drop(report, small)
    check_reduce(report, small)
    check_stripes(report, small)
    check_columns(report, small)
    check_splits(report, small)
    check_whole(report, small)


def bench(put, time):
    hq, hk, d, dt = 32, 8, 128, torch.bfloat16
    for n in (32768, 131072):
        cache = t.Cache([n], hk, d, dt, poison=False)
        q = torch.randn(n, hq, d, device=DEV, dtype=dt)
        # Rows that attend to some columns and to a band near the diagonal.
        far = torch.randn(hk, d, device=DEV)
        cache.k[::37, :, 5] += 3 * far.to(dt)
        q += far.repeat_interleave(hq // hk, 0).to(dt)
        pos = torch.arange(n)
        dense = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), lse=False)
        plain = t.Prefill(cache, torch.randn_like(q), pos, t.tiles_for(pos, 0, n), lse=False)
        put(f"prefill {n} without far keys ms", time(plain, 3) / 1e3)
        first = int(cache.table[0, 0])
        kept = cache.k[first, :, 0].clone()
        cache.k[first, :, 0] = 3 * far.to(dt)
        put(f"prefill {n} with a sink ms", time(dense, 3) / 1e3)
        cache.k[first, :, 0] = kept
        del plain
        ms = time(dense, 3) / 1e3
        put(f"sample attention {n} dense ms", ms)
        for alphas in ((0.95, 0.85), (0.5, 0.5)):
            f = SampleAttention(cache, q, *alphas)
            key = f"sample attention {n} {alphas[0]} {alphas[1]}"
            whole, select = time(f, 3) / 1e3, time(f.select) / 1e3
            live = (f.lists.begin[1:] - f.lists.begin[:-1]).sum().item()
            put(f"{key} density", f.lists.counts.sum().item() / live)
            put(f"{key} select ms", select)
            put(f"{key} whole ms", whole)
            put(f"{key} attend ms", time(f.attend, 3) / 1e3)
            put(f"{key} select share of dense", select / ms)
            for name in ("sums", "add_up", "pick_columns", "lists"):
                put(f"{key} {name} us", time(getattr(f, name)))
        # Few rows over a long context.
        for rows in (1, 16, 128, 512):
            few = torch.arange(n - rows, n)
            tiles = t.tiles_for(few, 0, n)
            put(f"prefill {rows} rows of {n} whole us",
                time(t.Prefill(cache, q[:rows].contiguous(), few, tiles)))
            splits = max(1, min(64, 264 // (len(tiles) * hq) * 2, n // 2048))
            put(f"prefill {rows} rows of {n} in {splits} parts us",
                time(SparsePrefill(cache, q[:rows].contiguous(), few, in_parts(tiles, splits),
                                   splits=splits)))
        # Extra columns: 1,000 a tile and head beside 16 blocks.
        tiles = t.tiles_for(pos, 0, n)
        m = len(tiles)
        i32 = lambda x: x.to(device=DEV, dtype=torch.int32)
        blocks = torch.stack([torch.arange(max(0, 2 * i - 14), 2 * i + 2)[-16:] if i > 7 else
                              torch.cat([torch.arange(2 * i + 2),
                                         torch.zeros(14 - 2 * i, dtype=torch.int64)])
                              for i in range(m)])
        counts = i32(torch.tensor([min(16, 2 * i + 2) for i in range(m)]))
        begin = i32(torch.arange(m + 1) * 16)
        few = SparsePrefill(cache, q, pos, tiles, csr=(begin, i32(blocks.flatten())), csr_heads=1,
                            csr_counts=counts, lse=False)
        put(f"prefill {n} 16 blocks ms", time(few, 3) / 1e3)
        room = torch.tensor([0 if i < 24 else 1000 for i in range(m)])
        ids = torch.stack([torch.randperm((2 * i - 14) * 64)[:1000].sort().values if i >= 24 else
                           torch.zeros(1000, dtype=torch.int64) for i in range(m)])
        both = SparsePrefill(cache, q, pos, tiles, csr=(begin, i32(blocks.flatten())), csr_heads=1,
                             csr_counts=counts, lse=False, column_heads=1,
                             columns=(i32(torch.arange(m) * 1000), i32(room), i32(ids.flatten())))
        put(f"prefill {n} 16 blocks and 1000 columns ms", time(both, 3) / 1e3)
        del cache, q, dense, f, few, both
        torch.cuda.empty_cache()


def bench_columns(put, time):
    """The last 8,192 rows of a prompt over 2,048 tokens a tile and KV head, beside its last 16 blocks."""
    hq, hk, d, dt, rows, chosen = 32, 8, 128, torch.bfloat16, 8192, 2048
    for n in (32768, 131072):
        cache = t.Cache([n], hk, d, dt, poison=False)
        q = torch.randn(rows, hq, d, device=DEV, dtype=dt)
        pos = torch.arange(n - rows, n)
        tiles = t.tiles_for(pos, 0, n)
        lists, far = hk * len(tiles), (n - rows) // 64 - 16
        i32 = lambda x: x.to(device=DEV, dtype=torch.int32).contiguous()
        ends = torch.tensor([tile[5] // 64 + 1 for tile in sorted(tiles, key=lambda x: x[6])]).repeat(hk)
        last = ends[:, None] - 16 + torch.arange(16)
        begin = lambda each: i32(torch.arange(lists + 1) * each)
        pick = lambda among, count: torch.stack([torch.randperm(among)[:count] for _ in range(lists)]).sort().values
        whole = torch.cat([pick(far, chosen // 64), last], 1)
        f = SparsePrefill(cache, q, pos, tiles, csr=(begin(whole.shape[1]), i32(whole)), csr_heads=hk, lse=False)
        put(f"prefill {rows} rows of {n}, 2,048 tokens in blocks us", time(f))
        for run in (64, 8, 1):
            ids = (pick(far * 64 // run, chosen // run)[..., None] * run + torch.arange(run)).flatten(1)
            columns = (begin(chosen), torch.full((lists,), chosen, device=DEV, dtype=torch.int32), i32(ids))
            f = SparsePrefill(cache, q, pos, tiles, csr=(begin(16), i32(last)), csr_heads=hk, columns=columns,
                              column_heads=hk, lse=False)
            put(f"prefill {rows} rows of {n}, 2,048 tokens in runs of {run} us", time(f))
