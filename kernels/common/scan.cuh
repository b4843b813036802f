// Running sums over a warp and over a thread block.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace taper {

// What the lanes up to this one have, and it itself.
template <class X>
__device__ __forceinline__ X warp_upto(X x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const X before = __shfl_up_sync(~0u, x, d);
    if ((threadIdx.x & 31) >= d) x += before;
  }
  return x;
}

// What the threads before this one have, of a thread block of up to 1024; all of it is left in `total`. `scratch` holds 33
// words.
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t x, uint32_t* scratch, uint32_t& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t upto = warp_upto(x);
  __syncthreads();  // The scratch may still be read from the sum before.
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  if (warp == 0) {
    const uint32_t own = lane < (int)(blockDim.x >> 5) ? scratch[lane] : 0, s = warp_upto(own);
    scratch[lane] = s - own;
    if (lane == 31) scratch[32] = s;
  }
  __syncthreads();
  total = scratch[32];
  return scratch[warp] + upto - x;
}

}  // namespace taper
