// Prefill attention: its parameters, and which blocks a tile reads.
#pragma once

#include "../common/launch.cuh"
#include "../common/wgmma.cuh"

namespace taper {

struct PrefillTile {
  uint32_t row_begin, rows;   // at most 128 rows of the launch
  uint32_t table;             // block table of the sequence
  uint32_t kv_len;            // tokens of the sequence that the cache holds
  uint32_t pos_min, pos_max;  // over the tile's rows
  uint32_t id;                // index into csr_begin
  uint32_t reserved;
};
static_assert(sizeof(PrefillTile) == 32, "shared with the caller");

struct PrefillParams {
  const void* q;                // [tokens, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const void* v;                // as k
  const uint32_t* block_table;  // [tables, table_stride]
  const uint32_t* q_rows;       // [rows], the row of q (and of out) per row; null: itself
  const uint32_t* positions;    // [rows], absolute
  const PrefillTile* tiles;     // [tile_count], longest first
  const uint32_t* csr_begin;    // [csr_heads * tile_count + 1], or null
  const uint32_t* csr_blocks;   // ascending logical blocks of each (head, tile)
  void* out;                    // [rows, q_heads, head_dim], dtype or f32; by launch row if f32
  float* lse;                   // [rows, q_heads] by launch row, or null
  float* anchor_out;            // [.., q_heads, head_dim]: rows at multiples of anchor_stride
  int64_t blocks;               // of the cache
  int32_t tile_count, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t csr_heads;      // 1, kv_heads or q_heads
  int32_t sink, window;   // window 0: no window
  int32_t anchor_stride;  // 0: no anchor output
  int32_t out_f32, overlap;
  float scale;
  int32_t reserved;
};

constexpr int kTileRows = 128, kTileKeys = 128;
constexpr uint32_t kNoBlock = 0x1FFFFFF;  // its keys lie just below 2^31, beyond every position

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
  uint32_t pairs, positions[kTileRows];
};

template <int STAGES>
struct PrefillShared {
  uint64_t q_full[2], q_empty[2];
  TileOutline outline[2];
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint2 blocks[STAGES];
};

// The blocks of one tile, by entry 0..count-1 in ascending order.
struct TileKeys {
  uint32_t count, sink_blocks, jump;
  const uint32_t* list;
  __device__ __forceinline__ uint32_t block(uint32_t i) const {
    if (list) return list[i];
    return i < sink_blocks ? i : i + jump;
  }
};

__device__ __forceinline__ TileKeys tile_keys(const PrefillParams& p, const PrefillTile& t,
                                              int head) {
  TileKeys r{0, 0, 0, nullptr};
  if (p.csr_begin) {
    const int64_t at = (int64_t)(head * p.csr_heads / p.q_heads) * p.tile_count + t.id;
    const uint32_t b = p.csr_begin[at];
    r.count = p.csr_begin[at + 1] - b;
    r.list = p.csr_blocks + b;
    return r;
  }
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
  return r;
}

// Snake over the longest-first order: round r runs backwards when r is odd. The first
// item at or beyond the total ends the walk.
__device__ __forceinline__ int work_item(int round) {
  return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

}  // namespace taper
