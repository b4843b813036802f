// Columns and slashes to lists of key blocks: the form that the prefill attention reads.
//
// A slash b stands for the diagonals 64 b .. 64 b + 63 (row less key), which cross the
// key blocks qb - b and qb - b - 1 of query block qb. Both kinds of choice become
// bitmaps first, one pair for each list head and slice; a tile's blocks are then the
// union over its query blocks of the columns up to the diagonal and of the slashes'
// bitmap read backwards. Block 0 and the diagonal always belong, the first unless `exact`. Lists have room
// for all blocks up to the diagonal at offsets that the host knows, so nothing is scanned.
#pragma once

#include "../common/launch.cuh"
#include "../prefill/tiles.cuh"

namespace taper {

using StripesParams = TaperStripesParams;

// Bits of the chosen columns, and of the slashes b and, unless `exact`, b + 1 for every chosen slash b.
__global__ void __launch_bounds__(256) stripe_bits_kernel(const StripesParams p) {
  extern __shared__ uint32_t bits[];
  wait_for_predecessor();
  launch_dependents();
  for (int kind = 0; kind < 2; ++kind) {
    const uint32_t* ids = kind == 0 ? p.columns + (int64_t)blockIdx.x * p.column_stride
                                    : p.slashes + (int64_t)blockIdx.x * p.slash_stride;
    const uint32_t room = kind == 0 ? p.column_stride : p.slash_stride;
    const uint32_t n = min(kind == 0 ? p.column_counts[blockIdx.x] : p.slash_counts[blockIdx.x], room);
    const uint32_t most = 32u * p.words;
    for (int i = threadIdx.x; i < p.words; i += 256) bits[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += 256) {
      const uint32_t b = ids[i];
      if (b < most) atomicOr(&bits[b / 32], 1u << (b % 32));
      if (kind == 1 && !p.exact && b + 1 < most) atomicOr(&bits[(b + 1) / 32], 1u << ((b + 1) % 32));
    }
    __syncthreads();
    uint32_t* to = p.bitmaps + ((int64_t)blockIdx.x * 2 + kind) * p.words;
    for (int i = threadIdx.x; i < p.words; i += 256) to[i] = bits[i];
    __syncthreads();
  }
}

// One warp a head and tile.
__global__ void __launch_bounds__(128) stripe_lists_kernel(const StripesParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t item = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
  wait_for_predecessor();
  launch_dependents();
  if (item >= (int64_t)p.heads * p.tile_count) return;
  const int head = (int)(item % p.heads);
  const PrefillTile t = p.tiles[item / p.heads];
  const uint32_t first = t.pos_min / kBlock, last = t.pos_max / kBlock;
  const int64_t at = (int64_t)head * p.tile_count + t.id;
  uint32_t* out = p.blocks + p.list_begin[at];
  uint32_t count = 0;
  for (uint32_t base = 0; base * 32 <= last; base += 32) {
    const uint32_t word = base + lane;
    uint32_t x = 0;
    int slice = 0;
    for (uint32_t qb = first; qb <= last; ++qb) {
      while (slice + 1 < p.slices && p.slice_ends[slice] <= qb * kBlock) ++slice;
      const uint32_t* columns = p.bitmaps + ((int64_t)slice * p.heads + head) * 2 * p.words;
      const uint32_t* slashes = columns + p.words;
      if (word * 32 > qb) continue;
      uint32_t y = columns[word];
      // Bit i: is slash qb - (32 word + i) chosen? A run of 32 bits ending at `high`.
      const uint32_t high = qb - word * 32, w = high / 32, s = high % 32;
      const uint32_t upper = slashes[w], lower = w > 0 ? slashes[w - 1] : 0;
      y |= __brev(__funnelshift_l(lower, upper, 31 - s));
      if (word == 0 && !p.exact) y |= 1;
      if (qb / 32 == word) y |= 1u << (qb % 32);
      if (qb - word * 32 < 31) y &= (2u << (qb - word * 32)) - 1;
      x |= y;
    }
    const uint32_t mine = __popc(x);
    uint32_t sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t o = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += o;
    }
    for (uint32_t to = count + sum - mine; x; x &= x - 1) out[to++] = word * 32 + __ffs(x) - 1;
    count += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) p.counts[at] = count;
}

using ColumnsParams = TaperColumnsParams;

// One warp a head and tile.
__global__ void __launch_bounds__(128) drop_columns_kernel(const ColumnsParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t item = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
  wait_for_predecessor();
  launch_dependents();
  if (item >= (int64_t)p.heads * p.tile_count) return;
  const int head = (int)(item % p.heads);
  const PrefillTile t = p.tiles[item / p.heads];
  const int64_t at = (int64_t)head * p.tile_count + t.id;
  const int64_t list = (int64_t)(head * p.list_heads / p.heads) * p.tile_count + t.id;
  const uint32_t* blocks = p.blocks + p.list_begin[list];
  const uint32_t held = p.list_counts[list], n = min(p.counts[head], (uint32_t)p.column_stride);
  uint32_t* out = p.column_ids + p.column_begin[at];
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; i += 32) {
    const uint32_t id = i + lane < n ? p.columns[(int64_t)head * p.column_stride + i + lane] : UINT32_MAX;
    bool keep = id <= t.pos_max;
    if (keep) {
      uint32_t lo = 0, hi = held;  // the first block not before the column's
      while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (blocks[mid] < id / kBlock) lo = mid + 1;
        else hi = mid;
      }
      keep = lo == held || blocks[lo] != id / kBlock;
    }
    const uint32_t kept = __ballot_sync(~0u, keep);
    if (keep) out[count + __popc(kept & ((1u << lane) - 1))] = id;
    count += __popc(kept);
  }
  if (lane == 0) p.column_counts[at] = count;
}

}  // namespace taper
