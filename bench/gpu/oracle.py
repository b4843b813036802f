"""What the checks compare with: attention in float64, the CPU's permutation, lists of keys."""
import math

import torch

import taper_gpu as t

DEV = "cuda"


def rel(a, b):
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def attend64(q, k, v, seen, ln_w=None):
    """q [rows, q_heads, d]; k, v [kv_heads, n, d]; seen [rows, n] or [q_heads, rows, n]."""
    rows, qh, d = q.shape
    g = qh // k.shape[0]
    kk = k.double().repeat_interleave(g, 0)
    vv = v.double().repeat_interleave(g, 0)
    s = torch.einsum("rhd,hnd->hrn", q.double(), kk) * d**-0.5
    if ln_w is not None:
        s = s + ln_w
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    o = torch.einsum("hrn,hnd->rhd", torch.softmax(s, -1).nan_to_num(0.0), vv)
    return o, lse.t()


def causal(pos, n, sink=0, window=0):
    """What rows at `pos` see of n keys: all before them, or the first `sink` and the `window` last ones."""
    key = torch.arange(n, device=DEV)
    p = pos.to(DEV)[:, None]
    seen = key <= p
    if window:
        seen &= (key < sink) | (key + window > p)
    return seen


def philox(key, c):
    m = 0xFFFFFFFF
    k0, k1 = key
    a, b, c2, d = c
    for _ in range(10):
        p, q = a * 0xD2511F53, c2 * 0xCD9E8D57
        a, b, c2, d = (q >> 32) ^ b ^ k0, q & m, (p >> 32) ^ d ^ k1, p & m
        k0, k1 = (k0 + 0x9E3779B9) & m, (k1 + 0xBB67AE85) & m
    return a, b, c2, d


def permuted(n, seed, layer, head, position):
    """The whole permutation of 0..n-1, in order."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    keys = [*philox(key, (layer, head, position, 0x50450000)),
            *philox(key, (layer, head, position, 0x50450001))][:6]
    bits = (n - 1).bit_length()
    low = bits - bits // 2

    def mix(x):
        x = (x & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x85EBCA77 & 0xFFFFFFFF
        return x ^ (x >> 13)

    def land(x):
        left, right = x >> low, x & ((1 << low) - 1)
        for r, k in enumerate(keys):
            if r % 2 == 0:
                left = left ^ (mix(right + k) & ((1 << (bits // 2)) - 1))
            else:
                right = right ^ (mix(left + k) & ((1 << low) - 1))
        return (left << low) | right

    point = land(torch.arange(n, dtype=torch.int64))
    while (beyond := point >= n).any():
        point[beyond] = land(point[beyond])
    return point


def fixed_list(n, h, sink, win, blocks, tokens, bid, tid):
    """A list of sink, window, some blocks and some tokens; and which keys it reads."""
    sink, win = min(sink, n), max(min(win, n - sink), 0)
    seen = torch.zeros(n, dtype=torch.bool)
    seen[:sink], seen[n - win:] = True, True
    b0, t0 = len(bid), len(tid)
    first, last = (sink + 63) // 64, (n - win) // 64
    if blocks and last - first > blocks:
        for b in sorted((torch.randperm(last - first)[:blocks] + first).tolist()):
            seen[b * 64:b * 64 + 64] = True
            bid.append(b)
    if tokens:
        free = (~seen).nonzero().flatten()
        ids = free[torch.randperm(len(free))[:min(tokens, len(free) // 4)]].sort().values
        seen[ids] = True
        tid += ids.tolist()
    return t.work_list((0, n - win), (sink, n), (b0, len(bid) - b0), (t0, len(tid) - t0),
                       length=n), seen


def paged_list(n, h, sink, win, count, page, pids):
    """A list of sink, window and some pages between them, cut where they begin or end; and which keys it reads."""
    seen = torch.zeros(n, dtype=torch.bool)
    begin, end = min(sink + h, n), max(n - win - h, 0)
    if begin + 1 >= end:
        seen[:] = True
        return t.work_list(end=(n, 0), length=n), seen
    pages = torch.arange(begin // page, math.ceil(end / page))
    # The first and the last are among them, now and then.
    pick = pages[torch.randperm(len(pages))[:count]].tolist() + [pages[0].item(), pages[-1].item()][:h % 3]
    pick = sorted(set(pick))
    first = len(pids) * page
    pids += pick
    for p in pick:
        seen[p * page:(p + 1) * page] = True
    front = max(begin - pick[0] * page, 0) if pick else 0
    seen[:begin] = False
    seen[end:] = False
    tokens = int(seen.sum())
    seen[:begin] = True
    seen[end:] = True
    return t.work_list((0, end), (begin, n), tokens=(first + front, tokens), length=n), seen
