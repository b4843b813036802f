"""Rotation with the append to the cache, normalisation, gated activation.

check(report, small) compares with float64; bench(put, time) measures, where time(f) is the
median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from oracle import rel
from taper_gpu import NormParams, RopeParams, SiluParams, call

DEV = "cuda"


def slots_for(cache, tables, positions):
    """Where tokens of sequences lie in the cache: block * 64 + row."""
    return (cache.table[tables.long(), (positions // 64).long()] * 64 + positions % 64).to(torch.int32)


class Rope:
    """qkv [tokens, (q_heads + 2 kv_heads) * d] into q and the cache at slots, by each token's angles [tokens, d]."""

    def __init__(self, cache, qkv, angles, slots, q_heads):
        n, d = qkv.shape[0], cache.head_dim
        self.q = torch.full((n, q_heads, d), float("nan"), device=DEV, dtype=cache.dtype)
        self.p = RopeParams(qkv=qkv, angles=angles, slots=slots, q=self.q, k=cache.k, v=cache.v, tokens=n, q_heads=q_heads,
                            kv_heads=cache.kv_heads, head_dim=d, dtype=cache.dtype, qkv_dtype=qkv.dtype)

    def __call__(self):
        call("taper_rope", self.p)


class Norm:
    """x [rows, width] by a weight [width], both f32, into a 16-bit dtype."""

    def __init__(self, x, weight, dtype, epsilon=1e-5):
        self.out = torch.full(x.shape, float("nan"), device=DEV, dtype=dtype)
        self.p = NormParams(x=x, weight=weight, out=self.out, rows=x.shape[0], width=x.shape[1], dtype=dtype, epsilon=epsilon)

    def __call__(self):
        call("taper_norm", self.p)


class Silu:
    def __init__(self, gate_up):
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        self.out = torch.full((rows, width), float("nan"), device=DEV, dtype=gate_up.dtype)
        self.p = SiluParams(gate_up=gate_up, out=self.out, rows=rows, width=width, dtype=gate_up.dtype)

    def __call__(self):
        call("taper_silu", self.p)


def angles_for(n, d, theta=500000.0):
    f = theta ** (-torch.arange(0, d, 2, dtype=torch.float64, device=DEV) / d)
    a = torch.arange(n, dtype=torch.float64, device=DEV)[:, None] * f
    return torch.cat([a.cos(), a.sin()], 1).float().contiguous()


def check(report, small):
    for dtype in (torch.bfloat16, torch.float16):
        for d, kv, group in ((128, 2, 4), (64, 1, 3), (128, 1, 1)):
            for cached in (dtype, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
                lens = [1, 70, 200] if small else [1, 70, 5000]
                cache = t.Cache(lens, kv, d, cached)
                hq = kv * group
                begins = [0, 30, 63]
                tok = [(i, p) for i, n in enumerate(lens) for p in range(begins[i], n)]
                table = torch.tensor([a for a, _ in tok], dtype=torch.int32, device=DEV)
                pos = torch.tensor([b for _, b in tok], dtype=torch.int32, device=DEV)
                qkv = torch.randn(len(tok), (hq + 2 * kv) * d, device=DEV, dtype=dtype)
                angles = angles_for(max(lens), d)[pos.long()]
                before = [cache.dense(i) for i in range(3)]
                before = [(a.clone(), b.clone()) for a, b in before]
                f = Rope(cache, qkv, angles, slots_for(cache, table, pos), hq)
                f()
                x = qkv.reshape(len(tok), hq + 2 * kv, d)
                c, s = angles[:, :d // 2].double()[:, None], angles[:, d // 2:].double()[:, None]

                def rotate(y):
                    a, b = y.double()[..., :d // 2], y.double()[..., d // 2:]
                    return torch.cat([a * c - b * s, b * c + a * s], -1)
                err = rel(f.q, rotate(x[:, :hq]))
                k, v = rotate(x[:, hq:hq + kv]), x[:, hq + kv:].to(cached)
                at = 0
                for i, n in enumerate(lens):
                    m = n - begins[i]
                    kk, vv = cache.dense(i)
                    err = max(err, rel(kk[:, begins[i]:], k[at:at + m].transpose(0, 1)))
                    err += float((vv[:, begins[i]:] != v[at:at + m].transpose(0, 1)).any())
                    err += float((kk[:, :begins[i]] != before[i][0][:, :begins[i]]).any())
                    at += m
                report(f"rope {dtype} to {cached} d{d} group {group}", err)
        for rows, width in ((1, 4096), (7, 576), (5, 8192), (3, 16384), (300, 2048)):
            x, w = torch.randn(rows, width, device=DEV), torch.randn(width, device=DEV)
            f = Norm(x, w, dtype)
            f()
            y = x.double()
            want = y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
            report(f"norm {dtype} {rows} x {width}", rel(f.out, want))
            g = torch.randn(rows, 2 * width, device=DEV, dtype=dtype) * 4
            f = Silu(g)
            f()
            a, b = g.double().chunk(2, -1)
            report(f"silu {dtype} {rows} x {width}", rel(f.out, a * torch.sigmoid(a) * b))


def bench(put, time):
    hq, hk, d, dt = 32, 8, 128, torch.bfloat16
    for n in (1, 64, 8192):
        cache = t.Cache([max(n, 4096)], hk, d, dt, poison=False)
        qkv = torch.randn(n, (hq + 2 * hk) * d, device=DEV, dtype=dt)
        pos = torch.arange(n, device=DEV, dtype=torch.int32)
        us = time(Rope(cache, qkv, angles_for(n, d), slots_for(cache, torch.zeros_like(pos), pos), hq))
        put(f"rope and append {n} tokens us", us)
        put(f"rope and append {n} tokens TB/s", 2 * qkv.numel() * 2 / us / 1e6)
        x, w = torch.randn(n, 4096, device=DEV), torch.randn(4096, device=DEV)
        us = time(Norm(x, w, dt))
        put(f"norm {n} tokens us", us)
        put(f"norm {n} tokens TB/s", x.numel() * 6 / us / 1e6)
        g = torch.randn(n, 2 * 14336, device=DEV, dtype=dt)
        us = time(Silu(g))
        put(f"silu {n} tokens us", us)
        put(f"silu {n} tokens TB/s", 1.5 * g.numel() * 2 / us / 1e6)

        def plain():
            a, b = g.chunk(2, -1)
            return torch.nn.functional.silu(a) * b
        put(f"silu {n} tokens torch us", time(plain))
        put(f"norm {n} tokens torch us", time(lambda: torch.nn.functional.rms_norm(x, (4096,), w, 1e-5).to(dt)))
