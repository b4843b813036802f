// What one group of query heads reads in decode, shared by all kernels that make,
// sample from or attend over such lists.
#pragma once

#include <stdint.h>

#include "launch.cuh"

namespace taper {

using WorkList = TaperWorkList;

static_assert(sizeof(WorkList) == 64, "shared with the caller");

// An exclusive sum over the first `warps` warps of a thread block, which `meet` has meet; returns this
// thread's offset and leaves the total in `total`. `scratch` holds 33 words.
template <class Meet>
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t x, uint32_t* scratch, uint32_t& total, int warps,
                                                        Meet meet) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t o = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += o;
  }
  meet();  // The scratch may still be read from the sum before.
  if (lane == 31) scratch[warp] = sum;
  meet();
  if (warp == 0) {
    uint32_t w = lane < warps ? scratch[lane] : 0, s = w;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t o = __shfl_up_sync(~0u, s, d);
      if (lane >= d) s += o;
    }
    scratch[lane] = s - w;
    if (lane == 31) scratch[32] = s;
  }
  meet();
  total = scratch[32];
  return scratch[warp] + sum - x;
}
// The same over a whole thread block of up to 1024 threads.
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t x, uint32_t* scratch, uint32_t& total) {
  return block_exclusive_sum(x, scratch, total, blockDim.x >> 5, [] { __syncthreads(); });
}

}  // namespace taper
