// Prefill attention: its parameters, and which blocks a tile reads.
#pragma once

#include "../common/launch.cuh"
#include "../common/wgmma.cuh"

namespace taper {

using PrefillTile = TaperPrefillTile;

static_assert(sizeof(PrefillTile) == 32, "shared with the caller");

using PrefillParams = TaperPrefillParams;

constexpr int kTileRows = 128, kTileKeys = 128;
constexpr uint32_t kNoBlock = 0x1FFFFFF;  // its keys lie just below 2^31, beyond every position
constexpr uint32_t kColumns = kNoBlock - 1;  // a pair that holds 128 single tokens instead

// Warps that bring keys, of the four that bring anything: single tokens are copied piece by piece, by two of them.
template <bool COLUMNS>
inline constexpr int kKeyWarps = COLUMNS ? 2 : 1;
template <bool COLUMNS>
inline constexpr int kQueryThreads = 128 - 32 * kKeyWarps<COLUMNS>;

// Marks of ids: only the first consumer warpgroup's rows read it, or only the second's.
constexpr uint32_t kFirstRows = 1u << 31, kOtherRows = 1u << 30;
constexpr uint32_t kUnmarked = ~(kFirstRows | kOtherRows);
__host__ __device__ __forceinline__ uint32_t unmarked(uint32_t id) { return id & kUnmarked; }

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

constexpr int kOwnColumns = kTileKeys / kKeyWarps<true>;  // single tokens of a stage that a warp brings

template <int STAGES>
struct PrefillShared {
  uint64_t q_full[2], q_empty[2];
  TileOutline outline[2];
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint2 blocks[STAGES];
  uint32_t columns[STAGES][kTileKeys];
  alignas(16) uint32_t column_rows[kKeyWarps<true>][kOwnColumns];  // of the cache, as the warps that copy them need them
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

// `place` is the head's among those of the launch.
__device__ __forceinline__ TileKeys tile_keys(const PrefillParams& p, const PrefillTile& t,
                                              int place) {
  TileKeys r{};
  if (p.column_begin) {
    const int64_t at = (int64_t)(place * p.column_heads / p.head_count) * p.list_stride + t.id;
    r.columns = p.column_counts[at];
    r.ids = p.column_ids + p.column_begin[at];
  }
  if (p.csr_begin) {
    const int64_t at = (int64_t)(place * p.csr_heads / p.head_count) * p.list_stride + t.id;
    const uint32_t b = p.csr_begin[at];
    r.count = p.csr_counts ? p.csr_counts[at] : p.csr_begin[at + 1] - b;
    r.list = p.csr_blocks + b;
    // A list that tiles share goes on behind the first ones' rows.
    while (r.count > 0 && unmarked(r.list[r.count - 1]) > t.pos_max / kBlock) --r.count;
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
// The row of a tile that is row r of its 128.
__device__ __forceinline__ uint32_t row_of(const PrefillParams& p, uint32_t r) {
  return p.head_pairs ? r % (kTileRows / 2) : r;
}
// Heads of the launch, or pairs of them.
__host__ __device__ __forceinline__ int item_heads(const PrefillParams& p) {
  return p.head_pairs ? p.head_count / 2 : p.head_count;
}
__device__ __forceinline__ int items(const PrefillParams& p) {
  return p.tile_count * item_heads(p);
}
// The place of an item's head among those of the launch, or of the first of a pair.
__device__ __forceinline__ int item_place(const PrefillParams& p, int w) {
  const int at = w % item_heads(p);
  return p.head_pairs ? 2 * at : at;
}
__device__ __forceinline__ int head_at(const PrefillParams& p, int place) {
  return p.heads ? (int)p.heads[place] : place;
}
__device__ __forceinline__ int item_tile(const PrefillParams& p, int w) {
  return w / item_heads(p);
}

}  // namespace taper
