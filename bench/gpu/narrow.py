"""Prefill and decode at head_dim 64 beside cuDNN, and Delta in chunks.

check(report, small): a prompt in chunks gives what the whole gives, the anchor before a
chunk carried along. bench(put, time): time(f) is the median of a graph replay in
microseconds.
"""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import taper_gpu as t
from oracle import rel

DEV = "cuda"


def delta_chunk(cache, q, begin, end, n, gamma, carried, sink, window):
    """Rows begin..end of a prompt of n tokens; `carried`: base and dense output of the last
    anchor before them, if they do not begin with one. Returns the rows and the next carry."""
    hq, d = q.shape[1:]
    tail = max(0, (n - max(128, gamma)) // gamma * gamma)
    first = begin // gamma
    anchors = [a for a in range(-(-begin // gamma) * gamma, min(end, tail), gamma)]
    rows = torch.tensor(anchors + list(range(max(tail, begin), end)), dtype=torch.int64)
    held = 1 if begin % gamma else 0  # rows of the arrays that the carry fills
    dense = torch.full((held + len(rows), hq, d), float("nan"), device=DEV)
    base = torch.full((held + len(anchors), hq, d), float("nan"), device=DEV)
    if len(rows):
        f = t.Prefill(cache, q[(rows - begin).to(DEV)], rows, t.tiles_for(rows, 0, n), lse=False, out=dense[held:])
        f()
    pos = torch.arange(begin, end)
    g = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), sink=sink, window=window, lse=False)
    g()
    if held:
        base[0], dense[0] = carried
    base[held:] = g.out[torch.tensor(anchors, dtype=torch.int64, device=DEV) - begin]
    p = t.DeltaParams(
        out=g.out, anchor_base=base, anchor_dense=dense, position=begin, tail_begin=tail, anchor_first=first,
        anchors=held + len(anchors), tokens=end - begin, q_heads=hq, head_dim=d, gamma=gamma, propagate=1)
    # Tail rows stand at anchors + position - tail_begin: count from the first tail row here.
    if begin > tail:
        p.anchors -= begin - tail
    t.call("taper_delta", p)
    return g.out, (base[-1], dense[held + len(anchors) - 1])


def check(report, small):
    for n, gamma, cuts in ((700, 64, (0, 300, 700)), (900, 32, (0, 100, 130, 520, 900))):
        cache = t.Cache([n], 2, 128, torch.bfloat16)
        q = torch.randn(n, 8, 128, device=DEV, dtype=torch.bfloat16)
        whole = t.Delta(cache, q, gamma, 4, 100)
        whole()
        carried, parts = None, []
        for b, e in zip(cuts, cuts[1:]):
            out, carried = delta_chunk(cache, q[b:e].contiguous(), b, e, n, gamma, carried, 4, 100)
            parts.append(out)
        report(f"delta in chunks {cuts}, gamma {gamma}", rel(torch.cat(parts), whole.out))


def bench(put, time):
    hq, hk, d, dt = 32, 8, 64, torch.bfloat16
    for n in (32768, 131072):
        flops = 2.0 * n * n * d * hq
        q = torch.randn(1, hq, n, d, device=DEV, dtype=dt)
        k = torch.randn(1, hk, n, d, device=DEV, dtype=dt)
        v = torch.randn_like(k)

        def peer():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                 enable_gqa=True)
        ms = time(peer, 3) / 1e3
        put(f"prefill {n} head_dim 64 cudnn TFLOP/s", flops / ms / 1e9)
        put(f"prefill {n} head_dim 64 cudnn ms", ms)
        del q, k, v
        cache = t.Cache([n], hk, d, dt, poison=False)
        q = torch.randn(n, hq, d, device=DEV, dtype=dt)
        pos = torch.arange(n)
        ms = time(t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), lse=False), 3) / 1e3
        put(f"prefill {n} head_dim 64 taper ms", ms)
        put(f"prefill {n} head_dim 64 taper TFLOP/s", flops / ms / 1e9)
        delta = t.Delta(cache, q, 64, 4, 2048)
        put(f"delta {n} head_dim 64 taper ms", time(delta, 3) / 1e3)
        f = t.Decode(cache, q[:1].contiguous(), [t.work_list(end=(n, 0), length=n)] * hk)
        f.plan()
        put(f"decode {n} head_dim 64 taper us", time(f))
        del cache, q, delta, f
        torch.cuda.empty_cache()
