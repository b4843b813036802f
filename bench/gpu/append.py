"""Metadata beside the cache: bounds of blocks, labels, codes.

check(report, small) compares with PyTorch; bench(put, time) measures, where time(f) is the
median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from taper_gpu import AppendParams, AppendSpan, CodeParams, call

DEV = "cuda"


class Append:
    """What is kept beside the cache of spans, (table, begin, end) tuples; `where`: fields of AppendParams that say what, and
    where it lies."""

    def __init__(self, cache, spans, **where):
        spans = [AppendSpan(table=i, begin=b, end=e) for i, b, e in spans]
        self.p = AppendParams(
            k=cache.k, **cache.where, spans=torch.tensor([t.words(s) for s in spans], dtype=torch.int32, device=DEV),
            span_count=len(spans), head_dim=cache.head_dim, dtype=cache.dtype,
            max_blocks=max((s.end + 63) // 64 - s.begin // 64 for s in spans), **where)

    def __call__(self):
        call("taper_append", self.p)


class Metadata(Append):
    """Bounds of blocks and labels; channels [kv_heads, width]."""

    def __init__(self, cache, spans, channels):
        nan = lambda *s: torch.full(s, float("nan"), device=DEV, dtype=cache.dtype)
        width = channels.shape[1]
        self.bounds = nan(cache.blocks, cache.kv_heads, 1, 2 * cache.head_dim)
        self.labels = nan(cache.blocks, cache.kv_heads, 64, width)
        super().__init__(cache, spans, channels=channels, pages=self.bounds, page=64, labels=self.labels, width=width)


class Codes:
    """Signs of x [tokens, heads, 32 * words] as bits, into the cache's codes or as they lie."""

    def __init__(self, x, words, cache=None, codes=None, positions=None, token_table=None):
        tokens, heads, _ = x.shape
        self.codes = codes if codes is not None else torch.zeros(tokens, heads, words, device=DEV,
                                                                 dtype=torch.int32)
        self.p = CodeParams(x=x, positions=positions, token_table=token_table, codes=self.codes, tokens=tokens, heads=heads,
                            words=words, dtype=x.dtype, **(cache.where if cache else {"kv_heads": heads}))

    def __call__(self):
        call("taper_codes", self.p)


def bits_of(x, words):
    b = (x.float() >= 0).view(*x.shape[:-1], words, 32).long()
    return (b << torch.arange(32, device=DEV)).sum(-1).to(torch.int32)


def check(report, small):
    for dtype in (torch.bfloat16, torch.float16):
        for d, kv in ((128, 2), (64, 3)):
            lens = [1, 64, 300, 65] if small else [1, 64, 9000, 65]
            begins = [0, 0, 130, 64]
            cache = t.Cache(lens, kv, d, dtype)
            channels = torch.stack([torch.randperm(d)[:16] for _ in range(kv)])
            channels = channels.to(device=DEV, dtype=torch.int32)
            f = Metadata(cache, [(i, b, n) for i, (b, n) in enumerate(zip(begins, lens))], channels)
            f()
            bad, untouched = 0.0, torch.ones(cache.blocks, dtype=torch.bool, device=DEV)
            for i, n in enumerate(lens):
                k, _ = cache.dense(i)
                for b in range(begins[i] // 64, (n + 63) // 64):
                    at = int(cache.table[i, b])
                    untouched[at] = False
                    x = k[:, b * 64:b * 64 + 64]
                    bad += float((f.bounds[at, :, 0] != torch.cat([x.amin(1), x.amax(1)], -1)).any())
                    for h in range(kv):
                        y = x[h][:, channels[h].long()]
                        lo = max(begins[i] - b * 64, 0)
                        bad += float((f.labels[at, h, lo:len(y)] != y[lo:]).any())
                        bad += float((~f.labels[at, h, len(y):].isnan()).any())
            bad += float((~f.bounds[untouched].isnan()).any())
            report(f"append bounds and labels {dtype} d{d}", bad, 0.5)
            for heads, words in ((kv * 4, 1), (kv, 4)):
                tok = [(i, p) for i, n in enumerate(lens) for p in range(begins[i], n)]
                table = torch.tensor([a for a, _ in tok], dtype=torch.int32, device=DEV)
                pos = torch.tensor([b for _, b in tok], dtype=torch.int32, device=DEV)
                x = torch.randn(len(tok), heads, 32 * words, device=DEV, dtype=dtype)
                x[:, :, 3] = 0
                codes = torch.full((cache.blocks, kv, 64, heads // kv * words), 7, device=DEV,
                                   dtype=torch.int32)
                Codes(x, words, cache, codes, pos, table)()
                want = bits_of(x, words).view(len(tok), kv, -1)
                got = codes[cache.table[table.long(), (pos // 64).long()].long(), :,
                            (pos % 64).long()]
                plain = Codes(x, words)
                plain()
                bad = float((got != want).any()) + float((plain.codes != bits_of(x, words)).any())
                report(f"codes {dtype} {heads} heads {words} words", bad, 0.5)


def bench(put, time):
    for n in (131072,):
        cache = t.Cache([n], 8, 128, torch.bfloat16, poison=False)
        channels = torch.stack([torch.randperm(128)[:16] for _ in range(8)]).to(DEV, torch.int32)
        put("append metadata 1 token us", time(Metadata(cache, [(0, n - 1, n)], channels)))
        put(f"append metadata {n} tokens us", time(Metadata(cache, [(0, 0, n)], channels)))
        x = torch.randn(n, 32, 32, device=DEV, dtype=torch.bfloat16)
        codes = torch.zeros(cache.blocks, 8, 64, 4, device=DEV, dtype=torch.int32)
        pos = torch.arange(n, device=DEV, dtype=torch.int32)
        put(f"codes {n} tokens us", time(Codes(x, 1, cache, codes, pos, torch.zeros_like(pos))))
