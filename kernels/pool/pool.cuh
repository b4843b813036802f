// Means of runs of rows, and lists of blocks chosen by their products: MInference's block-sparse pattern.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

using MeansParams = TaperMeansParams;

// A thread block a run and head, a thread an element.
template <class T, int D>
__global__ void __launch_bounds__(D) means_kernel(const MeansParams p) {
  wait_for_predecessor();
  launch_dependents();
  const uint32_t run = blockIdx.x, head = blockIdx.y;
  const uint32_t first = p.runs[2 * run], rows = p.runs[2 * run + 1];
  const T* x = static_cast<const T*>(p.x) + threadIdx.x;
  int64_t step = D;
  if (p.block_table) {
    const int64_t block = p.block_table[first / kBlock];
    x += ((block * p.heads + head) * kBlock + first % kBlock) * D;
  } else {
    x += ((int64_t)first * p.heads + head) * D;
    step = (int64_t)p.heads * D;
  }
  float sum = 0;
#pragma unroll 8
  for (uint32_t r = 0; r < rows; ++r) sum += to_float(x[r * step]);
  p.out[((int64_t)head * p.run_count + run) * D + threadIdx.x] = sum / rows;
}

using OwnParams = TaperOwnParams;

// A thread a list.
__global__ void __launch_bounds__(256) own_kernel(const OwnParams p) {
  wait_for_predecessor();
  launch_dependents();
  const uint32_t list = blockIdx.x * 256 + threadIdx.x;
  if (list >= (uint32_t)p.lists) return;
  const uint32_t count = min(p.counts[list], (uint32_t)p.capacity - 1);
  p.ids[(int64_t)list * p.capacity + count] = p.own[list % p.run_count];
  p.counts[list] = count + 1;
}

}  // namespace taper
