// Decode attention: its parameters, and how work lists are cut into units.
#pragma once

#include "../common/ptx.cuh"
#include "../common/scan.cuh"
#include "../common/worklist.cuh"

namespace taper {

using Unit = TaperUnit;

static_assert(sizeof(Unit) == 80, "sized by the caller");

using DecodeParams = TaperDecodeParams;

// A long row makes two units for each of an H200's 132 multiprocessors, a short one at most one: with some more a few of
// them would have two of the few. The figure is fixed, so that results do not depend on the batch or on the device.
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
  const uint32_t units = (tiles + kUnitTilesMin - 1) / kUnitTilesMin, most = max(kUnitsPerRow / list_heads, 1u);
  return units < most ? min(units, max(most / 2, 1u)) : most;
}
__device__ __forceinline__ uint32_t unit_count(const WorkList& w, uint32_t list_heads) {
  return list_unit_count(list_tiles(w), list_heads);
}
// The i-th of a list's n units.
__device__ __forceinline__ Unit unit_of(const DecodeParams& p, uint32_t list, const WorkList& work, uint32_t i, uint32_t n) {
  const uint32_t tiles = list_tiles(work);
  return {list, i * tiles / n, (i + 1) * tiles / n, list / p.list_heads, work};
}

// Lists that change in every layer are cut by every thread block of the attention for itself, if they are no more.
constexpr int kOwnLists = 512;

// The units of all lists: as the plan wrote them, or cut here.
struct Units {
  const DecodeParams& p;
  uint32_t* firsts;  // [lists + 1] in shared memory: units before each list's

  // All threads call this.
  __device__ __forceinline__ void cut() {
    if (p.units) return;
    const int lists = p.rows * p.list_heads, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < lists; i += blockDim.x) firsts[i] = unit_count(p.lists[i], p.list_heads);
    __syncthreads();
    if (threadIdx.x < 32) {
      uint32_t base = 0;
      for (int at = 0; at < lists; at += 32) {
        const uint32_t x = at + lane < lists ? firsts[at + lane] : 0, sum = warp_upto(x);
        if (at + lane < lists) firsts[at + lane] = base + sum - x;
        base += __shfl_sync(~0u, sum, 31);
      }
      if (lane == 0) firsts[lists] = base;
    }
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t total() const {
    const int lists = p.rows * p.list_heads;
    return p.units ? p.list_units[lists] : firsts[lists];
  }
  // The u-th of them; of those beyond the last one nothing may be read.
  __device__ __forceinline__ Unit at(uint32_t u) const {
    if (p.units) return p.units[u];
    uint32_t lo = 0, hi = p.rows * p.list_heads;  // firsts[lo] <= u < firsts[hi]
    if (u >= firsts[hi]) return {};
    while (hi - lo > 1) {
      const uint32_t mid = (lo + hi) / 2;
      if (firsts[mid] <= u) lo = mid;
      else hi = mid;
    }
    return unit_of(p, lo, p.lists[lo], u - firsts[lo], firsts[lo + 1] - firsts[lo]);
  }
};

}  // namespace taper
