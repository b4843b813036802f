// Decode attention: its parameters, and how work lists are cut into units.
#pragma once

#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

using Unit = TaperUnit;

static_assert(sizeof(Unit) == 80, "sized by the caller");

using DecodeParams = TaperDecodeParams;

// A long row makes two units for each of an H200's 132 multiprocessors. The figure is
// fixed, so that results do not depend on the batch or on the device.
constexpr uint32_t kUnitTilesMin = 4, kUnitsPerRow = 264;

__host__ __device__ inline uint32_t range_tiles(uint32_t b, uint32_t e) {
  return e > b ? (e + kBlock - 1) / kBlock - b / kBlock : 0;
}
__device__ __forceinline__ uint32_t list_tiles(const WorkList& w) {
  return range_tiles(w.begin[0], w.end[0]) + range_tiles(w.begin[1], w.end[1]) + w.block_count +
         (w.token_count + kBlock - 1) / kBlock + (w.sample_count + kBlock - 1) / kBlock;
}
// The pool's i-th token; an id stands for a page of 2^shift.
__device__ __forceinline__ uint32_t token_at(const uint32_t* ids, int shift, uint64_t i) {
  return ids[i >> shift] << shift | ((uint32_t)i & ((1u << shift) - 1));
}
// Keys that a list reads exactly. Its blocks are ascending, its parts disjoint.
__device__ __forceinline__ uint32_t fixed_keys(const WorkList& w, const uint32_t* block_ids) {
  uint32_t n = w.token_count + w.block_count * kBlock;
#pragma unroll
  for (int r = 0; r < 2; ++r) n += w.end[r] > w.begin[r] ? w.end[r] - w.begin[r] : 0;
  if (w.block_count > 0) {
    const uint32_t end = (block_ids[(uint64_t)w.block_first + w.block_count - 1] + 1) * kBlock;
    if (end > w.len) n -= end - w.len;
  }
  return n;
}
// Units of a list: even parts, but none too short to be worth a merge.
__device__ __forceinline__ uint32_t list_unit_count(uint32_t tiles, uint32_t list_heads) {
  return min((tiles + kUnitTilesMin - 1) / kUnitTilesMin, max(kUnitsPerRow / list_heads, 1u));
}

}  // namespace taper
