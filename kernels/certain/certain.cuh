// A sample whose promise holds whatever was not drawn: what its kernels share.
//
// The bounds, and why they hold, are told by the CPU's operation (decode/sample/certain.rs). On the
// device it is a row of launches: attention over what is read exactly; draws beside it; `promote`, which
// guesses each head's output from a few of them and adds the pages that could weigh most; attention over
// all that; draws beside that; `look`, which adds up ever more of these until the bounds keep the
// promise or it would be too much; and attention over everything for lists that came to that.
#pragma once

#include <float.h>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/warp.cuh"
#include "../decode/lists.cuh"

namespace taper {

using CertainParams = TaperCertainParams;

constexpr int kGroupMost = 16;
constexpr int kGuessMost = 32;       // keys: a lane each
constexpr uint32_t kToLookAt = 0;    // between the two launches: none of the states

// The most keys that a list may come to read, as a share of all.
__device__ __forceinline__ double dense_limit(const CertainParams& p, uint32_t len) {
  return fmin(p.dense_share, 1.0) * (double)len;
}

// Which row of the cache a token is, for one head.
__device__ __forceinline__ uint64_t cache_row(const CertainParams& p, int row, int kv_head, uint32_t token) {
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  return ((uint64_t)table[token / kBlock] * p.kv_heads + kv_head) * kBlock + token % kBlock;
}

// A lane's D / 32 elements of a row, one load.
template <class T, int D>
struct Piece {
  static constexpr int kOwn = D / 32;
  typename std::conditional<kOwn == 4, uint2, uint32_t>::type raw;
  __device__ __forceinline__ void load(const void* base, uint64_t row) {
    raw = reinterpret_cast<const decltype(raw)*>(static_cast<const T*>(base) + row * D)[threadIdx.x & 31];
  }
  __device__ __forceinline__ float operator[](int i) const {
    return to_float(reinterpret_cast<const T*>(&raw)[i]);
  }
};

}  // namespace taper
