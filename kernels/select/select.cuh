// The k best entries of each list of scores, as ascending ids.
//
// A radix search over an order-preserving integer form of the score finds the k-th
// value in three passes of 11, 11 and 10 bits. Ties go to the lower id, so the result
// is a function of the scores alone. One thread block a list; the lists that go on to
// the decode attention are patched in place, without the host.
#pragma once

#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

enum SelectTarget : int32_t { kNoTarget = 0, kBlocks = 1, kTokens = 2 };

struct SelectParams {
  const float* scores;     // [lists, stride]
  const uint32_t* begins;  // [lists], first candidate; null: 0
  const uint32_t* ends;    // [lists], one past the last candidate; null: `entries`
  const uint32_t* ks;      // [lists]; null: `k`
  uint32_t* ids;           // [lists, capacity], ascending
  uint32_t* counts;        // [lists], or null
  WorkList* work;          // [lists], patched as `target` says; or null
  int32_t lists, stride, capacity, entries, k, target, overlap, reserved;
};

constexpr int kSelectThreads = 1024, kSelectBins = 2048, kHistograms = 4;

__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t u = __float_as_uint(x);
  if (x != x) return 0;  // NaN ranks last.
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const SelectParams p) {
  __shared__ uint32_t hist[kHistograms][kSelectBins];
  __shared__ uint32_t scratch[33], found_bin, found_need;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, list = blockIdx.x;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t begin = p.begins ? p.begins[list] : 0;
  const uint32_t end = p.ends ? p.ends[list] : (uint32_t)p.entries;
  const uint32_t n = end > begin ? end - begin : 0;
  const uint32_t k = min(min(p.ks ? p.ks[list] : (uint32_t)p.k, n), (uint32_t)p.capacity);
  const float* s = p.scores + (int64_t)list * p.stride + begin;

  uint32_t prefix = 0, fixed = 0, need = k;  // `fixed` bits of the k-th value are in prefix
  constexpr int kWidth[3] = {11, 11, 10};
  for (int pass = 0; pass < 3 && k < n && k > 0; ++pass) {
    const uint32_t width = kWidth[pass], shift = 32 - fixed - width;
    for (int i = tid; i < kHistograms * kSelectBins; i += kSelectThreads) (&hist[0][0])[i] = 0;
    __syncthreads();
    for (uint32_t i = tid; i < n; i += kSelectThreads) {
      const uint32_t u = ordered(s[i]);
      if (fixed == 0 || u >> (32 - fixed) == prefix)
        atomicAdd(&hist[warp % kHistograms][(u >> shift) & ((1u << width) - 1)], 1u);
    }
    __syncthreads();
    // Thread t owns bins 2047 - 2t and 2046 - 2t, so sums run from the top.
    uint32_t c[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int bin = kSelectBins - 1 - 2 * tid - j;
      c[j] = 0;
#pragma unroll
      for (int h = 0; h < kHistograms; ++h) c[j] += hist[h][bin];
    }
    uint32_t total;
    const uint32_t above = block_exclusive_sum(c[0] + c[1], scratch, total);
    if (above < need && need <= above + c[0] + c[1]) {
      const bool upper = need <= above + c[0];
      found_bin = kSelectBins - 1 - 2 * tid - (upper ? 0 : 1);
      found_need = need - above - (upper ? 0 : c[0]);
    }
    __syncthreads();
    prefix = (prefix << width) | found_bin;
    need = found_need;
    fixed += width;
    __syncthreads();
  }
  // All above the k-th value, and the first `need` equal to it.
  const bool all = k == n;
  uint32_t* ids = p.ids + (int64_t)list * p.capacity;
  const uint32_t segment = ((n + kSelectThreads - 1) / kSelectThreads) * 32;
  const uint32_t from = min(warp * segment, n), to = min(from + segment, n);
  uint32_t above = 0, equal = 0;
  if (k > 0) {
    for (uint32_t i = from; i < to; i += 32) {
      const uint32_t u = i + lane < to ? ordered(s[i + lane]) : 0;
      const bool live = i + lane < to;
      above += __popc(__ballot_sync(~0u, live && (all || u > prefix)));
      equal += __popc(__ballot_sync(~0u, live && !all && u == prefix));
    }
    uint32_t total;
    above = __shfl_sync(~0u, block_exclusive_sum(lane == 0 ? above : 0, scratch, total), 0);
    equal = __shfl_sync(~0u, block_exclusive_sum(lane == 0 ? equal : 0, scratch, total), 0);
    for (uint32_t i = from; i < to; i += 32) {
      const bool live = i + lane < to;
      const uint32_t u = live ? ordered(s[i + lane]) : 0, below = (1u << lane) - 1;
      const uint32_t gt = __ballot_sync(~0u, live && (all || u > prefix));
      const uint32_t eq = __ballot_sync(~0u, live && !all && u == prefix);
      const uint32_t my_eq = equal + __popc(eq & below), my_gt = above + __popc(gt & below);
      const bool take = (gt >> lane & 1) || ((eq >> lane & 1) && my_eq < need);
      if (take) ids[my_gt + min(my_eq, need)] = begin + i + lane;
      above += __popc(gt);
      equal += __popc(eq);
    }
  }
  if (tid == 0) {
    if (p.counts) p.counts[list] = k;
    if (p.work && p.target == kBlocks) {
      p.work[list].block_first = list * p.capacity;
      p.work[list].block_count = k;
    } else if (p.work && p.target == kTokens) {
      p.work[list].token_first = list * p.capacity;
      p.work[list].token_count = k;
    }
  }
}

}  // namespace taper
