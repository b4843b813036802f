// SAAP's index: keys assigned to the nearest of C centroids, and token ids by cluster.
//
// Assignment is a matrix product of 32 keys by all centroids with a running argmax; the
// index is a stable counting sort, so a cluster's tokens ascend. Both ignore the first
// `sink` tokens and all from `end` on, which decode reads as ranges.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

using AssignParams = TaperAssignParams;
using IndexSpan = TaperIndexSpan;
using IndexParams = TaperIndexParams;

constexpr int kAssignTokens = 32, kAssignWarps = 8, kSegment = 2048;

// Warp w takes every 8th run of 8 centroids for the same 32 keys.
template <class T, int D>
__global__ void __launch_bounds__(kAssignWarps * 32) assign_kernel(const AssignParams p) {
  constexpr int kLoads = D / 32;
  __shared__ float best_s[kAssignWarps][kAssignTokens];
  __shared__ uint32_t id_s[kAssignWarps][kAssignTokens];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, kv_head = blockIdx.y;
  wait_for_predecessor();
  launch_dependents();
  const int first = blockIdx.x * kAssignTokens;
  uint4 a[2][2][kLoads];  // tile of 16 keys, row half
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = min(first + t * 16 + h * 8 + lane / 4, p.tokens - 1);
      const uint4* src = reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.k) + ((int64_t)token * p.kv_heads + kv_head) * D);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) a[t][h][i] = src[quad + 4 * i];
    }
  float best[2][2];
  uint32_t id[2][2];
#pragma unroll
  for (int t = 0; t < 2; ++t) best[t][0] = best[t][1] = -INFINITY, id[t][0] = id[t][1] = 0;
  const T* centroids = static_cast<const T*>(p.centroids) + (int64_t)kv_head * p.clusters * D;
#pragma unroll 2
  for (int c0 = warp * 8; c0 < p.clusters; c0 += kAssignWarps * 8) {
    const uint4* src = reinterpret_cast<const uint4*>(centroids + (int64_t)(c0 + lane / 4) * D);
    uint4 b[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) b[i] = src[quad + 4 * i];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        mma_16x8x16<T>(c, a[t][0][i].x, a[t][1][i].x, a[t][0][i].y, a[t][1][i].y, b[i].x, b[i].y);
        mma_16x8x16<T>(c, a[t][0][i].z, a[t][1][i].z, a[t][0][i].w, a[t][1][i].w, b[i].z, b[i].w);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (c[j] > best[t][j / 2]) best[t][j / 2] = c[j], id[t][j / 2] = c0 + 2 * quad + (j & 1);
    }
  }
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        const float o = __shfl_xor_sync(~0u, best[t][h], d);
        const uint32_t oi = __shfl_xor_sync(~0u, id[t][h], d);
        if (o > best[t][h] || (o == best[t][h] && oi < id[t][h])) best[t][h] = o, id[t][h] = oi;
      }
      if (quad == 0) {
        const int at = t * 16 + h * 8 + lane / 4;
        best_s[warp][at] = best[t][h], id_s[warp][at] = id[t][h];
      }
    }
  __syncthreads();
  const int token = first + (int)threadIdx.x;
  if (threadIdx.x >= kAssignTokens || token >= p.tokens) return;
  float top = best_s[0][threadIdx.x];
  uint32_t c = id_s[0][threadIdx.x];
  for (int w = 1; w < kAssignWarps; ++w) {
    const float o = best_s[w][threadIdx.x];
    const uint32_t oi = id_s[w][threadIdx.x];
    if (o > top || (o == top && oi < c)) top = o, c = oi;
  }
  const uint32_t pos = p.positions[token];
  const uint64_t block =
      p.block_table[(uint64_t)p.token_table[token] * p.table_stride + pos / kBlock];
  p.ids[(block * p.kv_heads + kv_head) * kBlock + pos % kBlock] = (uint16_t)c;
}

using NearestParams = TaperNearestParams;

