// A uniform sample without replacement of the keys that a list leaves out.
//
// The points of the stream's permutation are taken in order, less those that the list
// reads already; the first `want` are the sample, so a larger one begins with the
// smaller. A cluster of thread blocks a list walks the permutation side by side, each
// with the list's keys as a bitmap in its shared memory, and tells the others how many
// of its points were taken.
#pragma once

#include <cooperative_groups.h>

#include "../common/philox.cuh"
#include "../common/ptx.cuh"
#include "../decode/lists.cuh"

namespace taper {

using SampleParams = TaperSampleParams;

constexpr int kSampleThreads = 1024, kSamplePoints = 2;  // consecutive points a thread, of which a few walk long
constexpr int kSampleCluster = 8;

__global__ void __cluster_dims__(kSampleCluster, 1, 1) __launch_bounds__(kSampleThreads)
    sample_kernel(const SampleParams p) {
  extern __shared__ uint32_t chosen[];
  __shared__ uint32_t scratch[33], taken[2][kSampleCluster];
  const auto cluster = cooperative_groups::this_cluster();
  const int tid = threadIdx.x, list = blockIdx.x / kSampleCluster, row = list / p.list_heads;
  const int rank = blockIdx.x % kSampleCluster;
  wait_for_predecessor();
  launch_dependents();
  if (p.states && p.states[list] != p.state) return;
  const WorkList w = p.work[list];
  const uint32_t n = w.len;
  const uint32_t want = min(p.wants ? p.wants[list] : (uint32_t)p.want, (uint32_t)p.capacity);
  for (uint32_t i = tid; i < (n + 31) / 32; i += kSampleThreads) chosen[i] = 0;
  __syncthreads();
  auto mark = [&](uint32_t t) {
    if (t < n) atomicOr(&chosen[t / 32], 1u << (t % 32));
  };
  for (int r = 0; r < 2; ++r)
    for (uint32_t t = w.begin[r] + tid; t < w.end[r]; t += kSampleThreads) mark(t);
  for (uint32_t i = tid; i < w.block_count * kBlock; i += kSampleThreads)
    mark(p.block_ids[(uint64_t)w.block_first + i / kBlock] * kBlock + i % kBlock);
  for (uint32_t i = tid; i < w.token_count; i += kSampleThreads)
    mark(token_at(p.token_ids, p.token_shift, (uint64_t)w.token_first + i));
  cluster.sync();  // Also: no block is written to before it has started.

  uint32_t drawn = 0;
  if (n > 0 && want > 0) {
    const Stream stream{p.seeds[row], p.layer, (uint32_t)(list % p.list_heads), p.positions[row]};
    const Permutation permutation(n, stream);
    uint32_t* ids = p.ids + (int64_t)list * p.capacity;
    constexpr uint32_t kShare = kSampleThreads * kSamplePoints;
    for (uint32_t at = 0, turn = 0; at < n && drawn < want;
         at += kShare * kSampleCluster, turn ^= 1) {
      uint32_t x[kSamplePoints], mine = 0;
      const uint32_t first = at + rank * kShare + tid * kSamplePoints;
#pragma unroll
      for (int k = 0; k < kSamplePoints; ++k) x[k] = first + k;
      permutation.points(x);
#pragma unroll
      for (int k = 0; k < kSamplePoints; ++k) {
        if (first + k >= n || (chosen[x[k] / 32] >> (x[k] % 32) & 1)) x[k] = n;
        mine += x[k] < n;
      }
      uint32_t total, to = drawn + block_exclusive_sum(mine, scratch, total);
      // Two buffers in turn: whoever is ahead cannot overwrite what others still read.
      if (tid < kSampleCluster) cluster.map_shared_rank(&taken[turn][0], tid)[rank] = total;
      cluster.sync();
      for (int r = 0; r < kSampleCluster; ++r) {
        to += r < rank ? taken[turn][r] : 0;
        drawn += taken[turn][r];
      }
#pragma unroll
      for (int k = 0; k < kSamplePoints; ++k)
        if (x[k] < n) {
          if (to < want) ids[to] = x[k];
          ++to;
        }
    }
  }
  if (tid == 0 && rank == 0) p.counts[list] = min(drawn, want);
}

}  // namespace taper
