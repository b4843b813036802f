// Counter-based random numbers and the keyed permutation built on them: word for word
// those of the CPU, so that both draw the same samples.
//
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
// (Philox4x32-10). The permutation is a Feistel network of six rounds over the next
// even power of two.
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
__device__ __forceinline__ uint4 philox(uint2 key, uint4 c) {
#pragma unroll
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

// The permutation of 0..n-1 of a stream, point by point.
struct Permutation {
  static constexpr uint32_t kDraws = 0x50450000u;  // and the next: words of the round keys
  uint32_t keys[6], half_bits, n;

  // The keys are left to the caller.
  __device__ __forceinline__ explicit Permutation(uint32_t n) : n(n) {
    const uint32_t bits = 32 - __clz((int)(n - 1));
    half_bits = max((bits + 1) / 2, 1u);
  }
  __device__ __forceinline__ Permutation(uint32_t n, const Stream& s) : Permutation(n) {
    const uint4 a = s.words(kDraws), b = s.words(kDraws + 1);
    keys[0] = a.x, keys[1] = a.y, keys[2] = a.z, keys[3] = a.w, keys[4] = b.x, keys[5] = b.y;
  }
  __device__ __forceinline__ uint32_t domain() const { return 1u << (2 * half_bits); }
  // Where i goes; n or more means nowhere.
  __device__ __forceinline__ uint32_t point(uint32_t i) const {
    const uint32_t mask = (1u << half_bits) - 1;
    uint32_t left = i >> half_bits, right = i & mask;
#pragma unroll
    for (int r = 0; r < 6; ++r) {
      uint32_t x = (right + keys[r]) * 0x9E3779B1u;
      x = (x ^ (x >> 15)) * 0x85EBCA77u;
      const uint32_t next = left ^ ((x ^ (x >> 13)) & mask);
      left = right;
      right = next;
    }
    return (left << half_bits) | right;
  }
};

}  // namespace taper
