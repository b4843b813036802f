"""Calls the kernels on torch tensors: the structures, constants and functions of kernels/taper_gpu.h, under their names there
without Taper and TAPER_, and what most calls are made of."""
import copy
import ctypes as C
import os
import pathlib
import subprocess

import torch

import header

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Params(C.Structure):
    """A structure of the header, by its fields' names and no others. Of a tensor it gets the address, of a dtype the number;
    what it is given lives as long as it does."""

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        self.__dict__[name] = value  # The field of that name goes before it.
        if torch.is_tensor(value):
            value = value.data_ptr()
        elif isinstance(value, torch.dtype):
            value = DTYPE[value]
        getattr(type(self), name).__set__(self, value)


STRUCTURES, CONSTANTS, FUNCTIONS = header.read(header.PATH.read_text(), Params)
globals().update({name.removeprefix("Taper").removeprefix("TAPER_"): x for name, x in (STRUCTURES | CONSTANTS).items()})
DTYPE = {torch.bfloat16: BF16, torch.float16: F16}
DEV = "cuda"
LIB = None


def load(path):
    library = C.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def lib():
    """The library of TAPER_GPU_LIB, else what scripts/kernels.sh makes."""
    global LIB
    if LIB is None:
        path = os.environ.get("TAPER_GPU_LIB")
        if not path:
            out = ROOT / "target" / "kernels"
            subprocess.run([ROOT / "scripts" / "kernels.sh", out], check=True)
            path = out / "libtaper_gpu.so"
        LIB = load(path)
    return LIB


def call(name, params):
    code = getattr(lib(), name)(params, torch.cuda.current_stream().cuda_stream)
    if code != 0:
        raise RuntimeError(f"{name} returned CUDA status {code}")


