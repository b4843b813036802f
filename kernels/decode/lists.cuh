// Decode attention: its parameters, and how work lists are cut into units.
#pragma once

#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

// A run of tiles of one list, with a copy of the list: one load tells a producer all.
struct Unit {
  uint32_t list, tile_begin, tile_end, table;
  WorkList work;
};
static_assert(sizeof(Unit) == 80, "sized by the caller");

struct DecodeParams {
  const void* q;                 // [rows, q_heads, head_dim]
  const void* k;                 // [blocks, kv_heads, 64, head_dim]
  const void* v;                 // as k
  const uint32_t* block_table;   // [tables, table_stride]
  const uint32_t* row_table;     // [rows], the table of each row; null: row r uses table r
  const WorkList* lists;         // [rows, list_heads]
  const uint32_t* block_ids;     // pool that the lists slice
  const uint32_t* token_ids;     // pool that the lists slice
  const float* token_ln_weight;  // beside token_ids, added to the list's own; may be null
  const uint32_t* head_counts;   // [rows, q_heads], sampled tokens that each head reads
  const float* head_ln_weight;   // [rows, q_heads], their log weight
  Unit* units;                   // [unit_capacity]
  uint32_t* list_units;          // [lists + 1], first unit of each list; the last is the total
  float* part_o;                 // [unit_capacity, group, head_dim]
  float* part_lse;               // [unit_capacity, group]
  int64_t blocks;                // of the cache
  int32_t rows, q_heads, kv_heads, list_heads, head_dim, dtype;
  int32_t table_stride, unit_capacity;
  float scale;
  int32_t gather;   // 0 promises that no list names single tokens
  int32_t overlap;  // allow the launch to overlap its predecessor's tail
};

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
// Units of a list: even parts, but none too short to be worth a merge.
__device__ __forceinline__ uint32_t list_unit_count(uint32_t tiles, uint32_t list_heads) {
  return min((tiles + kUnitTilesMin - 1) / kUnitTilesMin, max(kUnitsPerRow / list_heads, 1u));
}

}  // namespace taper
