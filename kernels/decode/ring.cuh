// Decode attention: the ring of shared-memory stages and the warps that fill it.
#pragma once

#include "../common/wgmma.cuh"
#include "lists.cuh"

namespace taper {

// A block tile of a list: logical block, its valid rows and its log weight.
struct BlockTile {
  uint32_t block, lo, hi;
  float ln_weight;
};

__device__ __forceinline__ BlockTile block_tile(const WorkList& w, const uint32_t* block_ids,
                                                uint32_t t) {
  BlockTile b{0, 0, kBlock, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t n = range_tiles(w.begin[r], w.end[r]);
    if (t < n) {
      b.block = w.begin[r] / kBlock + t;
      b.lo = t == 0 ? w.begin[r] % kBlock : 0;
      b.hi = min(w.end[r] - b.block * kBlock, (uint32_t)kBlock);
      return b;
    }
    t -= n;
  }
  b.block = block_ids[(uint64_t)w.block_first + t];
  b.hi = min(w.len - b.block * kBlock, (uint32_t)kBlock);
  b.ln_weight = w.block_ln_weight;
  return b;
}

struct StageMeta {
  uint32_t lo, hi;   // valid rows
  float ln_weight;   // of the tile
  uint32_t gathered;  // its rows were copied one by one and may carry weights
  uint32_t sampled;   // place of its first key in the sample; kNotSampled: none
  uint32_t end;       // rows from the tile's first to the first range's end, which may lie beyond the tile
};
constexpr uint32_t kNotSampled = ~0u;

template <int D>
inline constexpr int kDecodeStages = D == 128 ? 6 : 12;  // even: each has one consumer
// Of 32 heads what stands beside the stages is larger.
template <int D, int N>
inline constexpr int kStagesBeside = N == 32 ? kDecodeStages<D> * 2 / 3 : kDecodeStages<D>;

template <int D, int N, int S = kStagesBeside<D, N>>
struct DecodeLayout {
  static constexpr int kDim = D;
  static constexpr int kPanel = kBlock * 128;      // 64 rows of 64 elements
  static constexpr int kTile = kPanel * (D / 64);  // K or V of one tile
  static constexpr int kStage = 2 * kTile;
  static constexpr int kStages = S;
  static constexpr int kQuery = N * 128 * (D / 64);  // queries of one unit, double buffered
  static constexpr int kProb = N * 128;              // one warpgroup's probabilities
  static constexpr int kBytes = kStages * kStage + 2 * (kQuery + kProb) + 1024;
};

// What the consumers need to know of a unit. `tiles` 0 ends the walk.
struct UnitOutline {
  uint32_t unit, tiles, list;
};

template <int D, int N, int S = kStagesBeside<D, N>>
struct DecodeShared {
  static constexpr int kStages = S;
  uint64_t full[kStages], empty[kStages], q_full[2], q_empty[2], join_full, join_empty;
  StageMeta meta[kStages];
  UnitOutline outline[2];
  float weight[kStages][kBlock];
  float warp_red[2][4][N];
  float join_o[N][D], join_m[N], join_l[N];  // the second warpgroup's part of a unit
};

struct DecodeMaps {
  CUtensorMap q, k, v;
};

// One thread announces the k-th unit of this thread block and fetches its queries: N
// rows of 64 elements each, of which only the group's first are used; or the group of each
// of the rows that share the list.
template <int D, int N, bool FOLD = false>
__device__ __forceinline__ void announce(const DecodeMaps& maps, const DecodeParams& p,
                                         DecodeShared<D, N>& sh, uint32_t q_ring, uint32_t k,
                                         UnitOutline outline) {
  using L = DecodeLayout<D, N>;
  const uint32_t slot = k & 1, full = smem_u32(&sh.q_full[slot]);
  mbar_wait(smem_u32(&sh.q_empty[slot]), ((k >> 1) & 1) ^ 1);
  sh.outline[slot] = outline;
  if (outline.tiles == 0) {
    mbar_arrive(full);
    return;
  }
  const int group = p.q_heads / p.list_heads;
  if constexpr (FOLD) {
    const int row = outline.list / p.list_heads * p.fold, head = outline.list % p.list_heads * group;
    mbar_expect_tx(full, p.fold * group * D * 2);
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
      tma_load_3d(q_ring + slot * L::kQuery + h * (N * 128), &maps.q, full, h * 64, head, row);
    return;
  }
  mbar_expect_tx(full, L::kQuery);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(q_ring + slot * L::kQuery + h * (N * 128), &maps.q, full, h * 64, outline.list * group);
}

// How long L2 keeps what a launch reads: a single row's cache is read once in a step, and leaves before what all layers'
// launches use, their code above all. Rows of a batch may share blocks.
__device__ __forceinline__ uint64_t read_once(const DecodeParams& p) {
  return p.rows == 1 ? evict_first() : evict_normal();
}

template <int D, int N>
__device__ __forceinline__ void load_block(const DecodeMaps& maps, uint32_t dst, uint32_t full,
                                           int row, uint64_t policy) {
  using L = DecodeLayout<D, N>;
  mbar_expect_tx(full, L::kStage);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(dst + h * L::kPanel, &maps.k, full, h * 64, row, policy);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(dst + L::kTile + h * L::kPanel, &maps.v, full, h * 64, row, policy);
}

// One of four warps copies its 16 rows of two halves of a stage: a token tile's K and V, or two
// tiles' V. Lane i holds the place of the first half's row i, lane `second` + i that of the other's.
template <class T, int D>
__device__ __forceinline__ void copy_rows(uint32_t dst, const T* base, const T* second_base,
                                          uint32_t at, uint64_t policy, int second = 0) {
  constexpr int kChunks = D / 8, kRows = 32 / kChunks;  // rows per warp-wide copy
  constexpr int kPanel = kBlock * 128, kTile = kPanel * (D / 64);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i) {
    const int r = i * kRows + lane / kChunks, chunk = lane % kChunks;
    const int64_t src = (int64_t)__shfl_sync(~0u, at, r) * D + chunk * 8;
    const int64_t second_src = (int64_t)__shfl_sync(~0u, at, second + r) * D + chunk * 8;
    const uint32_t to = dst + (chunk / 8) * kPanel + swizzled(warp * 16 + r, chunk % 8);
    cp_async16(to, base + src, policy);
    cp_async16(to + kTile, second_base + second_src, policy);
  }
}

