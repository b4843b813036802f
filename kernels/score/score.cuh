// Scores of query rows against a view of the keys.
//
// A view is [blocks, kv_heads, per_block, width] beside the cache: all keys
// (per_block 64), block means (1), label channels (64, narrow), or a pair of upper and
// lower bounds, whose score sum_j max(q_j hi_j, q_j lo_j) is the product of q's positive
// part with hi plus that of its negative part with lo. One warp scores 64 entries for
// all heads of a group. LISTED: of all keys some are scored, in the order of a list of tokens.
#pragma once

#include "view.cuh"

namespace taper {

using ScoreParams = TaperScoreParams;

constexpr int kScoreWarps = 8;

template <class T, int W, int NT, bool BOUNDS, bool LISTED>
__global__ void __launch_bounds__(kScoreWarps * 32) score_kernel(const ScoreParams p) {
  using View = ViewRows<T, W, NT, BOUNDS>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
  const int kv_head = blockIdx.y, row = blockIdx.z, group = p.q_heads / p.kv_heads;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t len = p.lens[row], span = kBlock / p.per_block;
  const int64_t list = (int64_t)row * p.kv_heads + kv_head;
  const uint32_t entries = LISTED ? p.counts[list] : (len + span - 1) / span;
  const uint32_t* ids = LISTED ? p.ids + list * p.stride : nullptr;
  View view{p.block_table + (uint64_t)row * p.table_stride, LISTED ? len : entries,
            (uint32_t)kv_head, (uint32_t)p.kv_heads, (uint32_t)p.per_block, (uint32_t)(p.pitch ? p.pitch : W), lane};
  const void* q = LISTED && p.q_few && entries <= (uint32_t)p.few ? p.q_few : p.q;
  view.load_queries(static_cast<const T*>(q) + ((int64_t)row * p.q_heads + kv_head * group) * W, group);

  // As many of the four tiles of 16 entries as registers allow are in flight.
  constexpr int kFull = View::kLoads * (BOUNDS ? 2 : 1), kAhead = kFull <= 2 ? 4 : kFull == 4 ? 2 : 1;
  typename View::Rows rows[kAhead], lower[BOUNDS ? kAhead : 1];
  auto fetch_tiles = [&](uint32_t from) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if constexpr (LISTED) {
        const uint32_t e = from + a * 16 + lane / 4;
        view.fetch_lines(rows[a], p.view, view.place(ids[min(e, entries - 1)]), view.place(ids[min(e + 8, entries - 1)]));
        continue;
      }
      view.fetch(rows[a], p.view, from + a * 16);
      if (BOUNDS) view.fetch(lower[a], p.lower, from + a * 16);
    }
  };
  if (blockIdx.x * kScoreWarps * 64 + warp * 64 < entries)
    fetch_tiles((blockIdx.x * kScoreWarps + warp) * 64);
#pragma unroll 1
  for (uint32_t first = (blockIdx.x * kScoreWarps + warp) * 64; first < entries;
       first += gridDim.x * kScoreWarps * 64) {
    float c[4][NT][4];
#pragma unroll
    for (int r0 = 0; r0 < 4; r0 += kAhead) {
      if (r0 > 0) fetch_tiles(first + r0 * 16);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int r = r0 + a;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) c[r][t][i] = 0.f;
        view.multiply(c[r], rows[a], true);
        if (BOUNDS) view.multiply(c[r], lower[a], false);
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) c[r][t][i] *= p.scale;
      }
    }
    // The next run's first rows come while this one's scores are written.
    if (first + gridDim.x * kScoreWarps * 64 < entries)
      fetch_tiles(first + gridDim.x * kScoreWarps * 64);

    auto head_of = [&](int t, int i) { return t * 8 + 2 * quad + (i & 1); };
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t e = first + r * 16 + lane / 4 + 8 * half;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int h = head_of(t, i);
            if (h < group && e < entries)
              p.out[((int64_t)row * p.q_heads + kv_head * group + h) * p.stride + e] = c[r][t][2 * half + i];
          }
      }
    }
    if (!p.tile_max) continue;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = -INFINITY, sum = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t e = first + (k / 2) * 16 + lane / 4 + 8 * (k & 1);
          if (e < entries) top = fmaxf(top, c[k / 2][t][2 * (k & 1) + i]);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t e = first + (k / 2) * 16 + lane / 4 + 8 * (k & 1);
          if (e < entries) sum += exp2_fast((c[k / 2][t][2 * (k & 1) + i] - top) * kLog2e);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        const int h = head_of(t, i);
        if (lane < 4 && h < group) {
          const int64_t at =
              ((int64_t)row * p.q_heads + kv_head * group + h) * p.tile_stride + first / 64;
          p.tile_max[at] = top;
          p.tile_sum[at] = sum;
        }
      }
  }
}

}  // namespace taper
