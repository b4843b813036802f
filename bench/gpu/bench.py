"""Times the kernels beside their peers on one GPU: cold L2, medians of CUDA events.

bench.py [decode] [prefill] [delta] [sparse] [sampled] [values] [shapes] [pinned] [long]; writes
bench.json into $OUT (or the current folder). FlashInfer is timed if it is installed,
cuDNN through PyTorch.
Llama-3.1-8B attention shape: 32 query heads, 8 KV heads, head_dim 128, bf16.
"""
import json
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import taper_gpu as t
from pick import Pick
from selection import GroupSelect

DEV, HQ, HK, D, DT = "cuda", 32, 8, 128, torch.bfloat16
RES = {}
FLUSH = torch.ones(1 << 28, dtype=torch.float32, device=DEV)
SINK = torch.empty((), dtype=torch.float32, device=DEV)


def put(key, value):
    RES[key] = round(value, 3) if isinstance(value, float) else value
    print(f"{key:58s} {RES[key]}", flush=True)
    with open(os.path.join(os.environ.get("OUT", "."), "bench.json"), "w") as f:
        json.dump(RES, f, indent=1)


def median_ms(f, iters=20, warm=3, cold=True):
    """Median time of f. `cold` reads 1 GiB before each run: it leaves L2 full of other,
    clean lines, as a model's weights do (a written flush would charge f for its write
    back), and lets the host queue f's launches before the device gets to them."""
    for _ in range(warm):
        f()
    times = []
    for _ in range(iters):
        if cold:
            torch.sum(FLUSH, 0, out=SINK)
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record()
        f()
        e.record()
        torch.cuda.synchronize()
        times.append(s.elapsed_time(e))
    return sorted(times)[len(times) // 2]


def graphed(f):
    torch.cuda.synchronize()  # What f reads may still be in the making on another stream.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=side):
        f()

    def replay():
        g.replay()
        return f  # Holds what the graph reads.
    return replay


def copy_rate():
    x = torch.empty(4 << 30, dtype=torch.uint8, device=DEV)
    y = torch.empty_like(x)
    put("copy TB/s", 2 * x.numel() / median_ms(lambda: y.copy_(x), 10, cold=False) / 1e9)


def flashinfer_decode(n, batch, page=16):
    import flashinfer
    pages = batch * n // page
    kv = torch.randn(pages, 2, page, HK, D, device=DEV, dtype=DT)
    q = torch.randn(batch, HQ, D, device=DEV, dtype=DT)
    ws = torch.empty(512 << 20, dtype=torch.uint8, device=DEV)
    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, "NHD", use_tensor_cores=True)
    indptr = torch.arange(0, batch + 1, device=DEV, dtype=torch.int32) * (n // page)
    w.plan(indptr, torch.randperm(pages, device=DEV).to(torch.int32),
           torch.full((batch,), page, device=DEV, dtype=torch.int32), HQ, HK, D, page,
           q_data_type=DT, kv_data_type=DT)
    return lambda: w.run(q, kv)


def decode():
    try:
        import flashinfer
        put("flashinfer", flashinfer.__version__)
        peer = True
    except ImportError:
        peer = False
    sizes = [(1, n) for n in (2048, 8192, 32768, 131072, 171008, 524288, 1048576)]
    sizes += [(8, 32768), (8, 131072), (64, 2048)]
    for batch, n in sizes:
        key = f"decode b{batch} {n}"
        if peer:
            f = flashinfer_decode(n, batch)
            put(f"{key} flashinfer us", median_ms(f) * 1e3)
            try:
                put(f"{key} flashinfer graph us", median_ms(graphed(f)) * 1e3)
            except Exception as ex:
                put(f"{key} flashinfer graph error", str(ex)[:200])
                torch.cuda.synchronize()
            del f
        cache = t.Cache([n] * batch, HK, D, DT, poison=False)
        q = torch.randn(batch, HQ, D, device=DEV, dtype=DT)
        f = t.Decode(cache, q, [t.work_list(end=(n, 0), length=n)] * (batch * HK))
        f.plan()
        put(f"{key} taper us", median_ms(f) * 1e3)
        ms = median_ms(graphed(f))
        put(f"{key} taper graph us", ms * 1e3)
        put(f"{key} taper TB/s", 4.0 * batch * n * HK * D / ms / 1e9)
        if n in (32768, 131072) and batch == 1:
            put(f"{key} plan us", median_ms(f.plan) * 1e3)
            put(f"{key} attend alone us", median_ms(graphed(f.attend)) * 1e3)
            put(f"{key} merge alone us", median_ms(graphed(f.merge)) * 1e3)
            check_lists_speed(cache, q, n)
        del f, cache, q
        torch.cuda.empty_cache()


def check_lists_speed(cache, q, n):
    """Gathers of blocks and of single tokens at 10% density."""
    nb = n // 640
    bid = torch.cat([torch.randperm(n // 64)[:nb].sort().values for _ in range(HK)])
    lists = [t.work_list(blocks=(h * nb, nb), length=n) for h in range(HK)]
    f = t.Decode(cache, q, lists, block_ids=bid.to(device=DEV, dtype=torch.int32))
    f.plan()
    put(f"decode b1 {n} 10% blocks taper graph us", median_ms(graphed(f)) * 1e3)
    nt = n // 10
    tid = torch.cat([torch.randperm(n)[:nt].sort().values for _ in range(HK)])
    lists = [t.work_list(tokens=(h * nt, nt), length=n) for h in range(HK)]
    f = t.Decode(cache, q, lists, token_ids=tid.to(device=DEV, dtype=torch.int32))
    f.plan()
    put(f"decode b1 {n} 10% tokens taper graph us", median_ms(graphed(f)) * 1e3)


def put_peers(n, names, runs, warm):
    """PyTorch's causal prefill by the peers named."""
    q = torch.randn(1, HQ, n, D, device=DEV, dtype=DT)
    k = torch.randn(1, HK, n, D, device=DEV, dtype=DT)
    v = torch.randn_like(k)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    for name in names:
        with sdpa_kernel(backends[name]):
            f = lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True)
            ms = median_ms(f, runs, warm, cold=False)
        put(f"prefill {n} {name} ms", ms)
        put(f"prefill {n} {name} TFLOP/s", 2.0 * n * n * D * HQ / ms / 1e9)


def prefill():
    for n in (8192, 32768, 131072):
        flops = 2.0 * n * n * D * HQ
        iters = 5 if n < 100000 else 3
        put_peers(n, ["cudnn"], iters, 1)
        cache = t.Cache([n], HK, D, DT, poison=False)
        q = torch.randn(n, HQ, D, device=DEV, dtype=DT)
        pos = torch.arange(n)
        f = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), lse=False)
        ms = median_ms(f, iters, 1, cold=False)
        put(f"prefill {n} taper ms", ms)
        put(f"prefill {n} taper TFLOP/s", flops / ms / 1e9)
        if n == 131072:
            csr_speed(cache, q, n)
        del f, cache, q
        torch.cuda.empty_cache()


def csr_speed(cache, q, n):
    """Block lists of a given density, one per KV head and tile; forced diagonal."""
    pos = torch.arange(n)
    tiles = t.tiles_for(pos, 0, n)
    for density in (0.02, 0.1, 0.5):
        begin, ids, kept, seen = [0], [], 0, 0
        for h in range(HK):
            for i in range(len(tiles)):
                top = 2 * i + 2
                m = max(2, int(density * top))
                pick = torch.cat([torch.randperm(max(top - 2, 1))[:m - 2],
                                  torch.tensor([top - 2, top - 1])]).sort().values
                ids.append(pick)
                begin.append(begin[-1] + len(pick))
                kept += len(pick)
                seen += top
        csr = (torch.tensor(begin, dtype=torch.int32, device=DEV),
               torch.cat(ids).to(device=DEV, dtype=torch.int32))
        f = t.Prefill(cache, q, pos, tiles, csr=csr, csr_heads=HK, lse=False)
        put(f"prefill {n} blocks {kept / seen:.4f} taper ms", median_ms(f, 3, 1, cold=False))


def delta():
    for n in (32768, 131072):
        put_peers(n, ["fa2"], 3, 1)
        cache = t.Cache([n], HK, D, DT, poison=False)
        q = torch.randn(n, HQ, D, device=DEV, dtype=DT)
        f = t.Delta(cache, q, 64, 4, 2048)
        put(f"delta {n} taper ms", median_ms(f, 3, 1, cold=False))
        put(f"delta {n} anchors and tail ms", median_ms(f.dense, 3, 1, cold=False))
        put(f"delta {n} sink and window ms", median_ms(f.base, 3, 1, cold=False))
        del f, cache, q
        torch.cuda.empty_cache()


def long():
    """One run each at 524,288 and 1,048,576 tokens; minutes, mostly FlashAttention-2's."""
    for n in (524288, 1048576):
        flops = 2.0 * n * n * D * HQ
        put_peers(n, ["cudnn", "fa2"], 1, 0)
        cache = t.Cache([n], HK, D, DT, poison=False)
        q = torch.randn(n, HQ, D, device=DEV, dtype=DT)
        pos = torch.arange(n)
        f = t.Prefill(cache, q, pos, t.tiles_for(pos, 0, n), lse=False)
        ms = median_ms(f, 1, 0, cold=False)
        put(f"prefill {n} taper ms", ms)
        put(f"prefill {n} taper TFLOP/s", flops / ms / 1e9)
        f = t.Delta(cache, q, 64, 4, 2048)
        put(f"delta {n} taper ms", median_ms(f, 3, 1, cold=False))
        del f, cache, q
        torch.cuda.empty_cache()


def sparse():
    """The parts of a sparse decode step, and vAttention over Quest's blocks as a whole."""
    for n in (32768, 131072, 524288):
        cache = t.Cache([n], HK, D, DT, poison=False)
        cache.v += 0.5
        q = torch.randn(1, HQ, D, device=DEV, dtype=DT)
        hi = cache.k.amax(2, keepdim=True).contiguous()
        lo = cache.k.amin(2, keepdim=True).contiguous()
        nb, key = n // 64, f"sparse b1 {n}"
        full = t.Score(cache, q, cache.k)
        put(f"{key} score all keys us", median_ms(graphed(full)) * 1e3)
        best = lambda scores, k, **more: GroupSelect(scores.out[0], k, HQ // HK, k=k, **more)
        top = best(full, n // 20)
        put(f"{key} select 5% of tokens us", median_ms(graphed(top)) * 1e3)
        bound = t.Score(cache, q, hi, lo)
        put(f"{key} score block bounds us", median_ms(graphed(bound)) * 1e3)
        ends = lambda x: torch.full((HK,), x, dtype=torch.int32, device=DEV)
        fixed = torch.tensor([t.work_list((0, n - 128), (128, n), length=n)] * HK,
                             dtype=torch.int32, device=DEV)
        k = nb // 20
        pick = best(bound, k, begins=ends(2), ends=ends(nb - 2))
        put(f"{key} select 5% of blocks us", median_ms(graphed(pick)) * 1e3)
        one = Pick(cache, q, hi, lo, fixed, k, ends(2), ends(nb - 2))
        one()
        make = lambda eps: t.VAttention(cache, q, one.work, [7], eps, 0.05, "chi2", block_ids=one.ids)
        # The epsilon at which this data needs about 10% of the keys.
        tries = {}
        for eps in (0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06, 0.065, 0.07, 0.08, 0.1, 0.15):
            v = make(eps)
            v()
            tries[eps] = v.keys_read() / (n * HK)
        eps = min(tries, key=lambda e: abs(tries[e] - 0.1))
        v = make(eps)

        def step():
            one()
            v()
        put(f"{key} vattention epsilon", eps)
        put(f"{key} vattention density", tries[eps])
        put(f"{key} vattention us", median_ms(graphed(v)) * 1e3)
        put(f"{key} vattention with score and select us", median_ms(graphed(step)) * 1e3)
        put(f"{key} vattention dense lists", int((v.state == t.DENSE).sum()))
        try:
            put(f"{key} flashinfer graph us", median_ms(graphed(flashinfer_decode(n, 1))) * 1e3)
        except ImportError:
            pass
        del cache, full, top, bound, pick, one, v, hi, lo
        torch.cuda.empty_cache()


def sampled():
    """vAttention over Quest's blocks on five inputs, and the blocks alone. The list that needs
    the largest sample sets a step's time, and random inputs differ in that."""
    # Share of the blocks, epsilon in units of that at which 5% of the blocks and as large a sample keep the promise,
    # first sample. One look is enough, or two, where epsilon is larger.
    settings = {"vattention": (0.05, 1, 0.01), "loose": (0.05, 3.5, 0.01), "large pilot": (0.05, 1, 0.05),
                "one look of 5%": (0.05, 1.25, 0.05), "9% of the blocks": (0.09, 4.5, 0.01)}
    for n, eps in ((32768, 0.15), (131072, 0.055), (524288, 0.025)):
        key, nb, rows = f"sampled b1 {n}", n // 64, []
        try:
            put(f"{key} flashinfer graph us", median_ms(graphed(flashinfer_decode(n, 1))) * 1e3)
        except ImportError:
            pass
        for seed in range(5):
            torch.manual_seed(seed)
            cache = t.Cache([n], HK, D, DT, poison=False)
            cache.v += 0.5
            q = torch.randn(1, HQ, D, device=DEV, dtype=DT)
            hi, lo = (f(2, keepdim=True).contiguous() for f in (cache.k.amax, cache.k.amin))
            ends = lambda x: torch.full((HK,), x, dtype=torch.int32, device=DEV)
            row = {}
            for name, (share, loose, pilot) in settings.items():
                fixed = torch.tensor([t.work_list((0, n - 128), (128, n), length=n)] * HK,
                                     dtype=torch.int32, device=DEV)
                pick = Pick(cache, q, hi, lo, fixed, int(nb * share), ends(2), ends(nb - 2))
                pick()
                f = t.VAttention(cache, q, pick.work, [7], loose * eps, 0.05, block_ids=pick.ids, pilot_share=pilot)

                def step():
                    pick()
                    f()
                row[f"{name} us"] = median_ms(graphed(f)) * 1e3
                row[f"{name} with predictor us"] = median_ms(graphed(step)) * 1e3
                row |= {f"{name} density": f.keys_read() / (n * HK),
                        f"{name} largest sample": f.counts.max().item() / n,
                        f"{name} smallest sample": f.counts.min().item() / n}
            rows.append(row)
            del cache, hi, lo, pick, f, step
        for name in rows[0]:
            x = sorted(r[name] for r in rows)
            put(f"{key} {name} mean", sum(x) / len(x))
            put(f"{key} {name} least", x[0])
            put(f"{key} {name} most", x[-1])
        torch.cuda.empty_cache()


def values():
    """All keys, 128 values a head (S2ANTA), beside FlashInfer's dense step."""
    for n in (32768, 131072, 524288):
        cache = t.Cache([n], HK, D, DT, poison=False)
        q = torch.randn(1, HQ, D, device=DEV, dtype=DT)
        key = f"values b1 {n}"
        try:
            put(f"{key} flashinfer graph us", median_ms(graphed(flashinfer_decode(n, 1))) * 1e3)
        except ImportError:
            pass
        for rule in t.TARGETS:
            f = t.Values(cache, q, [7], 128, rule)
            put(f"{key} {rule} S=128 us", median_ms(graphed(f)) * 1e3)
        put(f"{key} score all keys us", median_ms(graphed(t.Score(cache, q, cache.k))) * 1e3)
        del f
        del cache, q
        torch.cuda.empty_cache()


def shapes():
    """Dense decode in f16 and at head_dim 64."""
    for dtype, d in ((torch.float16, 128), (torch.bfloat16, 64), (torch.float16, 64)):
        for n in (8192, 32768, 131072, 524288):
            cache = t.Cache([n], HK, d, dtype, poison=False)
            q = torch.randn(1, HQ, d, device=DEV, dtype=dtype)
            f = t.Decode(cache, q, [t.work_list(end=(n, 0), length=n)] * HK)
            f.plan()
            put(f"decode {str(dtype)[6:]} d{d} b1 {n} taper graph us", median_ms(graphed(f)) * 1e3)
            del f, cache, q
            torch.cuda.empty_cache()


def pinned():
    """Decode from a cache in pinned host memory: dense, and lists of 10%."""
    n = 131072
    cache = t.Cache([n], HK, D, DT, poison=False, pinned=True)
    q = torch.randn(1, HQ, D, device=DEV, dtype=DT)
    f = t.Decode(cache, q, [t.work_list(end=(n, 0), length=n)] * HK)
    f.plan()
    ms = median_ms(f, 5)
    put(f"pinned {n} dense us", ms * 1e3)
    put(f"pinned {n} dense GB/s", 4.0 * n * HK * D / ms / 1e6)
    nb, nt = n // 640, n // 10
    ids = lambda k, most: torch.cat([torch.randperm(most)[:k].sort().values for _ in range(HK)]).to(
        device=DEV, dtype=torch.int32)
    f = t.Decode(cache, q, [t.work_list(blocks=(h * nb, nb), length=n) for h in range(HK)],
                 block_ids=ids(nb, n // 64))
    f.plan()
    put(f"pinned {n} 10% blocks us", median_ms(f, 10) * 1e3)
    f = t.Decode(cache, q, [t.work_list(tokens=(h * nt, nt), length=n) for h in range(HK)],
                 token_ids=ids(nt, n))
    f.plan()
    put(f"pinned {n} 10% tokens us", median_ms(f, 10) * 1e3)
    x = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    y = torch.empty(1 << 30, dtype=torch.uint8, device=DEV)
    put("host to device copy GB/s", x.numel() / median_ms(lambda: y.copy_(x, non_blocking=True), 5) / 1e6)


PARTS = {"decode": decode, "prefill": prefill, "delta": delta, "sparse": sparse, "sampled": sampled,
         "values": values, "shapes": shapes, "pinned": pinned,
         "long": long}
# Modules beside this one that bring their own bench(put, time).
PARTS |= {m: lambda m=m: __import__(m).bench(
    put, lambda f, iters=20: median_ms(graphed(f), iters) * 1e3) for m in (
        "layer", "append", "quantized", "paying", "selection", "sample_attention", "saap", "narrow", "pick", "choose")}

PARTS["columns"] = lambda: __import__("sample_attention").bench_columns(
    put, lambda f, iters=20: median_ms(graphed(f), iters) * 1e3)

if __name__ == "__main__":
    put("device", torch.cuda.get_device_name())
    copy_rate()
    put("commit", os.environ.get("TAPER_COMMIT", "unknown"))
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