// Fills the ring from block tiles only: one warp, which looks up 32 tiles at a time.
template <int D, int N, bool FOLD>
__device__ __forceinline__ void produce_blocks(const DecodeMaps& maps, const DecodeParams& p,
                                               DecodeShared<D, N>& sh, const Units& units,
                                               uint32_t stages, uint32_t q_ring) {
  using L = DecodeLayout<D, N>;
  const int lane = threadIdx.x & 31;
  const uint64_t once = read_once(p);
  uint32_t count = 0, k = 0;
  // The first unit is read beside the total rather than after it.
  Unit next = units.at(blockIdx.x);
  const uint32_t total = units.total();
  for (uint32_t u = blockIdx.x; u < total; u += gridDim.x, ++k) {
    const Unit unit = next;
    if (u + gridDim.x < total) next = units.at(u + gridDim.x);
    const uint32_t kv_head = (unit.list % p.list_heads) * p.kv_heads / p.list_heads;
    const uint32_t* table = p.block_table + (uint64_t)unit.table * p.table_stride;
    for (uint32_t t0 = unit.tile_begin; t0 < unit.tile_end; t0 += 32) {
      BlockTile mine{0, 0, 0, 0.f};
      uint32_t y = 0;
      if (t0 + lane < unit.tile_end) {
        mine = block_tile(unit.work, p.block_ids, t0 + lane);
        y = (table[mine.block] * p.kv_heads + kv_head) * kBlock;
      }
      if (lane == 0 && t0 == unit.tile_begin)
        announce<D, N, FOLD>(maps, p, sh, q_ring, k, {u, unit.tile_end - unit.tile_begin, unit.list});
      const uint32_t n = min(32u, unit.tile_end - t0);
      for (uint32_t i = 0; i < n; ++i, ++count) {
        const uint32_t stage = count % L::kStages, round = count / L::kStages;
        const int row = __shfl_sync(~0u, y, i);
        StageMeta meta{__shfl_sync(~0u, mine.lo, i), __shfl_sync(~0u, mine.hi, i),
                       __shfl_sync(~0u, mine.ln_weight, i), 0, kNotSampled,
                       unit.work.end[0] - __shfl_sync(~0u, mine.block, i) * kBlock};
        if (lane == 0) {
          mbar_wait(smem_u32(&sh.empty[stage]), (round & 1) ^ 1);
          sh.meta[stage] = meta;
          load_block<D, N>(maps, stages + stage * L::kStage, smem_u32(&sh.full[stage]), row, once);
        }
        __syncwarp();
      }
    }
  }
  if (lane == 0) announce<D, N>(maps, p, sh, q_ring, k, {0, 0, 0});
}

