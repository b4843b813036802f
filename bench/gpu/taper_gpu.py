"""Builds the kernels into one shared library and calls them on torch tensors.

The C structures of kernels/ are mirrored here field by field; sizes are checked by
the tests only through results, so keep the order the same on both sides.
"""
import ctypes as C
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPE = {torch.bfloat16: 0, torch.float16: 1}
P, I32, I64, U32, F32, F64 = (C.c_void_p, C.c_int32, C.c_int64, C.c_uint32, C.c_float,
                              C.c_double)


def build(out):
    """Compiles every kernels/*/*.cu for sm_90a and links them into `out`."""
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def one(src):
        obj = out.parent / (src.stem + ".o")
        subprocess.run(
            ["nvcc", "--options-file", str(ROOT / "kernels" / "nvcc.flags"), "-lineinfo", "-c", str(src),
             "-o", str(obj)], check=True)
        return str(obj)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objs = list(pool.map(one, sorted((ROOT / "kernels").glob("*/*.cu"))))
    subprocess.run(["nvcc", "-shared", "-gencode=arch=compute_90a,code=sm_90a", *objs, "-o", str(out)],
                   check=True)
    return out


def load():
    path = os.environ.get("TAPER_GPU_LIB")
    if not path:
        path = ROOT / "target" / "gpu" / "libtaper_gpu.so"
        newest = max(f.stat().st_mtime for f in (ROOT / "kernels").rglob("*.cu*"))
        if not path.exists() or path.stat().st_mtime < newest:
            build(path)
    return C.CDLL(str(path))


LIB = None


def lib():
    global LIB
    if LIB is None:
        LIB = load()
    return LIB


def call(name, params):
    stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = getattr(lib(), name)(C.byref(params), stream)
    if code != 0:
        raise RuntimeError(f"{name} returned CUDA status {code}")


def ptr(t):
    return None if t is None else t.data_ptr()


def struct(name, fields):
    return type(name, (C.Structure,), {"_fields_": fields})


DecodeParams = struct("DecodeParams", [
    ("q", P), ("k", P), ("v", P), ("block_table", P), ("row_table", P), ("lists", P),
    ("block_ids", P), ("token_ids", P), ("token_ln_weight", P), ("head_counts", P),
    ("head_ln_weight", P), ("units", P), ("list_units", P),
    ("part_o", P), ("part_lse", P), ("blocks", I64), ("rows", I32), ("q_heads", I32),
    ("kv_heads", I32), ("list_heads", I32), ("head_dim", I32), ("dtype", I32),
    ("table_stride", I32), ("unit_capacity", I32), ("scale", F32), ("gather", I32),
    ("token_shift", I32), ("fold", I32), ("team", I32)])
MergeParams = struct("MergeParams", [
    ("part_o", P), ("part_lse", P), ("list_units", P), ("out", P), ("lse", P),
    ("base_o", P), ("base_lse", P), ("rows", I32), ("q_heads", I32), ("list_heads", I32),
    ("head_dim", I32), ("dtype", I32), ("out_f32", I32), ("fold", I32), ("lists", P)])
PrefillParams = struct("PrefillParams", [
    ("q", P), ("k", P), ("v", P), ("block_table", P), ("q_rows", P), ("positions", P),
    ("tiles", P), ("csr_begin", P), ("csr_blocks", P), ("out", P), ("lse", P), ("anchor_out", P),
    ("blocks", I64), ("tile_count", I32), ("q_heads", I32), ("kv_heads", I32), ("head_dim", I32),
    ("dtype", I32), ("table_stride", I32), ("csr_heads", I32), ("sink", I32), ("window", I32),
    ("anchor_stride", I32), ("out_f32", I32), ("scale", F32)])
DeltaParams = struct("DeltaParams", [
    ("out", P), ("anchor_base", P), ("anchor_dense", P), ("position", I64), ("tail_begin", I64),
    ("anchor_first", I64), ("anchors", I64), ("tokens", I32), ("q_heads", I32), ("head_dim", I32),
    ("dtype", I32), ("gamma", I32), ("propagate", I32)])


