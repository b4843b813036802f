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

struct PickParams {
  const void* q;                // [rows, q_heads, width]
  const void* view;             // [blocks, kv_heads, width]: means, or upper bounds if `lower`
  const void* lower;            // lower bounds, or null
  const uint32_t* block_table;  // [tables, table_stride]
  const uint32_t* row_table;    // [rows] or null
  const uint32_t* lens;         // [rows], visible tokens
  const uint32_t* begins;       // [lists], first candidate; null: 0
  const uint32_t* ends;         // [lists], one past the last candidate; null: all blocks
  const uint32_t* ks;           // [lists]; null: `k`
  uint32_t* keys;               // [lists, stride], scratch
  uint32_t* ids;                // [lists, capacity], ascending
  uint32_t* counts;             // [lists], or null
  WorkList* work;               // [lists], given the slice of ids; or null
  uint32_t* sync;               // [lists * 32], zero before and after
  int32_t rows, q_heads, kv_heads, width, dtype, table_stride;
  int32_t stride;  // most candidates of a list, at most kPickMost
  int32_t capacity, k, overlap;
};

constexpr int kPickThreads = 512, kPickWarps = kPickThreads / 32, kPickBins = 2 * kPickThreads;
constexpr int kPickMost = 32768;

template <class T, int W, int NT, bool BOUNDS>
__global__ void __launch_bounds__(kPickThreads, 1) pick_kernel(const PickParams p) {
  using View = ViewRows<T, W, NT, BOUNDS>;
  extern __shared__ uint32_t keys[];
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
              kv_head, (uint32_t)p.kv_heads, 1, lane};
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

  uint32_t lo = ~0u, hi = 0;
#pragma unroll 8
  for (uint32_t i = tid; i < n; i += kPickThreads) {
    const uint32_t u = __ldcg(out + i);
    keys[i] = u;
    lo = min(lo, u), hi = max(hi, u);
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
#pragma unroll 4
    for (uint32_t i = tid; i < n; i += kPickThreads) {
      const uint32_t u = keys[i];
      if (u >= lo && u <= hi) atomicAdd(&bins[(u - lo) >> shift], 1u);
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
  // All above the range, and the first `need` of those in it. A warp owns a run of keys.
  const uint32_t share = (n + kPickThreads - 1) / kPickThreads * 32, first = min(warp * share, n);
  const uint32_t stop = min(first + share, n);
  uint32_t mine = 0;  // of the former, and of the latter in the upper half
#pragma unroll 4
  for (uint32_t i = first + lane; i < stop; i += 32)
    mine += keys[i] > hi ? 1 : keys[i] >= lo ? 1 << 16 : 0;
  mine = __reduce_add_sync(~0u, mine);
  uint32_t all;
  const uint32_t before = __shfl_sync(~0u, block_exclusive_sum(lane == 0 ? mine : 0, scratch, all), 0);
  uint32_t gt = before & 0xFFFF, eq = before >> 16;
#pragma unroll 2
  for (uint32_t i = first + lane; i - lane < stop; i += 32) {
    const uint32_t u = i < stop ? keys[i] : 0, below = (1u << lane) - 1;
    const uint32_t over = __ballot_sync(~0u, i < stop && u > hi);
    const uint32_t equal = __ballot_sync(~0u, i < stop && u <= hi && u >= lo);
    const uint32_t to_gt = gt + __popc(over & below), to_eq = eq + __popc(equal & below);
    if ((over >> lane & 1) || ((equal >> lane & 1) && to_eq < need))
      p.ids[(int64_t)list * p.capacity + to_gt + min(to_eq, need)] = begin + i;
    gt += __popc(over), eq += __popc(equal);
  }
  if (tid == 0) {
    if (p.counts) p.counts[list] = k;
    if (p.work) p.work[list].block_first = list * p.capacity, p.work[list].block_count = k;
    p.sync[list * kTeamLine] = 0;
  }
}

}  // namespace taper
