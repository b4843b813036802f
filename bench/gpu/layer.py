"""Rotation with the append to the cache, normalisation with the residual sum, gated activation.

check(report, small) compares with float64; bench(put, time) measures, where time(f) is the
median of a graph replay in microseconds.
"""
import torch

import taper_gpu as t
from taper_gpu import DTYPE, F32, I32, I64, P, call, ptr, struct

DEV = "cuda"

RopeParams = struct("RopeParams", [
    ("qkv", P), ("angles", P), ("positions", P), ("token_table", P), ("block_table", P), ("q", P),
    ("q_plain", P), ("k_plain", P), ("k", P), ("v", P), ("row_stride", I64), ("tokens", I32),
    ("q_heads", I32), ("kv_heads", I32), ("head_dim", I32), ("dtype", I32), ("table_stride", I32),
    ("interleaved", I32), ("slots", P), ("qkv_dtype", I32)])
NormParams = struct("NormParams", [
    ("x", P), ("weight", P), ("residual", P), ("out", P), ("rows", I32), ("width", I32),
    ("dtype", I32), ("epsilon", F32), ("x_f32", I32)])
SiluParams = struct("SiluParams", [
    ("gate_up", P), ("out", P), ("rows", I64), ("width", I32), ("dtype", I32)])


class Rope:
    """qkv [tokens, (q_heads + 2 kv_heads) * d] into q and the cache."""

    def __init__(self, cache, qkv, angles, positions, token_table, q_heads, plain=False,
                 interleaved=False):
        n, d, kv = qkv.shape[0], cache.head_dim, cache.kv_heads
        nan = lambda heads: torch.full((n, heads, d), float("nan"), device=DEV, dtype=qkv.dtype)
        self.q = nan(q_heads)
        self.q_plain, self.k_plain = (nan(q_heads), nan(kv)) if plain else (None, None)
        self.keep = (cache, qkv, angles, positions, token_table)
        self.p = RopeParams(
            ptr(qkv), ptr(angles), ptr(positions), ptr(token_table), ptr(cache.table), ptr(self.q),
            ptr(self.q_plain), ptr(self.k_plain), ptr(cache.k), ptr(cache.v), qkv.stride(0), n,
            q_heads, kv, d, DTYPE[qkv.dtype], cache.table.stride(0), int(interleaved), None,
            DTYPE[qkv.dtype])

    def __call__(self):
        call("taper_rope", self.p)


class Norm:
    def __init__(self, x, weight, residual=None, epsilon=1e-5):
        self.out = torch.full_like(x, float("nan"))
        self.keep = (x, weight, residual)
        self.p = NormParams(ptr(x), ptr(weight), ptr(residual), ptr(self.out), x.shape[0],
                            x.shape[1], DTYPE[x.dtype], epsilon, 0)

    def __call__(self):
        call("taper_norm", self.p)


class Silu:
    def __init__(self, gate_up):
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        self.out = torch.full((rows, width), float("nan"), device=DEV, dtype=gate_up.dtype)
        self.keep = gate_up
        self.p = SiluParams(ptr(gate_up), ptr(self.out), rows, width, DTYPE[gate_up.dtype])

    def __call__(self):
        call("taper_silu", self.p)