// Fills the ring from any tile: four warps, each copying 16 rows of a token tile.
// The next tile's addresses are looked up before the present one is issued.
template <class T, int D, int N>
__device__ __forceinline__ void produce_any(const DecodeMaps& maps, const DecodeParams& p,
                                            DecodeShared<D, N>& sh, const Units& units,
                                            uint32_t stages, uint32_t q_ring) {
  using L = DecodeLayout<D, N>;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const bool leader = warp == 0 && lane == 0;
  const uint64_t once = read_once(p);
  const T* k_base = static_cast<const T*>(p.k);
  const T* v_base = static_cast<const T*>(p.v);
  uint32_t count = 0, k = 0;
  Unit next_unit = units.at(blockIdx.x);
  const uint32_t total = units.total();
  for (uint32_t u = blockIdx.x; u < total; u += gridDim.x, ++k) {
    const Unit unit = next_unit;
    if (u + gridDim.x < total) next_unit = units.at(u + gridDim.x);
    const WorkList& w = unit.work;
    const uint32_t kv_head = (unit.list % p.list_heads) * p.kv_heads / p.list_heads;
    const uint32_t* table = p.block_table + (uint64_t)unit.table * p.table_stride;
    const uint32_t token_tiles = (w.token_count + kBlock - 1) / kBlock;
    const uint32_t sample_tiles = (w.sample_count + kBlock - 1) / kBlock;
    const uint32_t block_tiles = list_tiles(w) - token_tiles - sample_tiles;
    // Cache row of this lane's token, or of the tile's block.
    auto locate = [&](uint32_t t, float& weight) -> uint32_t {
      weight = w.token_ln_weight;
      if (t >= unit.tile_end) return 0;
      uint32_t pos;
      if (t < block_tiles) {
        pos = block_tile(w, p.block_ids, t).block * kBlock;
      } else if (t < block_tiles + token_tiles) {
        const uint32_t i = (t - block_tiles) * kBlock + warp * 16 + (lane & 15);
        const uint64_t at = (uint64_t)w.token_first + min(i, w.token_count - 1);
        pos = token_at(p.token_ids, p.token_shift, at);
        if (p.token_ln_weight) weight += p.token_ln_weight[at];
      } else {
        const uint32_t i = (t - block_tiles - token_tiles) * kBlock + warp * 16 + (lane & 15);
        pos = p.token_ids[(uint64_t)w.sample_first + min(i, w.sample_count - 1)];
        weight = 0.f;
      }
      return (table[pos / kBlock] * p.kv_heads + kv_head) * kBlock + pos % kBlock;
    };
    float weight, next_weight;
    uint32_t at = locate(unit.tile_begin, weight);
    if (leader)
      announce<D, N>(maps, p, sh, q_ring, k, {u, unit.tile_end - unit.tile_begin, unit.list});
    for (uint32_t t = unit.tile_begin; t < unit.tile_end; ++t, ++count) {
      const uint32_t next = locate(t + 1, next_weight);
      const uint32_t stage = count % L::kStages, round = count / L::kStages;
      const uint32_t full = smem_u32(&sh.full[stage]), dst = stages + stage * L::kStage;
      mbar_wait(smem_u32(&sh.empty[stage]), (round & 1) ^ 1);
      if (t < block_tiles) {
        if (leader) {
          const BlockTile b = block_tile(w, p.block_ids, t);
          sh.meta[stage] = {b.lo, b.hi, b.ln_weight, 0, kNotSampled, 0};
          load_block<D, N>(maps, dst, full, at, once);
        } else {
          mbar_arrive(full);
        }
      } else {
        if (leader) {
          const bool sampled = t >= block_tiles + token_tiles;
          const uint32_t i = (t - block_tiles - (sampled ? token_tiles : 0)) * kBlock;
          const uint32_t n = sampled ? w.sample_count : w.token_count;
          sh.meta[stage] = {0, min(n - i, (uint32_t)kBlock), 0.f, 1, sampled ? i : kNotSampled, 0};
        }
        if (lane < 16) sh.weight[stage][warp * 16 + lane] = weight;
        copy_rows<T, D>(dst, k_base, v_base, at, once);
        cp_async_arrive(full);
      }
      mbar_arrive_warp(full, lane);  // Publishes the warp's plain stores.
      at = next;
      weight = next_weight;
    }
  }
  if (leader) announce<D, N>(maps, p, sh, q_ring, k, {0, 0, 0});
  cp_async_wait_all();
}

}  // namespace taper