ScoreParams = struct("ScoreParams", [
    ("q", P), ("view", P), ("lower", P), ("block_table", P), ("row_table", P), ("lens", P),
    ("lse", P), ("out", P), ("tile_max", P), ("tile_sum", P), ("rows", I32), ("q_heads", I32),
    ("kv_heads", I32), ("width", I32), ("dtype", I32), ("table_stride", I32), ("per_block", I32),
    ("max_entries", I32), ("stride", I32), ("tile_stride", I32), ("reduce", I32),
    ("scale", F32), ("pitch", I32), ("ids", P), ("counts", P), ("q_few", P), ("few", I32)])
SelectParams = struct("SelectParams", [
    ("scores", P), ("begins", P), ("ends", P), ("ks", P), ("ids", P), ("counts", P), ("work", P),
    ("lists", I32), ("stride", I32), ("capacity", I32), ("entries", I32), ("k", I32),
    ("target", I32), ("blocks_most", I32), ("noise", F32)])
SampleParams = struct("SampleParams", [
    ("work", P), ("block_ids", P), ("token_ids", P), ("seeds", P), ("positions", P), ("wants", P),
    ("states", P), ("ids", P), ("counts", P), ("layer", U32), ("rows", I32), ("list_heads", I32),
    ("capacity", I32), ("want", I32), ("max_len", I32), ("state", U32),
    ("token_shift", I32)])
SampledParams = struct("SampledParams", [("d", DecodeParams)] + [(n, P) for n in (
    "seeds positions out lse sync scores sums state residual counts first"
    ).split()] + [
    ("epsilon", F32), ("whole", F32), ("most", F32), ("upper", F32), ("rest", F32),
    ("split_vector", F32 * 6), ("split_scalar", F32 * 6),
    ("growth_share", F32), ("growth_most", F32), ("unseen", F32), ("pilot_share", F64),
    ("dense_share", F64), ("pilot_tokens", I32), ("rule", I32),
    ("capacity", I32), ("layer", I32), ("out_f32", I32),
    ("scouts", I32), ("ahead", I32)])


ValuesParams = struct("ValuesParams", [(n, P) for n in (
    "q k v block_table row_table lens seeds positions out lse sync weights part_lse parts ids"
    ).split()] + [
    ("blocks", I64), ("rows", I32), ("q_heads", I32), ("kv_heads", I32), ("head_dim", I32),
    ("dtype", I32), ("table_stride", I32), ("max_len", I32), ("samples", I32), ("rule", I32),
    ("layer", I32), ("scale", F32), ("in_order", I32)])