// A warp a token and head.
__global__ void __launch_bounds__(256) nearest_kernel(const NearestParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int lane = threadIdx.x & 31, kv_head = blockIdx.y;
  const int token = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (token >= p.tokens) return;
  const float* products = p.products + ((int64_t)kv_head * p.tokens + token) * p.clusters;
  float best = -INFINITY;
  uint32_t id = 0;
  const uint32_t clusters = p.clusters;
  constexpr int kAhead = 8;
  for (uint32_t first = lane; first < clusters; first += 32 * kAhead) {
    float x[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) x[j] = first + 32 * j < clusters ? products[first + 32 * j] : -INFINITY;
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (x[j] > best) best = x[j], id = first + 32 * j;
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float o = __shfl_xor_sync(~0u, best, d);
    const uint32_t oi = __shfl_xor_sync(~0u, id, d);
    if (o > best || (o == best && oi < id)) best = o, id = oi;
  }
  if (lane > 0) return;
  const uint32_t pos = p.positions[token];
  const uint64_t block = p.block_table[(uint64_t)p.token_table[token] * p.table_stride + pos / kBlock];
  p.ids[(block * p.kv_heads + kv_head) * kBlock + pos % kBlock] = (uint16_t)id;
}

// One warp a segment of 2,048 tokens; FILL: writes ids at the offsets, else counts.
template <bool FILL>
__global__ void __launch_bounds__(32) index_kernel(const IndexParams p) {
  extern __shared__ uint32_t at[];  // [clusters]
  const int lane = threadIdx.x, list = blockIdx.y;
  wait_for_predecessor();
  launch_dependents();
  const IndexSpan span = p.spans[list / p.kv_heads];
  uint32_t* counts = p.counts + ((int64_t)list * p.segments + blockIdx.x) * p.clusters;
  for (int c = lane; c < p.clusters; c += 32) at[c] = FILL ? counts[c] : 0;
  __syncwarp();
  const uint32_t* table = p.block_table + (uint64_t)span.table * p.table_stride;
  const int kv_head = list % p.kv_heads;
  const uint32_t first = span.begin + blockIdx.x * kSegment, last = min(first + kSegment, span.end);
  uint32_t* tokens = p.tokens + (int64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t i = first; i < last; i += 8 * 32) {
    uint32_t id[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t t = i + j * 32 + lane;
      id[j] = t < last ? p.ids[((uint64_t)table[t / kBlock] * p.kv_heads + kv_head) * kBlock +
                               t % kBlock]
                       : kClustersMost + lane;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t t = i + j * 32 + lane;
      const uint32_t peers = __match_any_sync(~0u, id[j]), before = peers & ((1u << lane) - 1);
      if (t < last) {
        const uint32_t to = at[id[j]] + __popc(before);
        if (FILL && to < (uint32_t)p.capacity) tokens[to] = t;
      }
      __syncwarp();
      if (t < last && before == 0) at[id[j]] += __popc(peers);
      __syncwarp();
    }
  }
  if (!FILL)
    for (int c = lane; c < p.clusters; c += 32) counts[c] = at[c];
}

// Counts to first places, clusters outermost, then segments.
__global__ void __launch_bounds__(1024) index_scan_kernel(const IndexParams p) {
  __shared__ uint32_t scratch[33];
  const int list = blockIdx.x, tid = threadIdx.x;
  wait_for_predecessor();
  launch_dependents();
  const IndexSpan span = p.spans[list / p.kv_heads];
  const uint32_t n = span.end > span.begin ? span.end - span.begin : 0;
  const int segments = (int)((n + kSegment - 1) / kSegment);
  uint32_t* counts = p.counts + (int64_t)list * p.segments * p.clusters;
  uint32_t* offsets = p.offsets + (int64_t)list * (p.clusters + 1);
  uint32_t base = 0;
  for (int c0 = 0; c0 < p.clusters; c0 += 1024) {
    const int c = c0 + tid;
    uint32_t sum = 0;
    if (c < p.clusters)
#pragma unroll 8
      for (int s = 0; s < segments; ++s) sum += counts[(int64_t)s * p.clusters + c];
    uint32_t total;
    uint32_t to = base + block_exclusive_sum(sum, scratch, total);
    if (c < p.clusters) {
      offsets[c] = to;
#pragma unroll 8
      for (int s = 0; s < segments; ++s) {
        const uint32_t x = counts[(int64_t)s * p.clusters + c];
        counts[(int64_t)s * p.clusters + c] = to;
        to += x;
      }
    }
    base += total;
  }
  if (tid == 0) offsets[p.clusters] = base;
}

}  // namespace taper
