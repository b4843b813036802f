// Counter-based random numbers and the keyed permutation built on them: word for word
// those of the CPU, so that both draw the same samples.
//
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
// (Philox4x32-10). The permutation is a Feistel network of six rounds over the next
// power of two, walked until it lands below n.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace taper {

__device__ __forceinline__ void philox_round(uint2& key, uint4& c) {
  const uint32_t p = __umulhi(c.x, 0xD2511F53u), p_lo = c.x * 0xD2511F53u;
  const uint32_t q = __umulhi(c.z, 0xCD9E8D57u), q_lo = c.z * 0xCD9E8D57u;
  c = make_uint4(q ^ c.y ^ key.x, q_lo, p ^ c.w ^ key.y, p_lo);
  key.x += 0x9E3779B9u;
  key.y += 0xBB67AE85u;
}
// Loops stay loops here: a cold launch waits for its instructions longer than for arithmetic.
__device__ __forceinline__ uint4 philox(uint2 key, uint4 c) {
#pragma unroll 1
  for (int i = 0; i < 10; ++i) philox_round(key, c);
  return c;
}

// One stream of draws: a request's seed, and where in it the draw is made.
struct Stream {
  uint64_t seed;
  uint32_t layer, head, position;
  __device__ __forceinline__ uint4 words(uint32_t draw) const {
    return philox(make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)),
                  make_uint4(layer, head, position, draw));
  }
};

// The permutation of 0..n-1 of a stream, point by point. A warp shares one: lane r keeps the
// key of round r.
struct Permutation {
  static constexpr uint32_t kDraws = 0x50450000u;  // and the next: words of the round keys
  uint32_t key, n;  // the keys do not depend on n, which is at least 1

  Permutation() = default;
  __device__ __forceinline__ Permutation(uint32_t n, const Stream& s) : n(n) {
    const uint4 w = s.words(kDraws + (threadIdx.x / 4 & 1));
    const uint32_t low = threadIdx.x & 1 ? w.y : w.x, high = threadIdx.x & 1 ? w.w : w.z;
    key = threadIdx.x & 2 ? high : low;
  }
  static __device__ __forceinline__ uint32_t mix(uint32_t x) {
    x *= 0x9E3779B1u;
    x = (x ^ (x >> 15)) * 0x85EBCA77u;
    return x ^ (x >> 13);
  }
  // By all lanes: where each x goes, the last point's place where it is n or more. Round by round for all of them, since one
  // is a chain of some fifty dependent instructions; those that land beyond n go on.
  template <int K>
  __device__ __forceinline__ void points(uint32_t (&x)[K]) const {
    const uint32_t bits = 32 - __clz((int)(n - 1)), right_bits = bits - bits / 2;
    const uint32_t left_mask = (1u << bits / 2) - 1, right_mask = (1u << right_bits) - 1;
    bool on[K], any;
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = min(x[k], n - 1), on[k] = true;
#pragma unroll 1
    do {
      uint32_t left[K], right[K];
#pragma unroll
      for (int k = 0; k < K; ++k) left[k] = x[k] >> right_bits, right[k] = x[k] & right_mask;
#pragma unroll 1
      for (int r = 0; r < 6; r += 2) {
        const uint32_t even = __shfl_sync(~0u, key, r), odd = __shfl_sync(~0u, key, r + 1);
#pragma unroll
        for (int k = 0; k < K; ++k) left[k] ^= mix(right[k] + even) & left_mask;
#pragma unroll
        for (int k = 0; k < K; ++k) right[k] ^= mix(left[k] + odd) & right_mask;
      }
      any = false;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (on[k]) x[k] = left[k] << right_bits | right[k];
        on[k] = x[k] >= n;
        any |= on[k];
      }
    } while (__any_sync(~0u, any));
  }
  __device__ __forceinline__ uint32_t point(uint32_t i) const {
    uint32_t x[1] = {i};
    points(x);
    return x[0];
  }
};

}  // namespace taper
