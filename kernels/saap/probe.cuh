// Whole clusters by how likely they are, as many as a limit on their tokens allows: the exact counterpart of a
// choice that may not take what it likes. A thread block a list: it counts the clusters' tokens between the list's two
// ranges, ranks clusters, takes them in that order, and writes the tokens of those taken, ascending.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

using ProbeParams = TaperProbeParams;

constexpr int kProbeThreads = 1024, kProbeMost = 4096;

struct ProbeShared {
  uint64_t rank[kProbeMost];  // probabilities as bits, of equals the first cluster on top
  uint32_t size[kProbeMost];  // tokens of each cluster; then whether it is taken
  uint32_t scratch[33], cut;
  float warps[32];
};

// Over the thread block; all threads get the result.
template <class F>
__device__ __forceinline__ float block_reduce(float x, float* warps, F f) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = f(x, __shfl_xor_sync(~0u, x, d));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
  __syncthreads();
  x = warps[threadIdx.x & 31];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = f(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

__global__ void __launch_bounds__(kProbeThreads) probe_kernel(const ProbeParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  ProbeShared& sh = *reinterpret_cast<ProbeShared*>(raw);
  constexpr int kOwn = kProbeMost / kProbeThreads;
  const uint32_t tid = threadIdx.x, list = blockIdx.x, clusters = p.clusters;
  const uint32_t row = list / p.kv_heads, kv_head = list % p.kv_heads, group = p.q_heads / p.kv_heads;
  uint32_t padded = 32;
  while (padded < clusters) padded *= 2;
  for (uint32_t c = tid; c < clusters; c += kProbeThreads) sh.size[c] = 0;
  wait_for_predecessor();
  launch_dependents();
  WorkList& w = p.work[list];
  const uint32_t from = w.end[0], to = w.begin[1];
  if (from >= to) {
    if (tid == 0) w.token_first = w.token_count = 0;
    return;
  }
  const uint32_t* table = p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride;
  auto cluster_of = [&](uint32_t t) -> uint32_t {
    return p.ids[((uint64_t)table[t / kBlock] * p.kv_heads + kv_head) * kBlock + t % kBlock];
  };
  __syncthreads();
  for (uint32_t t = from + tid; t < to; t += kProbeThreads) {
    const uint32_t c = cluster_of(t);
    if (c < clusters) atomicAdd(&sh.size[c], 1u);
  }

  // The group's probability of each cluster.
  float mass[kOwn] = {};
#pragma unroll 1
  for (uint32_t g = 0; g < group; ++g) {
    const float* logits = p.logits + ((uint64_t)row * p.q_heads + kv_head * group + g) * clusters;
    float x[kOwn], top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const uint32_t c = tid + j * kProbeThreads;
      x[j] = c < clusters ? logits[c] : -INFINITY;
      top = fmaxf(top, x[j]);
    }
    top = block_reduce(top, sh.warps, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int j = 0; j < kOwn; ++j) sum += x[j] = tid + j * kProbeThreads < clusters ? expf(x[j] - top) : 0.f;
    sum = block_reduce(sum, sh.warps, [](float a, float b) { return a + b; });
#pragma unroll
    for (int j = 0; j < kOwn; ++j) mass[j] += x[j] / sum;
  }
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const uint32_t c = tid + j * kProbeThreads;
    // The bits of what is not negative order as the numbers do.
    if (c < padded) sh.rank[c] = c < clusters ? (uint64_t)__float_as_uint(mass[j]) << 32 | ~c : 0;
  }
  // The largest first.
  for (uint32_t size = 2; size <= padded; size *= 2)
    for (uint32_t step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (uint32_t i = tid; i < padded / 2; i += kProbeThreads) {
        const uint32_t a = 2 * i - (i & (step - 1)), b = a + step;
        const uint64_t x = sh.rank[a], y = sh.rank[b];
        if ((x < y) == ((a & size) == 0)) sh.rank[a] = y, sh.rank[b] = x;
      }
    }
  // How many are taken: those up to the first that would be too much.
  if (tid == 0) sh.cut = min(clusters, (uint32_t)p.most);
  __syncthreads();
  const uint32_t limit = p.limits[list], first = tid * kOwn;
  uint32_t held[kOwn], mine = 0, all;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    held[j] = first + j < clusters ? sh.size[~(uint32_t)sh.rank[first + j]] : 0;
    mine += held[j];
  }
  uint32_t before = block_exclusive_sum(mine, sh.scratch, all);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    before += held[j];
    const bool spared = first + j == 0 && p.first;
    if (first + j < clusters && before > limit && !spared) {
      atomicMin(&sh.cut, first + j);
      break;
    }
  }
  __syncthreads();
  const uint32_t cut = sh.cut;
  for (uint32_t i = tid; i < clusters; i += kProbeThreads) sh.size[~(uint32_t)sh.rank[i]] = i < cut;
  __syncthreads();

  // Runs of tokens in turn, a thread eight neighbours of one.
  constexpr uint32_t kRun = 8;
  uint32_t* ids = p.token_ids + (uint64_t)list * p.capacity;
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t at = from; at < to; at += kProbeThreads * kRun) {
    uint32_t taken = 0, total;
#pragma unroll
    for (uint32_t j = 0; j < kRun; ++j) {
      const uint32_t t = at + tid * kRun + j, c = t < to ? cluster_of(t) : clusters;
      taken |= (uint32_t)(c < clusters && sh.size[c]) << j;
    }
    uint32_t put = found + block_exclusive_sum(__popc(taken), sh.scratch, total);
    found += total;
#pragma unroll
    for (uint32_t j = 0; j < kRun; ++j)
      if (taken >> j & 1) {
        if (put < (uint32_t)p.capacity) ids[put] = at + tid * kRun + j;
        ++put;
      }
  }
  if (tid == 0) {
    w.token_first = list * p.capacity;
    w.token_count = min(found, (uint32_t)p.capacity);
  }
}

}  // namespace taper
