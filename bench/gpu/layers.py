"""Layers of a step of vAttention in a row, with the products between them, as the model queues them: llama-3.1-8b's
shape, every layer with weights, cache and index of its own.

layers.py [LIBRARY...] times the libraries, all of the interface of the tree, in turn; without one, the tree's.
"""
import ctypes as C
import json
import os
import sys

import torch

import taper_gpu as t
from append import AppendParams
from layer import Rope, angles_for, slots_for
from paying import PickTokens
from pick import TOKENS, Pick, paged_bounds
from quantized import Quantize
from taper_gpu import F32, I32, P, call, ptr, struct

DEV, DT, HQ, HK, D, HIDDEN, INNER = "cuda", torch.bfloat16, 32, 8, 128, 4096, 14336
ProductParams = struct("ProductParams", [(n, P) for n in "x weight norm out".split()] + [
    (n, I32) for n in "rows inputs outputs dtype x_f32 to".split()] + [("epsilon", F32)])
ChainParams = struct("ChainParams", [
    ("products", ProductParams * 4), ("sync", P), ("count", I32), ("inputs_most", I32)])
SAME, ADD, GATED = 0, 2, 3


class Products:
    """What stands between two attentions."""

    def __init__(self, attended, residual, qkv, sync):
        w = lambda outputs, inputs: torch.randn(outputs, inputs, device=DEV, dtype=DT) * inputs**-0.5
        self.weights = [w(HIDDEN, HQ * D), w(2 * INNER, HIDDEN), w(HIDDEN, INNER), w((HQ + 2 * HK) * D, HIDDEN)]
        self.norm, self.inner = torch.ones(HIDDEN, device=DEV), torch.empty(INNER, device=DEV, dtype=DT)
        self.keep = (attended, residual, qkv, sync)
        x = lambda of, w, norm, out, f32, to: ProductParams(
            ptr(of), ptr(w), ptr(norm), ptr(out), 1, w.shape[1], w.shape[0], 0, f32, to, 1e-5)
        o, gate, down, next_qkv = self.weights
        self.p = ChainParams((ProductParams * 4)(
            x(attended, o, None, residual, 1, ADD), x(residual, gate, self.norm, self.inner, 1, GATED),
            x(self.inner, down, None, residual, 0, ADD), x(residual, next_qkv, self.norm, qkv, 1, SAME)),
            ptr(sync), 4, 0)

    def __call__(self):
        call("taper_chain", self.p)


def graph(f):
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=side):
        f()
    return g


def microseconds(g, layers, runs=15):
    times = []
    for _ in range(runs + 3):
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record()
        g.replay()
        e.record()
        torch.cuda.synchronize()
        times.append(s.elapsed_time(e) * 1e3 / layers)
    return sorted(times[3:])[runs // 2]


PARTS = {"products": (), "and rotation": ("rope",), "and index": ("rope", "index"),
         "and choice": ("rope", "index", "pick"), "all": ("rope", "index", "pick", "attend")}


class Layer:
    """By tokens' quantized keys, or by 2 % of the keys in pages of `by`."""

    def __init__(self, n, by, epsilon, shared):
        self.cache = t.Cache([n], HK, D, DT, poison=False)
        cache, (qkv, attended, residual, sync, angles) = self.cache, shared
        self.cache.v += 0.5
        pos = torch.tensor([n - 1], device=DEV, dtype=torch.int32)
        self.rope = Rope(cache, qkv, angles[n - 1:], slots_for(cache, torch.zeros_like(pos), pos), HQ)
        lists = torch.tensor([t.work_list((0, n - 64), (4, n), length=n)] * HK, dtype=torch.int32, device=DEV)
        i32 = lambda x: torch.full((HK,), x, dtype=torch.int32, device=DEV)
        if by == "tokens":
            index = Quantize(cache, [(0, 0, n)])()
            self.index = Quantize(cache, [(0, n - 1, n)], index)
            self.pick = PickTokens(cache, self.rope.q, index, 3e-4, [n // 4] * HK, [4] * HK, [n - 64] * HK, fresh=1)
            work, ids, shift = self.pick.work, self.pick.ids, 0
        else:
            hi, lo, pitch = paged_bounds(cache.k, by)
            self.index = Quantize(cache, [(0, n - 1, n)], lo)
            self.index.p.quantized, self.index.p.pages, self.index.p.page = None, lo.data_ptr(), by
            k, shift = n // 50 // by, by.bit_length() - 1
            self.pick = Pick(cache, self.rope.q, hi, lo, k, i32(4 // by), i32((n - 64 + by - 1) // by),
                             work=torch.empty_like(lists), shares=True, lists=lists, target=TOKENS, pitch=pitch, fresh=1)
            work, ids = self.pick.work, self.pick.ids
        self.attend = t.VAttention(cache, self.rope.q, work, [7], epsilon, 0.1, token_ids=ids, token_shift=shift, out_f32=True)
        self.attend.p.out = ptr(attended)
        self.products = Products(attended, residual, qkv, sync)

    def __call__(self, parts):
        if "rope" in parts:
            self.rope()
        if "index" in parts:
            self.index()
        if "pick" in parts:
            self.pick()
        if "attend" in parts:
            self.attend()
        self.products()


def main():
    libraries = sys.argv[1:] or [None]
    loaded = [t.lib() if path is None else C.CDLL(path) for path in libraries]
    found = {}
    for n, by, epsilon in ((32768, "tokens", 0.3), (131072, "tokens", 0.1), (131072, 64, 0.3)):
        torch.manual_seed(1)
        shared = (torch.randn(1, (HQ + 2 * HK) * D, device=DEV, dtype=DT), torch.zeros(1, HQ, D, device=DEV),
                  torch.randn(1, HIDDEN, device=DEV), torch.zeros(32, device=DEV, dtype=torch.int32), angles_for(n, D))
        t.LIB = loaded[0]
        layers = [Layer(n, by, epsilon, shared) for _ in range(4)]
        qkv0, residual0 = shared[0].clone(), shared[2].clone()
        outs, graphs = [], {}
        for at, library in enumerate(loaded):
            t.LIB = library
            for name, parts in PARTS.items():
                graphs[name, at] = graph(lambda: [layer(parts) for layer in layers])
            shared[0].copy_(qkv0), shared[2].copy_(residual0)
            graphs["all", at].replay()
            torch.cuda.synchronize()
            outs.append((shared[2].clone(), *[x.clone() for l in layers for x in (l.pick.work, l.attend.counts)]))
        same = [all(torch.equal(a, b) for a, b in zip(o, outs[0])) for o in outs]
        print(n, by, epsilon, "density", layers[0].attend.keys_read() / HK / n, "same", same, flush=True)
        for turn in range(2):
            for name in PARTS:
                times = [microseconds(graphs[name, at], len(layers)) for at in range(len(loaded))]
                found.update({f"{n} {by} {name} {at} {turn}": us for at, us in enumerate(times)})
                print(f"  {name:12s}", *[f"{us:8.2f}" for us in times], flush=True)
        del layers, graphs
        torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "."), "layers.json"), "w") as f:
        json.dump(found, f, indent=1)


main()