class Cache:
    """One layer's paged K and V: [blocks, kv_heads, 64, head_dim] and a block table."""

    def __init__(self, lens, kv_heads, head_dim, dtype, spare=1, poison=True, dev="cuda",
                 pinned=False):
        self.lens, self.kv_heads, self.head_dim, self.dtype = lens, kv_heads, head_dim, dtype
        per = [(n + 63) // 64 for n in lens]
        self.blocks = sum(per) + spare
        shape = (self.blocks, kv_heads, 64, head_dim)
        self.k = torch.randn(shape, device=dev, dtype=dtype)
        self.v = torch.randn(shape, device=dev, dtype=dtype)
        order = torch.randperm(self.blocks, device=dev)
        self.table = torch.zeros(len(lens), max(per), device=dev, dtype=torch.int32)
        at = 0
        for i, n in enumerate(per):
            self.table[i, :n] = order[at:at + n].to(torch.int32)
            at += n
            if poison and lens[i] % 64:
                last = order[at - 1]
                self.k[last, :, lens[i] % 64:] = float("nan")
                self.v[last, :, lens[i] % 64:] = float("nan")
        if poison:
            self.k[order[at:]] = float("nan")
            self.v[order[at:]] = float("nan")

        if pinned:  # The device reads it where it is.
            self.k, self.v = self.k.cpu().pin_memory(), self.v.cpu().pin_memory()

    def dense(self, i):
        """K and V of sequence i as [kv_heads, len, head_dim]."""
        n = self.lens[i]
        rows = self.table[i, :(n + 63) // 64].long().to(self.k.device)
        return tuple(x[rows].to(self.table.device).permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.head_dim)[:, :n]
                     for x in (self.k, self.v))


def work_list(begin=(0, 0), end=(0, 0), blocks=(0, 0), tokens=(0, 0), ln_block=0.0, ln_token=0.0,
              length=0, sample=(0, 0)):
    """One WorkList as 16 32-bit words."""
    import struct as S
    return S.unpack("<16i", S.pack("<10I2f4I", *begin, *end, *blocks, *tokens, *sample, ln_block,
                                   ln_token, length, 0, 0, 0))


class Decode:
    """Decode attention over `lists` (a list of rows * list_heads word tuples)."""

    def __init__(self, cache, q, lists, list_heads=None, block_ids=None, token_ids=None,
                 token_ln_weight=None, row_table=None, unit_capacity=None,
                 out_f32=False, head_counts=None, head_ln_weight=None, base_o=None,
                 base_lse=None, token_shift=0):
        rows, q_heads, d = q.shape
        dev = q.device
        list_heads = list_heads or cache.kv_heads
        group = q_heads // list_heads
        if not torch.is_tensor(lists):
            lists = torch.tensor(lists, dtype=torch.int32, device=dev)
        self.lists = lists
        cap = unit_capacity or len(lists) * 300
        self.units = torch.empty(cap, 20, dtype=torch.int32, device=dev)
        self.list_units = torch.empty(len(lists) + 1, dtype=torch.int32, device=dev)
        self.part_o = torch.full((cap, group, d), float("nan"), device=dev)
        self.part_lse = torch.full((cap, group), float("nan"), device=dev)
        self.out = torch.full(q.shape, float("nan"), device=dev,
                              dtype=torch.float32 if out_f32 else q.dtype)
        self.lse = torch.full((rows, q_heads), float("nan"), device=dev)
        self.keep = (cache, q, block_ids, token_ids, token_ln_weight, row_table, head_counts,
                     head_ln_weight, base_o, base_lse)
        self.p = DecodeParams(
            ptr(q), ptr(cache.k), ptr(cache.v), ptr(cache.table), ptr(row_table), ptr(self.lists),
            ptr(block_ids), ptr(token_ids), ptr(token_ln_weight), ptr(head_counts),
            ptr(head_ln_weight), ptr(self.units),
            ptr(self.list_units), ptr(self.part_o), ptr(self.part_lse), cache.blocks, rows, q_heads,
            cache.kv_heads, list_heads, d, DTYPE[q.dtype], cache.table.stride(0), cap, d**-0.5,
            int(token_ids is not None), token_shift)
        self.m = MergeParams(ptr(self.part_o), ptr(self.part_lse), ptr(self.list_units),
                             ptr(self.out), ptr(self.lse), ptr(base_o), ptr(base_lse), rows, q_heads,
                             list_heads, d, DTYPE[q.dtype], int(out_f32), 0)

    def plan(self):
        call("taper_decode_plan", self.p)

    def attend(self):
        call("taper_decode", self.p)

    def merge(self):
        call("taper_merge", self.m)

    def __call__(self):
        self.attend()
        self.merge()
        return self.out


def tiles_for(positions, table=0, kv_len=None, rows_per_tile=128):
    """Tile table of one sequence's rows (positions: CPU tensor), longest first."""
    n = positions.numel()
    out = []
    for i, b in enumerate(range(0, n, rows_per_tile)):
        pos = positions[b:b + rows_per_tile]
        out.append([b, pos.numel(), table, kv_len, int(pos.min()), int(pos.max()), i, 0])
    out.sort(key=lambda t: -t[5])
    return out


class Prefill:
    def __init__(self, cache, q, positions, tiles, q_rows=None, csr=None, csr_heads=0, sink=0,
                 window=0, lse=True, out=None, out_f32=False, anchor_stride=0, anchor_out=None):
        dev = q.device
        _, q_heads, d = q.shape
        rows = positions.numel()
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=dev)
        if out is None:
            shape = (rows, q_heads, d) if out_f32 else q.shape
            out = torch.full(shape, float("nan"), device=dev,
                             dtype=torch.float32 if out_f32 else q.dtype)
        self.out = out
        self.lse = torch.full((rows, q_heads), float("nan"), device=dev) if lse else None
        self.positions = positions.to(device=dev, dtype=torch.int32)
        self.keep = (cache, q, q_rows, csr, anchor_out)
        begin, blocks = csr or (None, None)
        self.p = PrefillParams(
            ptr(q), ptr(cache.k), ptr(cache.v), ptr(cache.table), ptr(q_rows), ptr(self.positions),
            ptr(self.tiles), ptr(begin), ptr(blocks), ptr(out), ptr(self.lse), ptr(anchor_out),
            cache.blocks, len(tiles), q_heads, cache.kv_heads, d, DTYPE[q.dtype],
            cache.table.stride(0), csr_heads, sink, window, anchor_stride, int(out_f32), d**-0.5)

    def __call__(self):
        call("taper_prefill", self.p)
        return self.out


