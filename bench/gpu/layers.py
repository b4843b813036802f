"""Layers of a step of vAttention, or of SAAP, in a row, with the products between them, as the model queues them:
llama-3.1-8b's shape, every layer with weights, cache and index of its own.

layers.py [LIBRARY...] times the libraries, all of the interface of the tree, in turn; without one, the tree's.
"""
import json
import os
import sys

import torch

import taper_gpu as t
from append import Append
from bench import graphed, median_ms
from layer import Rope, angles_for, slots_for
from paying import PickTokens
from pick import Pick, paged_bounds
from quantized import Quantize
from saap import Step
from taper_gpu import ChainParams, ProductParams, call

DEV, DT, HQ, HK, D, HIDDEN, INNER = "cuda", torch.bfloat16, 32, 8, 128, 4096, 14336
SAME, ADD, GATED = t.PRODUCT_SAME, t.PRODUCT_ADD, t.PRODUCT_GATED


class Products:
    """What stands between two attentions."""

    def __init__(self, attended, residual, qkv, sync):
        w = lambda outputs, inputs: torch.randn(outputs, inputs, device=DEV, dtype=DT) * inputs**-0.5
        norm, inner = torch.ones(HIDDEN, device=DEV), torch.empty(INNER, device=DEV, dtype=DT)
        x = lambda x, weight, norm, out, x_f32, to: ProductParams(
            x=x, weight=weight, norm=norm, out=out, rows=1, inputs=weight.shape[1], outputs=weight.shape[0], dtype=DT,
            x_f32=x_f32, to=to, epsilon=1e-5)
        products = (x(attended, w(HIDDEN, HQ * D), None, residual, 1, ADD),
                    x(residual, w(2 * INNER, HIDDEN), norm, inner, 1, GATED),
                    x(inner, w(HIDDEN, INNER), None, residual, 0, ADD),
                    x(residual, w((HQ + 2 * HK) * D, HIDDEN), norm, qkv, 1, SAME))
        self.p = ChainParams(products=products, sync=sync, count=len(products))

    def __call__(self):
        call("taper_chain", self.p)


PARTS = {"products": (), "and rotation": ("rope",), "and index": ("rope", "index"),
         "and choice": ("rope", "index", "pick"), "all": ("rope", "index", "pick", "attend")}


class Layer:
    """By tokens' quantized keys, or by 2 % of the keys in pages of `by`."""

    def __init__(self, n, by, epsilon, shared):
        cache = t.Cache([n], HK, D, DT, poison=False)
        qkv, attended, residual, sync, angles = shared
        cache.v += 0.5
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
            self.index = Append(cache, [(0, n - 1, n)], pages=lo, page=by)
            k, shift = n // 50 // by, by.bit_length() - 1
            self.pick = Pick(cache, self.rope.q, hi, lo, lists, k, i32(4 // by), i32((n - 64 + by - 1) // by), shares=True,
                             target=t.TOKENS, pitch=pitch, fresh=1)
            work, ids = self.pick.work, self.pick.ids
        self.attend = t.VAttention(cache, self.rope.q, work, [7], epsilon, 0.1, token_ids=ids, token_shift=shift, out_f32=True)
        self.attend.p.out = attended
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


CLUSTERED = {"products": (), "and rotation": ("rope",), "and index": ("rope", "index"),
             "and classifier": ("rope", "index", "classify"), "and choice": ("rope", "index", "classify", "pick"),
             "all": ("rope", "index", "classify", "pick", "attend")}


class Clustered(Layer):
    """By 32 of 2,048 clusters, of a window of 2,047 and a classifier 128 to 512 to 2,048."""

    def __init__(self, n, shared):
        cache = t.Cache([n], HK, D, DT, poison=False)
        qkv, attended, residual, sync, angles = shared
        pos = torch.tensor([n - 1], device=DEV, dtype=torch.int32)
        slots = slots_for(cache, torch.zeros_like(pos), pos)
        self.rope = Rope(cache, qkv, angles[n - 1:], slots, HQ)
        turns = [x.contiguous() for x in angles[n - 1:].chunk(2, 1)]
        ids = torch.randint(0, 2048, (cache.blocks, HK, 64), device=DEV).to(torch.int16)
        step = Step(cache, self.rope.q, turns, slots, ids, out=attended)
        self.index, self.classify, self.pick, self.attend = step.keys, step.classify, step.probe, step.attend
        self.products = Products(attended, residual, qkv, sync)

    def __call__(self, parts):
        for part in parts:
            getattr(self, part)()
        self.products()


def main():
    libraries = sys.argv[1:] or [None]
    loaded = [t.lib() if path is None else t.load(path) for path in libraries]
    found = {}
    cases = ((32768, "clusters", 0), (131072, "clusters", 0), (32768, "tokens", 0.3), (131072, "tokens", 0.1), (131072, 64, 0.3))
    for n, by, epsilon in cases:
        torch.manual_seed(1)
        shared = (torch.randn(1, (HQ + 2 * HK) * D, device=DEV, dtype=DT), torch.zeros(1, HQ, D, device=DEV),
                  torch.randn(1, HIDDEN, device=DEV), torch.zeros(32, device=DEV, dtype=torch.int32), angles_for(n, D))
        t.LIB = loaded[0]
        clustered = by == "clusters"
        layers = [Clustered(n, shared) if clustered else Layer(n, by, epsilon, shared) for _ in range(4)]
        steps = CLUSTERED if clustered else PARTS
        qkv0, residual0 = shared[0].clone(), shared[2].clone()
        outs, graphs = [], {}
        for at, library in enumerate(loaded):
            t.LIB = library
            for name, parts in steps.items():
                graphs[name, at] = graphed(lambda: [layer(parts) for layer in layers])
            shared[0].copy_(qkv0), shared[2].copy_(residual0)
            graphs["all", at]()
            torch.cuda.synchronize()
            told = [x.clone() for l in layers for x in ((l.pick.work,) if clustered else (l.pick.work, l.attend.counts))]
            outs.append((shared[2].clone(), *told))
        same = [all(torch.equal(a, b) for a, b in zip(o, outs[0])) for o in outs]
        density = None if clustered else layers[0].attend.keys_read() / HK / n
        print(n, by, epsilon, "density", density, "same", same, flush=True)
        for turn in range(2):
            for name in steps:
                times = [median_ms(graphs[name, at], 15, cold=False) * 1e3 / len(layers) for at in range(len(loaded))]
                found.update({f"{n} {by} {name} {at} {turn}": us for at, us in enumerate(times)})
                print(f"  {name:12s}", *[f"{us:8.2f}" for us in times], flush=True)
        del layers, graphs
        torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "."), "layers.json"), "w") as f:
        json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
