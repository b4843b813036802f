// Many sums over a warp at a time.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace taper {

// Sums over a warp of N numbers a lane, a power of two of at least 16: lane l is left with those of the N / 32 numbers (of
// 16 one, which its neighbour has too) from l N / 32 on. The order of a sum's parts does not depend on N.
template <int N>
__device__ __forceinline__ void warp_sums(float (&x)[N]) {
  const int lane = threadIdx.x % 32;
  int left = N;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (left > 1) {
      left /= 2;
      const bool upper = lane & step;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (i >= left) break;
        const float mine = upper ? x[i + left] : x[i], other = upper ? x[i] : x[i + left];
        x[i] = mine + __shfl_xor_sync(~0u, other, step);
      }
    } else {
      x[0] += __shfl_xor_sync(~0u, x[0], step);
    }
  }
}

}  // namespace taper