class Delta:
    """Delta Attention over a sink and window base, a whole prompt of one sequence."""

    def __init__(self, cache, q, gamma=64, sink=4, window=2048, propagate=True):
        n, q_heads, d = q.shape
        dev = q.device
        self.tail = max(0, (n - max(128, gamma)) // gamma * gamma)
        anchors = self.tail // gamma
        rows = torch.cat([torch.arange(0, self.tail, gamma), torch.arange(self.tail, n)])
        self.base_rows = torch.full((n // gamma + 1, q_heads, d), float("nan"), device=dev)
        self.dense = Prefill(cache, q, rows, tiles_for(rows, 0, n), lse=False, out_f32=True,
                             q_rows=rows.to(device=dev, dtype=torch.int32))
        pos = torch.arange(n)
        self.base = Prefill(cache, q, pos, tiles_for(pos, 0, n), sink=sink, window=window,
                            lse=False, anchor_stride=gamma, anchor_out=self.base_rows)
        self.out = self.base.out
        self.p = DeltaParams(ptr(self.out), ptr(self.base_rows), ptr(self.dense.out), 0, self.tail,
                             0, anchors, n, q_heads, d, DTYPE[q.dtype], gamma, int(propagate))

    def __call__(self):
        self.dense()
        self.base()
        call("taper_delta", self.p)
        return self.out


PER_HEAD, GROUP_MAX, GROUP_MASS = 0, 1, 2


class Score:
    """Scores of query rows against a view [blocks, kv_heads, per_block, width]."""

    def __init__(self, cache, q, view, lower=None, reduce=PER_HEAD, lse=None, tiles=False,
                 scale=None):
        rows, q_heads, width = q.shape
        per_block = view.shape[2]
        dev = q.device
        most = (max(cache.lens) * per_block + 63) // 64
        heads = q_heads if reduce == PER_HEAD else cache.kv_heads
        self.lens = torch.tensor(cache.lens, dtype=torch.int32, device=dev)
        self.out = torch.full((rows, heads, most), float("nan"), device=dev)
        n_tiles = (most + 63) // 64
        nan = lambda: torch.full((rows, q_heads, n_tiles), float("nan"), device=dev)
        self.tile_max, self.tile_sum = (nan(), nan()) if tiles else (None, None)
        self.keep = (cache, q, view, lower, lse)
        self.p = ScoreParams(
            ptr(q), ptr(view), ptr(lower), ptr(cache.table), None, ptr(self.lens), ptr(lse),
            ptr(self.out), ptr(self.tile_max), ptr(self.tile_sum), rows, q_heads, cache.kv_heads,
            width, DTYPE[q.dtype], cache.table.stride(0), per_block, most, most, n_tiles, reduce,
            width**-0.5 if scale is None else scale, 0)

    def __call__(self):
        call("taper_score", self.p)
        return self.out


class Select:
    """The k best of each list of scores [lists, stride], as ascending ids."""

    def __init__(self, scores, k, begins=None, ends=None, ks=None, work=None, target=0,
                 capacity=None):
        lists, stride = scores.shape
        dev = scores.device
        capacity = capacity or k
        self.ids = torch.full((lists, capacity), -1, dtype=torch.int32, device=dev)
        self.counts = torch.full((lists,), -1, dtype=torch.int32, device=dev)
        self.keep = (scores, begins, ends, ks, work)
        self.p = SelectParams(ptr(scores), ptr(begins), ptr(ends), ptr(ks), ptr(self.ids),
                              ptr(self.counts), ptr(work), lists, stride, capacity, stride, k,
                              target, 0)

    def __call__(self):
        call("taper_select", self.p)
        return self.ids


class Sample:
    """The first `want` points of each list's permutation that the list leaves out."""

    def __init__(self, work, list_heads, seeds, positions, want, max_len, layer=0, block_ids=None,
                 token_ids=None, wants=None, states=None, state=0, ids=None):
        dev = work.device
        lists = work.shape[0]
        if ids is None:
            ids = torch.full((lists, want), -1, dtype=torch.int32, device=dev)
        self.ids = ids
        self.counts = torch.full((lists,), -1, dtype=torch.int32, device=dev)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=dev)
        self.positions = torch.tensor(positions, dtype=torch.int32, device=dev)
        self.keep = (work, block_ids, token_ids, wants, states)
        self.p = SampleParams(ptr(work), ptr(block_ids), ptr(token_ids), ptr(self.seeds),
                              ptr(self.positions), ptr(wants), ptr(states), ptr(self.ids),
                              ptr(self.counts), layer, lists // list_heads, list_heads, want, want,
                              max_len, state)

    def __call__(self):
        call("taper_sample", self.p)
        return self.ids


RULES = {"denominator": 0, "lemma": 1, "tight": 2, "ratio": 3, "chi2": 4, "listed": 5}


def quantiles(delta):
    """The normal quantiles that the rules need, as SampledParams orders them."""
    from statistics import NormalDist
    z = NormalDist().inv_cdf
    two = lambda d: z(1 - d / 2)
    vector = lambda d: max(two(d), 1.24)
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    return (two(delta), vector(0.9 * delta), z(1 - delta**1.05), z(1 - 0.1 * delta),
            (F32 * 6)(*[vector(delta * (1 - s)) for s in shares]),
            (F32 * 6)(*[two(delta * s) for s in shares]))


def unseen(delta):
    """What chi2 adds to a sample's variance, in units of its heaviest key's share to the power of 3/2."""
    from math import log
    return 0.5 * log(1 / delta)**3


# Of what a budget asks for, and times the sample, that a sample grows to.
GROWTH = (0.5, 8)


def grown(b, asked):
    return min(asked, max(2 * b, int(min(GROWTH[0] * asked, GROWTH[1] * b))))


def team_size(list_heads):
    return min(max(128 // list_heads, 1), 32)


class VAttention:
    """Exact attention over `fixed` lists plus a sample of the rest, sized on the device; rule
    "listed": over the lists alone."""

    def __init__(self, cache, q, fixed, seeds, epsilon, delta, rule="chi2", block_ids=None,
                 token_ids=None, pilot_tokens=64, pilot_share=0.01, dense_share=0.5, layer=0,
                 row_table=None, positions=None, list_heads=None, token_ln_weight=None,
                 token_shift=0, out_f32=False, scouts=1, growth=GROWTH):
        rows, q_heads, d = q.shape
        dev = q.device
        kv = list_heads or cache.kv_heads
        lists, group, team = rows * kv, q_heads // kv, team_size(kv)
        if not torch.is_tensor(fixed):
            fixed = torch.tensor(fixed, dtype=torch.int32, device=dev)
        self.capacity = 1 if rule == "listed" else int(dense_share * max(cache.lens)) + 64
        i32 = lambda *shape: torch.full(shape, -1, dtype=torch.int32, device=dev)
        f32 = lambda *shape: torch.full(shape, float("nan"), device=dev)
        self.fixed = fixed
        room = lists + scouts
        self.part_o, self.part_lse = f32(room, 3, team, group, d), f32(room, 3, team, group)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=dev)
        positions = [n - 1 for n in cache.lens] if positions is None else positions
        self.positions = torch.tensor(positions, dtype=torch.int32, device=dev)
        self.out = torch.full(q.shape, float("nan"), device=dev, dtype=torch.float32 if out_f32 else q.dtype)
        self.lse = f32(rows, q_heads)
        self.sync = torch.zeros(1 + room, 32, dtype=torch.int32, device=dev)
        self.scores = f32(room, 128, group)
        self.sums = f32(room, team, group, 4)
        self.state, self.residual, self.counts, self.first = i32(lists), i32(lists), i32(lists), i32(lists)
        self.keep = (cache, q, block_ids, token_ids, row_table, token_ln_weight)
        decode = DecodeParams(
            ptr(q), ptr(cache.k), ptr(cache.v), ptr(cache.table), ptr(row_table), ptr(fixed),
            ptr(block_ids), ptr(token_ids), ptr(token_ln_weight), None, None, None, None,
            ptr(self.part_o), ptr(self.part_lse), cache.blocks, rows, q_heads, cache.kv_heads, kv, d,
            DTYPE[q.dtype],
            cache.table.stride(0), 0, d**-0.5, 1, token_shift)
        self.p = SampledParams(
            decode, *[ptr(x) for x in (
                self.seeds, self.positions, self.out, self.lse, self.sync, self.scores,
                self.sums, self.state, self.residual, self.counts, self.first)],
            epsilon, *quantiles(delta), *growth, unseen(delta), pilot_share, dense_share, pilot_tokens, RULES[rule],
            self.capacity, layer, int(out_f32), scouts)

    def __call__(self):
        call("taper_sampled", self.p)
        return self.out

    def keys_read(self):
        """Keys and values read, over all KV heads."""
        exact = self.fixed[:, 12] - self.residual
        return torch.where(self.state == 1, exact + self.counts, self.fixed[:, 12]).sum().item()


TARGETS = {"systematic": 0, "stratified": 1, "independent": 2, "per tile": 3}


class Values:
    """Attention over all keys and `samples` values of each head (S2ANTA)."""

    def __init__(self, cache, q, seeds, samples=128, rule="systematic", layer=0, row_table=None,
                 positions=None, lens=None):
        rows, q_heads, d = q.shape
        dev, kv = q.device, cache.kv_heads
        lens = lens or cache.lens
        lists, group, team = rows * kv, q_heads // kv, team_size(kv)
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=dev)
        f32 = lambda *shape: torch.full(shape, float("nan"), device=dev)
        self.lens, self.positions = i32(lens), i32([n - 1 for n in lens] if positions is None else positions)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=dev)
        self.out = f32(*q.shape)
        self.lse = f32(rows, q_heads)
        self.sync = torch.zeros(1 + lists, 32, dtype=torch.int32, device=dev)
        padded = (max(lens) + 63) // 64 * 64
        self.weights = torch.full((lists, padded, group), float("nan"), device=dev, dtype=torch.float16)
        self.part_lse, self.parts = f32(lists, team, group), f32(lists, team, group, d)
        self.ids = None if rule == "per tile" else i32([-1]).repeat(rows * q_heads * samples).view(rows, q_heads, samples)
        self.keep = (cache, q, row_table)
        self.p = ValuesParams(
            *[ptr(x) for x in (q, cache.k, cache.v, cache.table, row_table, self.lens, self.seeds,
                               self.positions, self.out, self.lse, self.sync, self.weights,
                               self.part_lse, self.parts, self.ids)],
            cache.blocks, rows, q_heads, kv, d, DTYPE[q.dtype], cache.table.stride(0), max(lens),
            samples, TARGETS[rule], layer, d**-0.5, 0)

    def __call__(self):
        call("taper_values", self.p)
        return self.out
