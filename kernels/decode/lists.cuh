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
// Tiles of one unit: even parts of the list, but none too short to be worth a merge.
__device__ __forceinline__ uint32_t unit_tiles(uint32_t tiles, uint32_t list_heads) {
  const uint32_t parts = max(kUnitsPerRow / list_heads, 1u);
  return max((tiles + parts - 1) / parts, kUnitTilesMin);
}


// Cuts every list into units. One thread block; lists are few (rows * list_heads).
__global__ void __launch_bounds__(1024) decode_plan_kernel(const DecodeParams p) {
  __shared__ uint32_t warp_sum[32];
  __shared__ uint32_t base;
  wait_for_predecessor();
  launch_dependents();
  const int lists = p.rows * p.list_heads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) base = 0;
  __syncthreads();
  for (int at = 0; at < lists; at += 1024) {
    const int i = at + threadIdx.x;
    uint32_t tiles = 0, per = 1, n = 0, table = 0;
    WorkList work{};
    if (i < lists) {
      work = p.lists[i];
      table = i / p.list_heads;
      if (p.row_table) table = p.row_table[table];
      tiles = list_tiles(work);
      per = unit_tiles(tiles, p.list_heads);
      n = (tiles + per - 1) / per;
    }
    uint32_t sum = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t o = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += o;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    uint32_t before = base;
    for (int w = 0; w < warp; ++w) before += warp_sum[w];
    const uint32_t first = before + sum - n;
    if (i < lists) {
      p.list_units[i] = min(first, (uint32_t)p.unit_capacity);
      for (uint32_t u = 0; u < n && first + u < (uint32_t)p.unit_capacity; ++u)
        p.units[first + u] = {(uint32_t)i, u * per, min((u + 1) * per, tiles), table, work};
    }
    __syncthreads();
    if (threadIdx.x == 1023) base = before + sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.list_units[lists] = min(base, (uint32_t)p.unit_capacity);
}

}  // namespace taper