def words(of):
    """A structure as 32-bit words."""
    return list((C.c_int32 * (C.sizeof(of) // 4)).from_buffer(of))


class Cache:
    """One layer's paged K and V: [blocks, kv_heads, 64, head_dim] and a block table."""

    def __init__(self, lens, kv_heads, head_dim, dtype, poison=True, pinned=False):
        self.lens, self.kv_heads, self.head_dim, self.dtype = lens, kv_heads, head_dim, dtype
        per = [(n + 63) // 64 for n in lens]
        self.blocks = sum(per) + 1
        shape = (self.blocks, kv_heads, 64, head_dim)
        self.k = torch.randn(shape, device=DEV, dtype=dtype)
        self.v = torch.randn(shape, device=DEV, dtype=dtype)
        order = torch.randperm(self.blocks, device=DEV)
        self.table = torch.zeros(len(lens), max(per), device=DEV, dtype=torch.int32)
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

    @property
    def where(self):
        """What structures say of where its tokens lie."""
        return {"block_table": self.table, "table_stride": self.table.stride(0), "kv_heads": self.kv_heads}

    def rows(self, *of):
        """The same cache, for rows of those of its sequences."""
        cache = copy.copy(self)
        cache.lens, cache.table = [self.lens[i] for i in of], self.table[list(of)]
        return cache

    def dense(self, i):
        """K and V of sequence i as [kv_heads, len, head_dim]."""
        n = self.lens[i]
        rows = self.table[i, :(n + 63) // 64].long().to(self.k.device)
        return tuple(x[rows].to(self.table.device).permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.head_dim)[:, :n]
                     for x in (self.k, self.v))


def work_list(begin=(0, 0), end=(0, 0), blocks=(0, 0), tokens=(0, 0), ln_block=0.0, ln_token=0.0, length=0):
    """The words of a WorkList without a sample; blocks and tokens: the first, and how many."""
    return words(WorkList(
        begin=begin, end=end, block_first=blocks[0], block_count=blocks[1], token_first=tokens[0], token_count=tokens[1],
        block_ln_weight=ln_block, token_ln_weight=ln_token, len=length))


class Decode:
    """Decode attention over `lists` (words, or a tensor of them); `more`: further fields of DecodeParams."""

    def __init__(self, cache, q, lists, list_heads=None, **more):
        rows, q_heads, d = q.shape
        dev = q.device
        list_heads = list_heads or cache.kv_heads
        group = q_heads // list_heads
        if not torch.is_tensor(lists):
            lists = torch.tensor(lists, dtype=torch.int32, device=dev)
        cap = len(lists) * 300
        units = torch.empty(cap, C.sizeof(Unit) // 4, dtype=torch.int32, device=dev)
        list_units = torch.empty(len(lists) + 1, dtype=torch.int32, device=dev)
        part_o = torch.full((cap, group, d), float("nan"), device=dev)
        part_lse = torch.full((cap, group), float("nan"), device=dev)
        self.out = torch.full(q.shape, float("nan"), device=dev, dtype=q.dtype)
        self.lse = torch.full((rows, q_heads), float("nan"), device=dev)
        both = dict(part_o=part_o, part_lse=part_lse, list_units=list_units, rows=rows, q_heads=q_heads, list_heads=list_heads,
                    head_dim=d, dtype=q.dtype)
        self.p = DecodeParams(
            q=q, k=cache.k, v=cache.v, **cache.where, lists=lists, units=units, blocks=cache.blocks, unit_capacity=cap,
            scale=d**-0.5, gather=more.get("token_ids") is not None, **both, **more)
        self.m = MergeParams(out=self.out, lse=self.lse, **both)

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


def tiles_for(positions, table, kv_len):
    """Tile table of one sequence's rows (positions: CPU tensor), longest first."""
    n = positions.numel()
    out = []
    for i, b in enumerate(range(0, n, 128)):
        pos = positions[b:b + 128]
        out.append(words(PrefillTile(row_begin=b, rows=pos.numel(), table=table, kv_len=kv_len, pos_min=int(pos.min()),
                                     pos_max=int(pos.max()), id=i)))
    out.sort(key=lambda t: -t[5])
    return out


class Prefill:
    """`more`: further fields of PrefillParams."""

    def __init__(self, cache, q, positions, tiles, csr=(None, None), lse=True, out=None, **more):
        dev = q.device
        rows, q_heads, d = q.shape
        self.out = torch.full((rows, q_heads, d), float("nan"), device=dev) if out is None else out
        self.lse = torch.full((rows, q_heads), float("nan"), device=dev) if lse else None
        self.p = PrefillParams(
            q=q, k=cache.k, v=cache.v, **cache.where, positions=positions.to(device=dev, dtype=torch.int32),
            tiles=torch.tensor(tiles, dtype=torch.int32, device=dev), csr_begin=csr[0], csr_blocks=csr[1], out=self.out,
            lse=self.lse, blocks=cache.blocks, tile_count=len(tiles), q_heads=q_heads, head_dim=d, dtype=q.dtype,
            scale=d**-0.5, **more)

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
        self.q, self.rows = q, rows.to(dev)
        self.q_dense = torch.empty(len(rows), q_heads, d, device=dev, dtype=q.dtype)
        self.base_rows = torch.full((anchors, q_heads, d), float("nan"), device=dev)
        self.dense = Prefill(cache, self.q_dense, rows, tiles_for(rows, 0, n), lse=False)
        pos = torch.arange(n)
        self.base = Prefill(cache, q, pos, tiles_for(pos, 0, n), sink=sink, window=window, lse=False)
        self.out = self.base.out
        self.p = DeltaParams(
            out=self.out, anchor_base=self.base_rows, anchor_dense=self.dense.out, tail_begin=self.tail, anchors=anchors,
            tokens=n, q_heads=q_heads, head_dim=d, gamma=gamma, propagate=propagate)

    def __call__(self):
        torch.index_select(self.q, 0, self.rows, out=self.q_dense)
        self.dense()
        self.base()
        torch.index_select(self.out, 0, self.rows[:len(self.base_rows)], out=self.base_rows)
        call("taper_delta", self.p)
        return self.out


class Score:
    """Scores of query rows against a view [blocks, kv_heads, per_block, width]."""

    def __init__(self, cache, q, view, lower=None, tiles=False, scale=None):
        rows, q_heads, width = q.shape
        per_block = view.shape[2]
        dev = q.device
        most = (max(cache.lens) * per_block + 63) // 64
        self.out = torch.full((rows, q_heads, most), float("nan"), device=dev)
        n_tiles = (most + 63) // 64
        nan = lambda: torch.full((rows, q_heads, n_tiles), float("nan"), device=dev)
        self.tile_max, self.tile_sum = (nan(), nan()) if tiles else (None, None)
        self.lens = torch.tensor(cache.lens, dtype=torch.int32, device=dev)
        self.p = ScoreParams(
            q=q, view=view, lower=lower, **cache.where, lens=self.lens, out=self.out, tile_max=self.tile_max,
            tile_sum=self.tile_sum, rows=rows, q_heads=q_heads, width=width, dtype=q.dtype, per_block=per_block,
            max_entries=most, stride=most, tile_stride=n_tiles, scale=width**-0.5 if scale is None else scale)

    def __call__(self):
        call("taper_score", self.p)
        return self.out


class Select:
    """The k best of each list of scores [lists, stride], as ascending ids; `more`: further fields of SelectParams."""

    def __init__(self, scores, k, begins=None, ends=None, **more):
        lists, stride = scores.shape
        self.ids = torch.full((lists, k), -1, dtype=torch.int32, device=scores.device)
        self.counts = torch.full((lists,), -1, dtype=torch.int32, device=scores.device)
        self.p = SelectParams(scores=scores, begins=begins, ends=ends, ids=self.ids, counts=self.counts, lists=lists,
                              stride=stride, capacity=k, entries=stride, k=k, **more)

    def __call__(self):
        call("taper_select", self.p)
        return self.ids


class Sample:
    """The first `want` points of each list's permutation that the list leaves out."""

    def __init__(self, work, list_heads, seeds, positions, want, max_len, layer, block_ids, token_ids):
        dev, lists = work.device, work.shape[0]
        self.ids = torch.full((lists, want), -1, dtype=torch.int32, device=dev)
        self.counts = torch.full((lists,), -1, dtype=torch.int32, device=dev)
        self.p = SampleParams(
            work=work, block_ids=block_ids, token_ids=token_ids, seeds=torch.tensor(seeds, dtype=torch.int64, device=dev),
            positions=torch.tensor(positions, dtype=torch.int32, device=dev), ids=self.ids, counts=self.counts, layer=layer,
            rows=lists // list_heads, list_heads=list_heads, capacity=want, want=want, max_len=max_len)

    def __call__(self):
        call("taper_sample", self.p)
        return self.ids


RULES = {"denominator": DENOMINATOR, "lemma": LEMMA, "tight": TIGHT, "ratio": RATIO, "chi2": CHI2}


def quantiles(delta):
    """The normal quantiles that the rules need, by their names in SampledParams."""
    from statistics import NormalDist
    z = NormalDist().inv_cdf
    two = lambda d: z(1 - d / 2)
    vector = lambda d: max(two(d), 1.24)
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    return {"whole": two(delta), "most": vector(0.9 * delta), "upper": z(1 - delta**1.05), "rest": z(1 - 0.1 * delta),
            "split_vector": tuple(vector(delta * (1 - s)) for s in shares),
            "split_scalar": tuple(two(delta * s) for s in shares)}


def unseen(delta):
    """What chi2 adds to a sample's variance, in units of its heaviest key's share to the power of 3/2."""
    from math import log
    return 0.5 * log(1 / delta)**3


# Of what a budget asks for, and times the sample, that a sample grows to.
GROWTH = (0.5, 8)


def grown(b, asked):
    return min(asked, max(2 * b, int(min(GROWTH[0] * asked, GROWTH[1] * b))))


def team_size(list_heads):
    """taper_team of the header, which is for C alone."""
    return min(max(128 // list_heads, 1), 32)


class VAttention:
    """Exact attention over `fixed` lists plus a sample of the rest, sized on the device. `more`: further fields of
    DecodeParams."""

    def __init__(self, cache, q, fixed, seeds, epsilon, delta, rule="chi2", pilot_tokens=64, pilot_share=0.01, layer=0,
                 positions=None, list_heads=None, out_f32=False, scouts=1, **more):
        rows, q_heads, d = q.shape
        dev = q.device
        kv = list_heads or cache.kv_heads
        lists, group, team = rows * kv, q_heads // kv, team_size(kv)
        if not torch.is_tensor(fixed):
            fixed = torch.tensor(fixed, dtype=torch.int32, device=dev)
        dense_share = 0.5
        capacity = int(dense_share * max(cache.lens)) + 64
        i32 = lambda *shape: torch.full(shape, -1, dtype=torch.int32, device=dev)
        f32 = lambda *shape: torch.full(shape, float("nan"), device=dev)
        self.fixed = fixed
        room = lists + scouts
        positions = [n - 1 for n in cache.lens] if positions is None else positions
        self.out = torch.full(q.shape, float("nan"), device=dev, dtype=torch.float32 if out_f32 else q.dtype)
        self.lse = f32(rows, q_heads)
        self.state, self.residual, self.counts = i32(lists), i32(lists), i32(lists)
        decode = DecodeParams(
            q=q, k=cache.k, v=cache.v, **cache.where, lists=fixed, part_o=f32(room, 3, team, group, d),
            part_lse=f32(room, 3, team, group), blocks=cache.blocks, rows=rows, q_heads=q_heads, list_heads=kv, head_dim=d,
            dtype=q.dtype, scale=d**-0.5, gather=1, **more)
        self.p = SampledParams(
            d=decode, seeds=torch.tensor(seeds, dtype=torch.int64, device=dev),
            positions=torch.tensor(positions, dtype=torch.int32, device=dev), out=self.out, lse=self.lse,
            sync=torch.zeros(1 + room, 32, dtype=torch.int32, device=dev), scores=f32(room, 128, group),
            sums=f32(room, team, group, 4), state=self.state, residual=self.residual, counts=self.counts, first=i32(lists),
            epsilon=epsilon, **quantiles(delta), growth_share=GROWTH[0], growth_most=GROWTH[1], unseen=unseen(delta),
            pilot_share=pilot_share, dense_share=dense_share, pilot_tokens=pilot_tokens, rule=RULES[rule],
            capacity=capacity, layer=layer, out_f32=out_f32, scouts=scouts)

    def __call__(self):
        call("taper_sampled", self.p)
        return self.out

    def keys_read(self):
        """Keys and values read, over all KV heads."""
        exact = self.fixed[:, 12] - self.residual
        return torch.where(self.state == SAMPLED, exact + self.counts, self.fixed[:, 12]).sum().item()


TARGETS = {"systematic": SYSTEMATIC, "stratified": STRATIFIED, "independent": INDEPENDENT, "per tile": PER_TILE}


class Values:
    """Attention over all keys and `samples` values of each head (S2ANTA)."""

    def __init__(self, cache, q, seeds, samples=128, rule="systematic"):
        rows, q_heads, d = q.shape
        dev, kv = q.device, cache.kv_heads
        lens = cache.lens
        lists, group, team = rows * kv, q_heads // kv, team_size(kv)
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=dev)
        f32 = lambda *shape: torch.full(shape, float("nan"), device=dev)
        self.out = f32(*q.shape)
        self.lse = f32(rows, q_heads)
        padded = (max(lens) + 63) // 64 * 64
        self.ids = None if rule == "per tile" else i32([-1]).repeat(rows * q_heads * samples).view(rows, q_heads, samples)
        self.p = ValuesParams(
            q=q, k=cache.k, v=cache.v, **cache.where, lens=i32(lens),
            seeds=torch.tensor(seeds, dtype=torch.int64, device=dev), positions=i32([n - 1 for n in lens]), out=self.out,
            lse=self.lse, sync=torch.zeros(1 + lists, 32, dtype=torch.int32, device=dev),
            weights=torch.full((lists, padded, group), float("nan"), device=dev, dtype=torch.float16),
            part_lse=f32(lists, team, group), parts=f32(lists, team, group, d), ids=self.ids, blocks=cache.blocks, rows=rows,
            q_heads=q_heads, head_dim=d, dtype=q.dtype, max_len=max(lens), samples=samples, rule=TARGETS[rule], scale=d**-0.5)

    def __call__(self):
        call("taper_values", self.p)
        return self.out
