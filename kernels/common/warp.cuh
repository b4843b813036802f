// Over a whole warp: sums, and the largest, for which what is no number does not count.
#pragma once

#include <cuda_runtime.h>

namespace taper {

template <class X>
__device__ __forceinline__ X warp_sum(X x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

}  // namespace taper
