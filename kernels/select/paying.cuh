// Which entries of a list cost less than sampling around them, by a histogram of their shares of
// the attention mass. Sums are of whole numbers, so that the result is a function of the shares alone
// and the same as the CPU's (crates/taper-kernels/src/decode/paying.rs, which says what the numbers are).
#pragma once

#include <stdint.h>

#include "../common/scan.cuh"
#include "../taper_gpu.h"
#include "ordered.cuh"

namespace taper {

constexpr int kPayBins = 256, kPayWarps = kPayBins / 32;
constexpr uint32_t kPayFirst = (127 + 5) * 8 - kPayBins;
constexpr double kPayUnits = 18014398509481984.;  // 2^54 to a squared share of 1

struct PayShared {
  uint64_t squares[kPayWarps];
  uint32_t counts[kPayWarps], failing;
};

// Whether a key is a share at all: NaN and places beyond a list's end are none.
__device__ __forceinline__ bool pay_counts(uint32_t u) { return u >> 31; }
__device__ __forceinline__ uint32_t pay_bin(uint32_t u) {
  const int bin = (int)((u & 0x7FFFFFFFu) >> 20) - (int)kPayFirst;
  return (uint32_t)min(max(bin, 0), kPayBins - 1);
}
// The square of a share in the middle of a bin, in units.
__device__ __forceinline__ uint64_t pay_square(uint32_t bin) {
  const uint64_t middle = 17 + 2 * (bin % 8);
  const int octave = 2 * (int)(bin / 8) - 8;
  return octave < 0 ? middle * middle >> -octave : middle * middle << octave;
}

// By a whole thread block: the least key to read among `n`, at most `most` of them. `count` is that of bin 255 - t on the
// first 256 threads.
__device__ __forceinline__ uint32_t least_paying(uint32_t count, uint32_t n, uint32_t most, float noise, PayShared& sh) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint64_t square = 0, sum = 0, own = 0;
  uint32_t above = count;
  if (tid < kPayBins) {
    square = pay_square(kPayBins - 1 - tid);
    own = count * square;
    sum = warp_upto(own);
    above = warp_upto(count);
    if (lane == 31) sh.squares[warp] = sum, sh.counts[warp] = above;
    if (tid == 0) sh.failing = kPayBins;
  }
  __syncthreads();
  if (tid < kPayBins) {
    uint64_t total = 0;
#pragma unroll
    for (int w = 0; w < kPayWarps; ++w) {
      total += sh.squares[w];
      if (w < warp) sum += sh.squares[w], above += sh.counts[w];
    }
    // Those of this bin and of all below.
    const double left = (double)(total - (sum - own)), keys = (double)(n - (above - count));
    const bool pays = __dmul_rn((double)square, keys) >= __dadd_rn(left, noise * kPayUnits);
    if (count > 0 && !(pays && above <= most)) atomicMin(&sh.failing, (uint32_t)tid);
  }
  __syncthreads();
  const uint32_t least = kPayBins - sh.failing;  // the bin above the failing one
  if (least == 0) return ordered(0.f);
  return ordered(least == kPayBins ? INFINITY : __uint_as_float((least + kPayFirst) << 20));
}

}  // namespace taper
