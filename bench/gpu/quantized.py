"""Keys at 2 bits a channel: the index beside the cache, and the scores of every token by it.

check(report, small) compares with PyTorch; bench(put, time) measures, where time(f) is the
median of a graph replay in microseconds.
"""
import math

import torch

import taper_gpu as t
from append import Append
from selection import MAX, SUM, GroupSelect
from taper_gpu import LseParams, QuantizedScoreParams, call

DEV = "cuda"
UNWRITTEN = 0x5EADBEEF


class Quantize(Append):
    """The blocks of spans, (table, begin, end) tuples, into an index [blocks, kv_heads, 5 head_dim], int32."""

    def __init__(self, cache, spans, index=None):
        if index is None:
            index = torch.full((cache.blocks, cache.kv_heads, 5 * cache.head_dim), UNWRITTEN, dtype=torch.int32,
                               device=DEV)
        self.index = index
        super().__init__(cache, spans, quantized=index)

    def __call__(self):
        super().__call__()
        return self.index


class QuantizedScore:
    """Scores of q [rows, q_heads, head_dim] by an index."""

    def __init__(self, cache, q, index):
        rows, q_heads, d = q.shape
        lens = cache.lens
        stride = (max(lens) + 63) // 64 * 64
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEV)
        self.out = torch.full((rows, q_heads, stride), float("nan"), device=DEV)
        self.tile_max, self.tile_sum = (torch.full((rows, q_heads, stride // 64), float("nan"), device=DEV)
                                        for _ in range(2))
        self.p = QuantizedScoreParams(
            q=q, index=index, **cache.where, lens=self.lens, out=self.out, tile_max=self.tile_max,
            tile_sum=self.tile_sum, rows=rows, q_heads=q_heads, head_dim=d, dtype=q.dtype, max_len=max(lens), stride=stride,
            tile_stride=stride // 64, scale=d**-0.5)

    def __call__(self):
        call("taper_quantized_score", self.p)
        return self.out


class Lse:
    """The log-sum-exp of scores that were taken with their tiles."""

    def __init__(self, of):
        rows, q_heads, tiles = of.tile_max.shape
        self.lse = torch.full((rows, q_heads), float("nan"), device=DEV)
        self.p = LseParams(tile_max=of.tile_max, tile_sum=of.tile_sum, lens=of.lens, lse=self.lse, rows=rows, q_heads=q_heads,
                           tile_stride=tiles, page=1)

    def __call__(self):
        call("taper_lse", self.p)
        return self.lse


def quantized(k, rows):
    """Of keys [blocks, kv_heads, 64, d], of which rows [blocks] are visible: words [blocks, kv_heads, 5 d], int32."""
    blocks, kv, _, d = k.shape
    seen = (torch.arange(64, device=DEV)[None] < rows[:, None])[:, None, :, None]
    x = k.float()
    lo, hi = (torch.where(seen, x, s * float("inf")) for s in (1, -1))
    lo, hi = lo.amin(2, keepdim=True), hi.amax(2, keepdim=True)
    # An operation a launch: nothing is contracted.
    step = (hi - lo) * 0.25
    codes = sum((x >= lo + i * step).long() for i in (1, 2, 3)) * seen
    i, m = torch.arange(4, device=DEV)[:, None], torch.tensor([0, 2, 1, 3], device=DEV)[None]
    words = (codes.view(blocks, kv, 64, d // 16, 4, 4) << (8 * m + 2 * i)).sum((-1, -2))
    words = words.transpose(2, 3).reshape(blocks, kv, 4 * d).to(torch.int32)
    lines = torch.cat([(lo + 0.5 * step)[:, :, 0], step[:, :, 0]], -1).to(torch.bfloat16)
    return torch.cat([words, lines.contiguous().view(torch.int32)], -1)


def keys_of(index):
    """What words [blocks, kv_heads, 5 d] say of keys [blocks, kv_heads, 64, d], float64."""
    blocks, kv, d = index.shape[0], index.shape[1], index.shape[2] // 5
    words = index[..., :4 * d].long().view(blocks, kv, d // 16, 64, 1, 1) & 0xFFFFFFFF
    i, m = torch.arange(4, device=DEV)[:, None], torch.tensor([0, 2, 1, 3], device=DEV)[None]
    codes = (words >> (8 * m + 2 * i) & 3).transpose(2, 3).reshape(blocks, kv, 64, d)
    base, step = index[..., 4 * d:].contiguous().view(torch.bfloat16).double().view(blocks, kv, 2, 1, d).unbind(2)
    return base + codes * step


def scales(q, index, table, n):
    """What the scores of q [kv_heads, group, d] over n tokens are multiplied by [kv_heads, group, 1]: less than d**-0.5, the further off
    they may be by the steps of four blocks."""
    d, blocks = q.shape[-1], (n + 63) // 64
    at = [(2 * i + 1) * blocks // 8 for i in range(4)]
    step = index[table[at].long()][..., 4 * d:].contiguous().view(torch.bfloat16)[..., d:].double()
    variance = ((q[None] * step[:, :, None]) ** 2).sum(-1).mean(0) / 12 / d
    return (d**-0.5 / (1 + math.pi / 4 * variance).sqrt())[..., None]


def visible(n, blocks):
    return (n - 64 * torch.arange(blocks, device=DEV)).clamp(0, 64)


def differing(index, cache, lens):
    """How many words differ from PyTorch's for the first `lens` tokens; those of other blocks must be unwritten."""
    bad, untouched = 0, torch.ones(cache.blocks, dtype=torch.bool, device=DEV)
    for i, n in enumerate(lens):
        at = cache.table[i, :(n + 63) // 64].long()
        untouched[at] = False
        bad += int((index[at] != quantized(cache.k[at], visible(n, len(at)))).sum())
    return bad + int((index[untouched] != UNWRITTEN).sum())


def apart_by_block(cache):
    """Neighbouring blocks' steps of other sizes, so that it matters which of them are measured."""
    for i, n in enumerate(cache.lens):
        at = cache.table[i, :(n + 63) // 64].long()
        sizes = torch.tensor([1.0, 0.25, 4.0, 0.5, 2.0], device=DEV)[torch.arange(len(at), device=DEV) * 3 % 5]
        cache.k[at] *= sizes.to(cache.dtype).view(-1, 1, 1, 1)


def check_append(report, small):
    lens = [1, 63, 64, 300, 65] if small else [1, 63, 64, 9000, 65, 70001]
    for dtype in (torch.bfloat16, torch.float16):
        for d, kv in ((128, 2), (64, 3)):
            cache = t.Cache(lens, kv, d, dtype)
            cache.k[..., 3] = 0.5
            cache.k[..., 4] *= 1e-6
            f = Quantize(cache, [(i, 0, n) for i, n in enumerate(lens)])
            f()
            report(f"quantize {dtype} d{d}", float(differing(f.index, cache, lens)), 0.5)
            # A token at a time from somewhere on, as steps bring them, behind what a truncation has left.
            cut = [max(n - 70, n // 2) for n in lens]
            grown = f.index.clone()
            for at in range(70):
                spans = [(i, c + at, c + at + 1) for i, (c, n) in enumerate(zip(cut, lens)) if c + at < n]
                if spans:
                    Quantize(cache, spans, grown)()
            report(f"quantize {dtype} d{d} row by row", float((grown != f.index).any()), 0.5)


def check_score(report, small):
    lens = [1, 63, 64, 65, 700] if small else [1, 63, 64, 65, 1000, 5003, 70001]
    shapes = [(2, 4), (1, 16)] if small else [(2, 1), (1, 3), (8, 4), (2, 8), (1, 12), (1, 16)]
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for kv, group in shapes:
                cache = t.Cache(lens, kv, d, dtype)
                # Channels of unequal size and middle, as those of keys are.
                cache.k *= (torch.randn(d, device=DEV).exp()).to(dtype)
                cache.k += torch.randn(d, device=DEV).to(dtype)
                apart_by_block(cache)
                q = torch.randn(len(lens), kv * group, d, device=DEV, dtype=dtype)
                rounded = q.bfloat16().double()  # As the kernel takes them.
                index = Quantize(cache, [(i, 0, n) for i, n in enumerate(lens)])()
                f = QuantizedScore(cache, q, index)
                f()
                lse = Lse(f)()
                err = gap = moved = 0.0
                for i, n in enumerate(lens):
                    k = keys_of(index[cache.table[i, :(n + 63) // 64].long()]).transpose(0, 1).reshape(kv, -1, d)[:, :n]
                    want = torch.einsum("hgd,hnd->hgn", rounded[i].view(kv, group, d), k)
                    want *= scales(rounded[i].view(kv, group, d), index, cache.table[i], n)
                    want = want.flatten(0, 1)
                    off = (f.out[i, :, :n].double() - want).abs().amax(-1) / want.abs().amax(-1)
                    err = max(err, off.max().item() if not off.isnan().any() else float("inf"))
                    off = (lse[i].double() - torch.logsumexp(f.out[i, :, :n].double(), -1)).abs()
                    gap = max(gap, off.max().item() if not off.isnan().any() else float("inf"))
                    alone = QuantizedScore(cache.rows(i), q[i:i + 1].contiguous(), index)
                    alone()
                    moved += float((alone.out[0, :, :n] != f.out[i, :, :n]).any())
                    moved += float((Lse(alone)()[0] != lse[i]).any())
                name = f"{dtype} d{d} group {group}"
                report(f"quantized scores {name}", err)
                report(f"quantized scores {name} lse", gap, 1e-3)
                report(f"quantized scores {name} independent of the batch", moved, 0.5)
    first, moved = f.out.clone(), 0.0
    for _ in range(3 if small else 100):
        f.out.fill_(float("nan"))
        f()
        moved += sum(float((f.out[i, :, :n] != first[i, :, :n]).any()) for i, n in enumerate(lens))
    report("quantized scores repeat themselves", moved, 0.5)


def check_none(report):
    """A key that is no number takes its head's scores with it, since all four blocks tell how sure they are; a query its own head's."""
    cache = t.Cache([200], 2, 128, torch.bfloat16)
    cache.k[cache.table[0, 1].item(), 0, 7, 5] = float("nan")
    q = torch.randn(1, 8, 128, device=DEV, dtype=torch.bfloat16)
    q[0, 6, 77] = float("nan")
    f = QuantizedScore(cache, q, Quantize(cache, [(0, 0, 200)])())
    want = torch.zeros(8, 200, dtype=torch.bool, device=DEV)
    want[:4] = True
    want[6] = True
    report("quantized scores that are none", float((f()[0, :, :200].isnan() != want).any()), 0.5)


def check(report, small):
    check_append(report, small)
    check_score(report, small)
    check_none(report)


class Steps:
    """Calls one after the other."""

    def __init__(self, *of):
        self.of = of

    def __call__(self):
        for f in self.of:
            f()


def choices(scores, n, group):
    """Score pass, log-sum-exp and choice: a twentieth of the tokens, or what pays."""
    lse = Lse(scores)
    lines = scores.out.view(-1, scores.out.shape[-1])
    few = GroupSelect(lines, n // 20, group, SUM, lse.lse, k=n // 20)
    pays = GroupSelect(lines, n // 4, group, MAX, lse.lse, k=n // 4, noise=3e-4)
    return {"and lse": Steps(scores, lse), "and 5% of tokens": Steps(scores, lse, few),
            "and what pays of the largest of 4 heads": Steps(scores, lse, pays)}


def copied(put, time, name):
    """Bytes a microsecond that a copy moves."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEV)
    y = torch.empty_like(x)
    rate = 2 * x.numel() / time(lambda: y.copy_(x))
    put(f"{name}: copy TB/s, which floors are by", rate / 1e6)
    return rate


def bench(put, time):
    kv, group, d = 8, 4, 128
    rate = copied(put, time, "quantized")
    for batch, n in ((1, 2048), (1, 32768), (1, 131072), (1, 524288), (16, 8192), (64, 2048)):
        cache = t.Cache([n] * batch, kv, d, torch.bfloat16, poison=False)
        tokens, key = batch * n * kv, f"b{batch} {n}"
        whole = Quantize(cache, [(i, 0, n) for i in range(batch)])
        index = whole()
        put(f"quantize {key} all tokens us", time(whole))
        put(f"quantize {key} all tokens floor us", tokens * (2 * d + 20 * d / 64) / rate)
        put(f"quantize {key} one token a row us", time(Quantize(cache, [(i, n - 1, n) for i in range(batch)], index)))
        q = torch.randn(batch, kv * group, d, device=DEV, dtype=torch.bfloat16)
        f = QuantizedScore(cache, q, index)
        put(f"score {key} quantized us", time(f))
        put(f"score {key} quantized floor us", tokens * (20 * d / 64 + 4 * group) / rate)
        for name, steps in choices(f, n, group).items():
            put(f"score {key} quantized {name} us", time(steps))
        for width in (16, 32):
            labels = torch.randn(cache.blocks, kv, 64, width, device=DEV, dtype=torch.bfloat16)
            f = t.Score(cache, torch.randn(batch, kv * group, width, device=DEV, dtype=torch.bfloat16), labels,
                        tiles=True)
            put(f"score {key} {width} labels us", time(f))
            put(f"score {key} {width} labels floor us", tokens * (2 * width + 4 * group) / rate)
            for name, steps in choices(f, n, group).items():
                put(f"score {key} {width} labels {name} us", time(steps))
        del cache, whole, index, f, steps, labels
        torch.cuda.empty_cache()
