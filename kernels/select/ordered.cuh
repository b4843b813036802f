// Scores as integers of the same order.
#pragma once

#include <stdint.h>

namespace taper {

// A key orders as its score does. NaN is 1, and 0 is left for places beyond a list's end:
// they come after all entries of their warp and rank below them, so no pass has to look
// for them.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t u = __float_as_uint(x + 0.f);  // One zero only.
  if (x != x) return 1;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t u) {
  if (u <= 1) return -INFINITY;
  return __uint_as_float(u & 0x80000000u ? u & 0x7FFFFFFFu : ~u);
}

}  // namespace taper
