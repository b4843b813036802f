// The blocks that a group of query heads wants most, scored and chosen in one launch.
//
// A team of thread blocks scores a list's blocks against their bounds or means, the best
// of the group's heads counting; whichever block of the team is done last chooses. Keys are
// counted in bins between the smallest and the largest, then in the bin that holds the last one
// to take, and so on: two or three rounds, where bits from the top would need four and meet in
// few bins. Ties go to the lower id, as everywhere.
#pragma once

#include "../common/team.cuh"
#include "../common/worklist.cuh"
#include "../score/view.cuh"
#include "ordered.cuh"

namespace taper {

using PickParams = TaperPickParams;

constexpr int kPickThreads = 512, kPickWarps = kPickThreads / 32, kPickBins = 2 * kPickThreads;
constexpr int kPickMost = 32768;

template <class T, int W, int NT, bool BOUNDS>
__global__ void __launch_bounds__(kPickThreads, 1) pick_kernel(const PickParams p) {
  using View = ViewRows<T, W, NT, BOUNDS>;
  extern __shared__ __align__(16) uint32_t keys[];
  __shared__ uint32_t bins[kPickBins], scratch[33], least, most, found_bin, found_need, found_size, last;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = lane & 3;
  const uint32_t team = team_size(p.kv_heads), list = blockIdx.x / team, rank = blockIdx.x % team;
  const uint32_t row = list / p.kv_heads, kv_head = list % p.kv_heads, group = p.q_heads / p.kv_heads;
  if (tid == 0) least = ~0u, most = 0;
  bins[2 * tid] = bins[2 * tid + 1] = 0;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t entries = (p.lens[row] + kBlock - 1) / kBlock;
  const uint32_t begin = p.begins ? p.begins[list] : 0;
  const uint32_t end = min(p.ends ? p.ends[list] : entries, entries);
  const uint32_t n = end > begin ? min(end - begin, (uint32_t)p.stride) : 0;
  uint32_t* out = p.keys + (int64_t)list * p.stride;
  if (n > 0) {
    View view{p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride, end,
              kv_head, (uint32_t)p.kv_heads, 1, W, lane};
    view.load_queries(static_cast<const T*>(p.q) + ((int64_t)row * p.q_heads + kv_head * group) * W, group);
#pragma unroll 1
    for (uint32_t at = (rank + warp * team) * 16; at < n; at += kPickWarps * team * 16) {
      typename View::Rows upper, lower;
      view.fetch(upper, p.view, begin + at);
      if (BOUNDS) view.fetch(lower, p.lower, begin + at);
      float c[NT][4] = {}, best[2] = {-INFINITY, -INFINITY};
      view.multiply(c, upper, true);
      if (BOUNDS) view.multiply(c, lower, false);
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (t * 8 + 2 * quad + (i & 1) < group) best[i / 2] = fmaxf(best[i / 2], c[t][i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], d));
        const uint32_t e = at + lane / 4 + 8 * h;
        if (quad == 0 && e < n) out[e] = ordered(best[h]);
      }
    }
  }
  __syncthreads();
  if (tid == 0) last = add_acq_rel(p.sync + list * kTeamLine, 1) == team - 1;
  __syncthreads();
  if (!last) return;

  // Four keys at a time wherever keys are walked; beyond the end they rank below all.
  uint32_t lo = ~0u, hi = 0;
  const uint32_t fours = (n + 3) / 4;
  const bool aligned = p.stride % 4 == 0;
#pragma unroll 4
  for (uint32_t i = tid; i < fours; i += kPickThreads) {
    uint4 u;
    if (aligned) {
      u = __ldcg(reinterpret_cast<const uint4*>(out) + i);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) (&u.x)[k] = __ldcg(out + min(4 * i + k, n - 1));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t& x = (&u.x)[k];
      if (4 * i + k < n) lo = min(lo, x), hi = max(hi, x);
      else x = 0;
    }
    reinterpret_cast<uint4*>(keys)[i] = u;
  }
  lo = __reduce_min_sync(~0u, lo), hi = __reduce_max_sync(~0u, hi);
  if (lane == 0) atomicMin(&least, lo), atomicMax(&most, hi);
  __syncthreads();
  lo = least, hi = most;
  uint32_t need = min(min(p.ks ? p.ks[list] : (uint32_t)p.k, n), (uint32_t)p.capacity);
  const uint32_t k = need;
  if (need == 0) lo = ~0u, hi = ~0u;  // No key is above, and none equal is needed.
  if (need == n) lo = 0;
#pragma unroll 1
  while (need > 0 && need < n && lo < hi) {
    const int bits = 32 - __clz(hi - lo), shift = max(bits - 10, 0);
#pragma unroll 2
    for (uint32_t i = tid; i < fours; i += kPickThreads) {
      const uint4 u = reinterpret_cast<const uint4*>(keys)[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t x = (&u.x)[k];
        if (x >= lo && x <= hi && 4 * i + k < n) atomicAdd(&bins[(x - lo) >> shift], 1u);
      }
    }
    __syncthreads();
    // From the top: thread t has bins 1023 - 2t and 1022 - 2t.
    const int top = kPickBins - 1 - 2 * tid;
    const uint32_t a = bins[top], b = bins[top - 1];
    uint32_t all;
    const uint32_t above = block_exclusive_sum(a + b, scratch, all);
    if (above < need && need <= above + a + b) {
      const bool upper = need <= above + a;
      found_bin = upper ? top : top - 1;
      found_need = need - (upper ? above : above + a);
      found_size = upper ? a : b;
    }
    bins[top] = bins[top - 1] = 0;
    __syncthreads();
    need = found_need;
    lo += found_bin << shift;
    hi = min(hi, lo + ((1u << shift) - 1));
    if (need == found_size) break;  // All of them.
  }
  // All above the range, and the first `need` of those in it. A thread owns a run of keys.
  const uint32_t share = (fours + kPickThreads - 1) / kPickThreads, first = tid * share;
  const uint32_t stop = min(first + share, fours);
  uint32_t mine = 0;  // of the former, and of the latter in the upper half
#pragma unroll 4
  for (uint32_t i = first; i < stop; ++i) {
    const uint4 u = reinterpret_cast<const uint4*>(keys)[i];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (4 * i + k < n) mine += (&u.x)[k] > hi ? 1 : (&u.x)[k] >= lo ? 1 << 16 : 0;
  }
  uint32_t all;
  const uint32_t before = block_exclusive_sum(mine, scratch, all);
  uint32_t gt = before & 0xFFFF, eq = before >> 16;
  uint32_t* ids = p.ids + (int64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t i = first; i < stop && mine > 0; ++i) {
    const uint4 u = reinterpret_cast<const uint4*>(keys)[i];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t at = 4 * i + k, x = (&u.x)[k];
      const bool over = at < n && x > hi, equal = at < n && x <= hi && x >= lo;
      if (over || (equal && eq < need)) ids[gt + min(eq, need)] = begin + at;
      gt += over, eq += equal;
    }
  }
  if (tid == 0) {
    if (p.counts) p.counts[list] = k;
    if (p.work) p.work[list].block_first = list * p.capacity, p.work[list].block_count = k;
    p.sync[list * kTeamLine] = 0;
  }
}

}  // namespace taper