def angles_for(n, d, theta=500000.0):
    f = theta ** (-torch.arange(0, d, 2, dtype=torch.float64, device=DEV) / d)
    a = torch.arange(n, dtype=torch.float64, device=DEV)[:, None] * f
    return torch.cat([a.cos(), a.sin()], 1).float().contiguous()


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check(report, small):
    for dtype in (torch.bfloat16, torch.float16):
        for d, kv, group in ((128, 2, 4), (64, 1, 3), (128, 1, 1)):
            for interleaved in (False, True):
                lens = [1, 70, 200] if small else [1, 70, 5000]
                cache = t.Cache(lens, kv, d, dtype)
                hq = kv * group
                begins = [0, 30, 63]
                tok = [(i, p) for i, n in enumerate(lens) for p in range(begins[i], n)]
                table = torch.tensor([a for a, _ in tok], dtype=torch.int32, device=DEV)
                pos = torch.tensor([b for _, b in tok], dtype=torch.int32, device=DEV)
                wide = torch.randn(len(tok), (hq + 2 * kv) * d + 64, device=DEV, dtype=dtype)
                qkv = wide[:, :(hq + 2 * kv) * d]
                angles = angles_for(max(lens), d)
                before = [cache.dense(i) for i in range(3)]
                before = [(a.clone(), b.clone()) for a, b in before]
                f = Rope(cache, qkv, angles, pos, table, hq, True, interleaved)
                f()
                x = qkv.reshape(len(tok), hq + 2 * kv, d)
                c = angles[pos.long(), :d // 2].double()[:, None]
                s = angles[pos.long(), d // 2:].double()[:, None]

                def rotate(y):
                    y = y.double()
                    if interleaved:
                        a, b = y[..., 0::2], y[..., 1::2]
                        return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
                    a, b = y[..., :d // 2], y[..., d // 2:]
                    return torch.cat([a * c - b * s, b * c + a * s], -1)
                err = rel(f.q, rotate(x[:, :hq]))
                err += float((f.q_plain != x[:, :hq]).any() or (f.k_plain != x[:, hq:hq + kv]).any())
                k, v = rotate(x[:, hq:hq + kv]), x[:, hq + kv:]
                at = 0
                for i, n in enumerate(lens):
                    m = n - begins[i]
                    kk, vv = cache.dense(i)
                    err = max(err, rel(kk[:, begins[i]:], k[at:at + m].transpose(0, 1)))
                    err += float((vv[:, begins[i]:] != v[at:at + m].transpose(0, 1)).any())
                    err += float((kk[:, :begins[i]] != before[i][0][:, :begins[i]]).any())
                    at += m
                report(f"rope {dtype} d{d} group {group} interleaved {interleaved}", err)
        for rows, width in ((1, 4096), (7, 576), (5, 8192), (3, 16384), (300, 2048)):
            for with_residual in (False, True):
                x = torch.randn(rows, width, device=DEV, dtype=dtype)
                w = torch.randn(width, device=DEV, dtype=dtype)
                r = torch.randn_like(x) if with_residual else None
                total = (x + r) if with_residual else x
                f = Norm(x, w, r)
                f()
                y = total.double()
                want = y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
                err = rel(f.out, want) + (float((r != total).any()) if with_residual else 0.0)
                report(f"norm {dtype} {rows} x {width} residual {with_residual}", err)
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
        us = time(Rope(cache, qkv, angles_for(max(n, 4096), d), pos, torch.zeros_like(pos), hq))
        put(f"rope and append {n} tokens us", us)
        put(f"rope and append {n} tokens TB/s", 2 * qkv.numel() * 2 / us / 1e6)
        x = torch.randn(n, 4096, device=DEV, dtype=dt)
        r, w = torch.randn_like(x), torch.randn(4096, device=DEV, dtype=dt)
        us = time(Norm(x, w, r))
        put(f"norm with residual {n} tokens us", us)
        put(f"norm with residual {n} tokens TB/s", 4 * x.numel() * 2 / us / 1e6)
        g = torch.randn(n, 2 * 14336, device=DEV, dtype=dt)
        us = time(Silu(g))
        put(f"silu {n} tokens us", us)
        put(f"silu {n} tokens TB/s", 1.5 * g.numel() * 2 / us / 1e6)

        def plain():
            a, b = g.chunk(2, -1)
            return torch.nn.functional.silu(a) * b
        put(f"silu {n} tokens torch us", time(plain))
        put(f"norm with residual {n} tokens torch us",
            time(lambda: torch.nn.functional.rms_norm(x + r, (4096,), w, 1e-5)))
