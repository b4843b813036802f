// The cluster of each of a few new keys, in one launch: the rotary embedding is taken off, and the products with a head's
// centroids are compared by a cluster of thread blocks. A key's cluster does not depend on the keys beside it. And that of many,
// by products that are there.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../project/sums.cuh"
#include "../select/cluster.cuh"

namespace taper {

using KeyClusterParams = TaperKeyClusterParams;

constexpr int kKeyWarps = 8, kKeyRows = 32 * kKeyWarps;  // centroids of a thread block at a time, in its registers
constexpr int kKeyTokens = 16, kKeyTeam = 8;             // keys of a launch's layer; thread blocks of a head, at most

// Products in their order, the first of equal ones largest; what is no number is like the smallest.
__device__ __forceinline__ uint64_t ranked_product(float x, uint32_t cluster) {
  x = isnan(x) ? -INFINITY : x + 0.f;
  const uint32_t i = __float_as_uint(x);
  return (uint64_t)(i >> 31 ? ~i : i | 0x80000000u) << 32 | (~cluster);
}
__device__ __forceinline__ uint64_t warp_most(uint64_t x) {
  const uint32_t high = __reduce_max_sync(~0u, (uint32_t)(x >> 32));
  return (uint64_t)high << 32 | __reduce_max_sync(~0u, (uint32_t)(x >> 32) == high ? (uint32_t)x : 0u);
}

// A lane holds E neighbouring elements of the key and of 32 centroids.
template <class T, int E>
__global__ void __launch_bounds__(32 * kKeyWarps, 1) key_clusters_kernel(const KeyClusterParams p) {
  using Vec = typename std::conditional<E == 4, float4, float2>::type;
  constexpr int D = 32 * E;
  __shared__ uint64_t warps[kKeyTokens][kKeyWarps], own[kKeyTokens];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const uint32_t rank = cluster_rank(), team = cluster_size();
  const int first = blockIdx.z * kKeyTokens, count = min(p.tokens - first, kKeyTokens);
  const float* centroids = p.centroids + (int64_t)kv_head * p.clusters * D + lane * E;
  if (lane < kKeyTokens) warps[lane][warp] = 0;
  __syncwarp();
  bool waits = true;
#pragma unroll 1
  for (int c0 = (rank * kKeyWarps + warp) * 32; c0 < p.clusters || waits; c0 += team * kKeyRows) {
    float w[32][E];
#pragma unroll
    for (int i = 0; i < 32; ++i)
      *reinterpret_cast<Vec*>(w[i]) = *reinterpret_cast<const Vec*>(centroids + (int64_t)min(c0 + i, p.clusters - 1) * D);
    // Centroids are nobody's output. Who is launched next may begin once all before this one has ended.
    if (waits) {
      wait_for_predecessor();
      launch_dependents();
      waits = false;
    }
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const uint32_t slot = p.slots[first + t];
      const T* key = static_cast<const T*>(p.k) + ((int64_t)(slot / kBlock) * p.kv_heads + kv_head) * kBlock * D +
                     slot % kBlock * D;
      float x[E];
#pragma unroll
      for (int e = 0; e < E; ++e) x[e] = to_float(key[lane * E + e]);
      if (p.cos) {
        // Half the lanes hold what rotates into the others'.
        const int64_t at = (int64_t)(first + t) * (D / 2) + lane % 16 * E;
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const float other = __shfl_xor_sync(~0u, x[e], 16), turn = p.sin[at + e] * other;
          x[e] = fmaf(x[e], p.cos[at + e], lane < 16 ? turn : -turn);
        }
      }
      float sums[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        sums[i] = 0.f;
#pragma unroll
        for (int e = 0; e < E; ++e) sums[i] = fmaf(w[i][e], x[e], sums[i]);
      }
      warp_sums(sums);
      const uint64_t best = warp_most(c0 + lane < p.clusters ? ranked_product(sums[0], c0 + lane) : 0);
      if (lane == 0) warps[t][warp] = max(warps[t][warp], best);
    }
  }
  __syncthreads();
  if (threadIdx.x < kKeyTokens) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kKeyWarps; ++i) best = max(best, warps[threadIdx.x][i]);
    own[threadIdx.x] = best;
  }
  cluster_release();
  cluster_wait();
  if (rank == 0 && (int)threadIdx.x < count) {
    uint64_t best = 0;
    for (uint32_t r = 0; r < team; ++r) {
      const uint32_t* of = reinterpret_cast<const uint32_t*>(&own[threadIdx.x]);
      best = max(best, (uint64_t)read_in_block(of[1], r) << 32 | read_in_block(of[0], r));
    }
    const uint32_t slot = p.slots[first + threadIdx.x];
    p.ids[((int64_t)(slot / kBlock) * p.kv_heads + kv_head) * kBlock + slot % kBlock] = (uint16_t)~(uint32_t)best;
  }
  // No block leaves while the first may read what it found.
  __syncwarp();
  cluster_release();
  cluster_wait();
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

}  // namespace taper
