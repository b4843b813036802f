// Prefill attention: its parameters, and which blocks a tile reads.
#pragma once

#include "../common/launch.cuh"
#include "../common/wgmma.cuh"

namespace taper {

using PrefillTile = TaperPrefillTile;

static_assert(sizeof(PrefillTile) == 32, "shared with the caller");

using PrefillParams = TaperPrefillParams;

// What a sparse prefill adds. TaperSparsePrefillParams, but derived instead of nested.
struct SparsePrefillParams : PrefillParams {
  const uint32_t* csr_counts;    // [csr_heads * tile_count]; null: a list ends where the next begins
  const uint32_t* column_begin;  // [column_heads * tile_count] by tile id, into column_ids; or null
  const uint32_t* column_counts;
  const uint32_t* column_ids;    // tokens that the tile's rows see besides its blocks
  int32_t column_heads;          // 1, kv_heads or q_heads
  // Above 0: a tile stands in `tiles` once for every part of its keys, and the launch writes
  // partial results, f32 `out` [rows, q_heads, splits, head_dim] and `lse` [rows, q_heads, splits].
  int32_t splits;
  // All tiles of a head before the next head: for lists of each head's own, whose keys would
  // otherwise not stay in L2. Else all heads of a tile side by side.
  int32_t head_major, reserved_sparse;
};
static_assert(sizeof(SparsePrefillParams) == sizeof(TaperSparsePrefillParams), "the same layout");

constexpr int kTileRows = 128, kTileKeys = 128;
constexpr uint32_t kNoBlock = 0x1FFFFFF;  // its keys lie just below 2^31, beyond every position
constexpr uint32_t kColumns = kNoBlock - 1;  // a pair that holds 128 single tokens instead

template <int D>
struct PrefillLayout {
  static constexpr int kPanel = kTileRows * 128;  // 128 rows of 64 elements
  static constexpr int kTile = kPanel * (D / 64);
  static constexpr int kStages = 2;
  static constexpr int kBytes = kTile * (2 + 2 * kStages) + 1024;
};

// What the consumers need to know of a tile; they read no table themselves.
struct TileOutline {
  PrefillTile tile;
  uint32_t pairs, positions[kTileRows];  // pairs of blocks and runs of 128 columns
};

template <int STAGES>
struct PrefillShared {
  uint64_t q_full[2], q_empty[2];
  TileOutline outline[2];
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint2 blocks[STAGES];
  uint32_t columns[STAGES][kTileKeys];
};

// The blocks of one tile, by entry 0..count-1 in ascending order, and its columns.
struct TileKeys {
  uint32_t count, skip, sink_blocks, jump, columns;
  const uint32_t *list, *ids;
  __device__ __forceinline__ uint32_t block(uint32_t i) const {
    i += skip;
    if (list) return list[i];
    return i < sink_blocks ? i : i + jump;
  }
  __device__ __forceinline__ uint32_t pairs() const {
    return (count + 1) / 2 + (columns + kTileKeys - 1) / kTileKeys;
  }
  // Keeps one part of the blocks; the columns go with the first.
  __device__ __forceinline__ void keep(uint32_t part, uint32_t parts) {
    const uint32_t per = ((count + parts - 1) / parts + 1) & ~1u;
    skip = min(part * per, count);
    count = min(per, count - skip);
    if (part > 0) columns = 0;
  }
};

__device__ __forceinline__ TileKeys tile_keys(const SparsePrefillParams& p, const PrefillTile& t,
                                              int head) {
  TileKeys r{};
  if (p.column_begin) {
    const int64_t at = (int64_t)(head * p.column_heads / p.q_heads) * p.tile_count + t.id;
    r.columns = p.column_counts[at];
    r.ids = p.column_ids + p.column_begin[at];
  }
  if (p.csr_begin) {
    const int64_t at = (int64_t)(head * p.csr_heads / p.q_heads) * p.tile_count + t.id;
    const uint32_t b = p.csr_begin[at];
    r.count = p.csr_counts ? p.csr_counts[at] : p.csr_begin[at + 1] - b;
    r.list = p.csr_blocks + b;
  } else {
    const uint32_t end = (min(t.pos_max + 1, t.kv_len) + kBlock - 1) / kBlock;
    r.count = end;
    if (p.window > 0) {
      const uint32_t sink = (p.sink + kBlock - 1) / kBlock;
      const uint32_t w = (uint32_t)p.window;
      const uint32_t begin = t.pos_min + 1 > w ? (t.pos_min + 1 - w) / kBlock : 0;
      if (begin > sink) {
        r.sink_blocks = sink;
        r.jump = begin - sink;
        r.count = end - r.jump;
      }
    }
  }
  if (p.splits > 0) r.keep(t.part, p.splits);
  return r;
}

// Snake over the longest-first order: round r runs backwards when r is odd. The first
// item at or beyond the total ends the walk.
__device__ __forceinline__ int work_item(int round) {
  return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}
__device__ __forceinline__ int item_head(const SparsePrefillParams& p, int w) {
  return p.head_major ? w / p.tile_count : w % p.q_heads;
}
__device__ __forceinline__ int item_tile(const SparsePrefillParams& p, int w) {
  return p.head_major ? w % p.tile_count : w / p.q_heads;
}

}  // namespace taper
