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
  uint32_t key, half_bits, n;

  __device__ __forceinline__ explicit Permutation(uint32_t n) : n(n) {
    const uint32_t bits = 32 - __clz((int)(n - 1));
    half_bits = max((bits + 1) / 2, 1u);
  }
  __device__ __forceinline__ Permutation(uint32_t n, const Stream& s) : Permutation(n) {
    const uint4 w = s.words(kDraws + (threadIdx.x / 4 & 1));
    const uint32_t low = threadIdx.x & 1 ? w.y : w.x, high = threadIdx.x & 1 ? w.w : w.z;
    key = threadIdx.x & 2 ? high : low;
  }
  __device__ __forceinline__ uint32_t domain() const { return 1u << (2 * half_bits); }
  // By all lanes: where first, first + step, ... go; n or more means nowhere. Round by round for
  // all of them, since one point is a chain of some fifty dependent instructions.
  template <int K>
  __device__ __forceinline__ void points(uint32_t first, uint32_t step, uint32_t (&to)[K]) const {
    const uint32_t mask = (1u << half_bits) - 1;
    uint32_t left[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const uint32_t i = first + k * step;
      left[k] = i >> half_bits, to[k] = i & mask;
    }
#pragma unroll 1
    for (int r = 0; r < 6; ++r) {
      const uint32_t own = __shfl_sync(~0u, key, r);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        uint32_t x = (to[k] + own) * 0x9E3779B1u;
        x = (x ^ (x >> 15)) * 0x85EBCA77u;
        const uint32_t next = left[k] ^ ((x ^ (x >> 13)) & mask);
        left[k] = to[k];
        to[k] = next;
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) to[k] |= left[k] << half_bits;
  }
};

}  // namespace taper
