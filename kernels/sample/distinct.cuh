// How many tokens the query heads of a group read between them: a bit for each token, counted where it is set first.
#pragma once

#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

using DistinctParams = TaperDistinctParams;

constexpr int kDistinctThreads = 512;
constexpr int kMostMarks = 224 * 1024;  // bytes of shared memory

// One thread block a row and KV head.
__global__ void __launch_bounds__(kDistinctThreads) distinct_kernel(const __grid_constant__ DistinctParams p) {
  extern __shared__ uint32_t marks[];
  __shared__ uint32_t total;
  const int words = (p.max_len + 31) / 32, group = p.q_heads / p.kv_heads;
  for (int i = threadIdx.x; i < words; i += kDistinctThreads) marks[i] = 0;
  if (threadIdx.x == 0) total = 0;
  wait_for_predecessor();
  launch_dependents();
  __syncthreads();
  uint32_t own = 0;
  for (int g = 0; g < group; ++g) {
    const WorkList& w = p.work[(int64_t)blockIdx.x * group + g];
    for (uint32_t i = threadIdx.x; i < w.token_count; i += kDistinctThreads) {
      const uint64_t at = (uint64_t)w.token_first + i;
      if (p.token_ln_weight && p.token_ln_weight[at] == -INFINITY) continue;
      const uint32_t id = p.token_ids[at], bit = 1u << (id % 32);
      own += !(atomicOr(&marks[id / 32], bit) & bit);
    }
  }
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, own);
  __syncthreads();
  if (threadIdx.x == 0) p.counts[blockIdx.x] = total;
}

}  // namespace taper
