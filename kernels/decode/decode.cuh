// Decode attention over work lists (split-KV).
//
// A list names the cache entries that one group of query heads reads: up to two
// token ranges, then whole blocks by logical index, then single tokens by id. It is
// cut into tiles of 64 keys and the tiles into units of a fixed number of tiles, so
// a list's partial results depend on that list alone and never on its batch mates.
//
// One thread block per multiprocessor walks the units. Producer warps fill a ring of
// shared-memory stages (bulk tensor copies for blocks, 16-byte asynchronous copies
// for single tokens); two consumer warpgroups take alternate tiles of a unit, keep
// their own running softmax and join them at the unit's end. Keys sit on the M side of
// the matrix instruction and the heads of the group on the N side (8 or 16), so a
// group of any size up to 16 reads each key once. Consumers read nothing from device
// memory: queries and the unit's outline arrive through shared memory too.
#pragma once

#include "../common/wgmma.cuh"
#include "../common/worklist.cuh"

namespace taper {

// A run of tiles of one list, with a copy of the list: one load tells a producer all.
struct Unit {
  uint32_t list, tile_begin, tile_end, table;
  WorkList work;
};
static_assert(sizeof(Unit) == 64, "sized by the caller");

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

constexpr uint32_t kUnitTilesMin = 2, kUnitTilesMax = 64, kUnitsPerRow = 256;

__host__ __device__ inline uint32_t range_tiles(uint32_t b, uint32_t e) {
  return e > b ? (e + kBlock - 1) / kBlock - b / kBlock : 0;
}
__device__ __forceinline__ uint32_t list_tiles(const WorkList& w) {
  return range_tiles(w.begin[0], w.end[0]) + range_tiles(w.begin[1], w.end[1]) + w.block_count +
         (w.token_count + kBlock - 1) / kBlock;
}
// Tiles of one unit: about 256 units a row when the list is long, a power of two.
__device__ __forceinline__ uint32_t unit_tiles(uint32_t tiles, uint32_t list_heads) {
  uint64_t want = ((uint64_t)tiles * list_heads + kUnitsPerRow - 1) / kUnitsPerRow;
  uint32_t u = kUnitTilesMin;
  while (u < want && u < kUnitTilesMax) u *= 2;
  return u;
}

// --- plan ------------------------------------------------------------------

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

// --- attention -------------------------------------------------------------

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
  uint32_t gathered; // its rows were copied one by one and may carry weights
};

template <int D, int N>
struct DecodeLayout {
  static constexpr int kPanel = kBlock * 128;      // 64 rows of 64 elements
  static constexpr int kTile = kPanel * (D / 64);  // K or V of one tile
  static constexpr int kStage = 2 * kTile;
  static constexpr int kStages = D == 128 ? 6 : 12;
  static constexpr int kQuery = N * 128 * (D / 64);  // queries of one unit, double buffered
  static constexpr int kProb = N * 128;              // one warpgroup's probabilities
  static constexpr int kBytes = kStages * kStage + 2 * (kQuery + kProb) + 1024;
};

// What the consumers need to know of a unit. `tiles` 0 ends the walk.
struct UnitOutline {
  uint32_t unit, tiles;
};

template <int D, int N>
struct DecodeShared {
  static constexpr int kStages = DecodeLayout<D, N>::kStages;
  uint64_t full[kStages], empty[kStages], q_full[2], q_empty[2];
  StageMeta meta[kStages];
  UnitOutline outline[2];
  float weight[kStages][kBlock];
  float warp_red[2][4][N];
  float join_o[N][D], join_m[N], join_l[N];  // the second warpgroup's part of a unit
};

template <class T, int D, int N>
struct DecodeConsumer {
  using L = DecodeLayout<D, N>;
  static constexpr int C = N / 4;  // head columns per thread
  const DecodeParams& p;
  DecodeShared<D, N>& sh;
  const uint32_t stages, q_ring, prob_s;
  const int wg, tid, warp, lane, group;
  float m[C], l[C], o[D / 64][N / 2];

  // Head column of accumulator column c, and its first accumulator.
  __device__ __forceinline__ int head(int c) const { return (c / 2) * 8 + (lane & 3) * 2 + (c & 1); }
  static __device__ __forceinline__ int acc(int c) { return (c / 2) * 4 + (c & 1); }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int c = 0; c < C; ++c) m[c] = -INFINITY, l[c] = 0.f;
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) o[h][i] = 0.f;
  }

  // Raises the running maximum to cover this tile and rescales what was summed.
  __device__ __forceinline__ void rebase(const float (&s)[N / 2]) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float top = fmaxf(s[acc(c)], s[acc(c) + 2]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      if (lane < 4) sh.warp_red[wg][warp][head(c)] = top;
    }
    bar_sync(1 + wg, 128);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float top = m[c];
      for (int w = 0; w < 4; ++w) top = fmaxf(top, sh.warp_red[wg][w][head(c)]);
      const float f = top == m[c] ? 1.f : exp2_fast(m[c] - top);
      m[c] = top;
      l[c] *= f;
#pragma unroll
      for (int h = 0; h < D / 64; ++h) o[h][acc(c)] *= f, o[h][acc(c) + 2] *= f;
    }
  }

  template <bool GATHER>
  __device__ __forceinline__ void tile(int stage, uint32_t q_s) {
    const StageMeta meta = sh.meta[stage];
    const uint32_t k_s = stages + stage * L::kStage, v_s = k_s + L::kTile;
    const int r0 = warp * 16 + lane / 4;
    if (GATHER && meta.gathered) fence_async_smem();
    if (meta.lo > 0 || meta.hi < kBlock) {
      // Rows outside the list get probability 0, which must not meet a NaN value.
      for (int i = tid; i < kBlock * (D / 8); i += 128) {
        const uint32_t r = i / (D / 8), chunk = i % (D / 8);
        if (r < meta.lo || r >= meta.hi)
          st_shared_v4(v_s + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8),
                       make_uint4(0, 0, 0, 0));
      }
      fence_async_smem();
    }
    float s[N / 2];
    const uint64_t k_desc = smem_desc(k_s), q_desc = smem_desc(q_s);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
      wgmma_ss<T, N, false>(s, k_desc + (((kk / 4) * L::kPanel + (kk % 4) * 32) >> 4),
                            q_desc + (((kk / 4) * (N * 128) + (kk % 4) * 32) >> 4), kk > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);

    const float scale2 = p.scale * kLog2e;
    float bias0 = meta.ln_weight, bias1 = meta.ln_weight;
    if (GATHER && meta.gathered) {
      bias0 += sh.weight[stage][r0];
      bias1 += sh.weight[stage][r0 + 8];
    }
    bias0 = r0 >= meta.lo && r0 < meta.hi ? bias0 * kLog2e : -INFINITY;
    bias1 = r0 + 8 >= meta.lo && r0 + 8 < meta.hi ? bias1 * kLog2e : -INFINITY;
    bool over = false;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int j = acc(c);
      // A masked row may hold anything, so it is replaced rather than added to.
      s[j] = bias0 == -INFINITY ? -INFINITY : s[j] * scale2 + bias0;
      s[j + 2] = bias1 == -INFINITY ? -INFINITY : s[j + 2] * scale2 + bias1;
      over |= fmaxf(s[j], s[j + 2]) > m[c] + 8.f;
    }
    // The maximum may lag by 2^8: fp32 sums carry it, and rescaling becomes rare.
    if (bar_any(1 + wg, 128, over)) rebase(s);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int j = acc(c), h = head(c);
      const float base = m[c] == -INFINITY ? 0.f : m[c];
      const float e0 = exp2_fast(s[j] - base), e1 = exp2_fast(s[j + 2] - base);
      l[c] += e0 + e1;
      const uint32_t pair = pack2<T>(e0, e1);
      st_shared_u16(prob_s + swizzled(h, r0 / 8) + (r0 % 8) * 2, (uint16_t)pair);
      st_shared_u16(prob_s + swizzled(h, r0 / 8 + 1) + (r0 % 8) * 2, (uint16_t)(pair >> 16));
    }
    fence_async_smem();
    bar_sync(1 + wg, 128);
    const uint64_t v_desc = smem_desc(v_s), p_desc = smem_desc(prob_s);
#pragma unroll
    for (int h = 0; h < D / 64; ++h) pin(o[h]);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlock / 16; ++kk)
#pragma unroll
      for (int h = 0; h < D / 64; ++h)
        wgmma_ss<T, N, true>(o[h], v_desc + ((h * L::kPanel + kk * 2048) >> 4),
                             p_desc + ((kk * 32) >> 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < D / 64; ++h) pin(o[h]);
  }

  // Joins the two warpgroups' parts and writes the unit's partial result. Barriers 3
  // and 4 hand the join buffer over and back.
  __device__ __forceinline__ void store(uint32_t unit) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) l[c] += __shfl_xor_sync(~0u, l[c], d);
      if (lane < 4) sh.warp_red[wg][warp][head(c)] = l[c];
    }
    bar_sync(1 + wg, 128);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      l[c] = 0.f;
      for (int w = 0; w < 4; ++w) l[c] += sh.warp_red[wg][w][head(c)];
    }
    bar_sync(1 + wg, 128);  // The next unit reuses the reduction buffer.
    const int dim = warp * 16 + lane / 4;
    if (wg == 1) {
      bar_sync(4, 256);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int hd = head(c), j = acc(c);
#pragma unroll
        for (int h = 0; h < D / 64; ++h) {
          sh.join_o[hd][h * 64 + dim] = o[h][j];
          sh.join_o[hd][h * 64 + dim + 8] = o[h][j + 2];
        }
        if (warp == 0 && lane < 4) sh.join_m[hd] = m[c], sh.join_l[hd] = l[c];
      }
      bar_arrive(3, 256);
      return;
    }
    bar_sync(3, 256);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int hd = head(c), j = acc(c);
      const float m1 = sh.join_m[hd], top = fmaxf(m[c], m1);
      const float f0 = m[c] == -INFINITY ? 0.f : exp2_fast(m[c] - top);
      const float f1 = m1 == -INFINITY ? 0.f : exp2_fast(m1 - top);
      const float sum = l[c] * f0 + sh.join_l[hd] * f1;
      if (hd >= group) continue;
      const float inv = sum > 0.f ? 1.f / sum : 0.f;
      float* out = p.part_o + ((int64_t)unit * group + hd) * D + dim;
#pragma unroll
      for (int h = 0; h < D / 64; ++h) {
        out[h * 64] = (o[h][j] * f0 + sh.join_o[hd][h * 64 + dim] * f1) * inv;
        out[h * 64 + 8] = (o[h][j + 2] * f0 + sh.join_o[hd][h * 64 + dim + 8] * f1) * inv;
      }
      if (warp == 0 && lane < 4)
        p.part_lse[(int64_t)unit * group + hd] =
            sum > 0.f ? top * kLn2 + logf(sum) : -INFINITY;
    }
    bar_arrive(4, 256);
  }

  template <bool GATHER>
  __device__ __forceinline__ void run() {
    if (wg == 0) bar_arrive(4, 256);
    uint32_t count = 0;
    for (uint32_t k = 0;; ++k) {
      const uint32_t slot = k & 1;
      mbar_wait(smem_u32(&sh.q_full[slot]), (k >> 1) & 1);
      const UnitOutline u = sh.outline[slot];
      if (u.tiles == 0) break;
      reset();
      for (uint32_t i = wg; i < u.tiles; i += 2) {
        const uint32_t stage = (count + i) % L::kStages, round = (count + i) / L::kStages;
        mbar_wait(smem_u32(&sh.full[stage]), round & 1);
        tile<GATHER>(stage, q_ring + slot * L::kQuery);
        if (lane == 0) mbar_arrive(smem_u32(&sh.empty[stage]));
      }
      count += u.tiles;
      if (lane == 0) mbar_arrive(smem_u32(&sh.q_empty[slot]));
      store(u.unit);
    }
    if (wg == 1) bar_sync(4, 256);  // Leaves no arrival pending.
  }
};

struct DecodeMaps {
  CUtensorMap q, k, v;
};

// One thread announces the k-th unit of this thread block and fetches its queries: N
// rows of 64 elements each, of which only the group's first are used.
template <int D, int N>
__device__ __forceinline__ void announce(const DecodeMaps& maps, const DecodeParams& p,
                                         DecodeShared<D, N>& sh, uint32_t q_ring, uint32_t k,
                                         UnitOutline outline, uint32_t list) {
  using L = DecodeLayout<D, N>;
  const uint32_t slot = k & 1, full = smem_u32(&sh.q_full[slot]);
  mbar_wait(smem_u32(&sh.q_empty[slot]), ((k >> 1) & 1) ^ 1);
  sh.outline[slot] = outline;
  if (outline.tiles == 0) {
    mbar_arrive(full);
    return;
  }
  mbar_expect_tx(full, L::kQuery);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(q_ring + slot * L::kQuery + h * (N * 128), &maps.q, full, h * 64,
                list * (p.q_heads / p.list_heads));
}

template <int D, int N>
__device__ __forceinline__ void load_block(const DecodeMaps& maps, uint32_t dst, uint32_t full,
                                           int row) {
  using L = DecodeLayout<D, N>;
  mbar_expect_tx(full, L::kStage);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(dst + h * L::kPanel, &maps.k, full, h * 64, row);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load_2d(dst + L::kTile + h * L::kPanel, &maps.v, full, h * 64, row);
}

// Fills the ring from block tiles only: one warp, which looks up 32 tiles at a time.
template <int D, int N>
__device__ __forceinline__ void produce_blocks(const DecodeMaps& maps, const DecodeParams& p,
                                               DecodeShared<D, N>& sh, uint32_t stages,
                                               uint32_t q_ring) {
  using L = DecodeLayout<D, N>;
  const int lane = threadIdx.x & 31;
  uint32_t count = 0, k = 0;
  // The first unit is read beside the total rather than after it.
  Unit next = p.units[blockIdx.x];
  const uint32_t total = p.list_units[p.rows * p.list_heads];
  for (uint32_t u = blockIdx.x; u < total; u += gridDim.x, ++k) {
    const Unit unit = next;
    if (u + gridDim.x < total) next = p.units[u + gridDim.x];
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
        announce<D, N>(maps, p, sh, q_ring, k, {u, unit.tile_end - unit.tile_begin}, unit.list);
      const uint32_t n = min(32u, unit.tile_end - t0);
      for (uint32_t i = 0; i < n; ++i, ++count) {
        const uint32_t stage = count % L::kStages, round = count / L::kStages;
        const int row = __shfl_sync(~0u, y, i);
        StageMeta meta{__shfl_sync(~0u, mine.lo, i), __shfl_sync(~0u, mine.hi, i),
                       __shfl_sync(~0u, mine.ln_weight, i), 0};
        if (lane == 0) {
          mbar_wait(smem_u32(&sh.empty[stage]), (round & 1) ^ 1);
          sh.meta[stage] = meta;
          load_block<D, N>(maps, stages + stage * L::kStage, smem_u32(&sh.full[stage]), row);
        }
        __syncwarp();
      }
    }
  }
  if (lane == 0) announce<D, N>(maps, p, sh, q_ring, k, {0, 0}, 0);
}

// Fills the ring from any tile: four warps, each copying 16 rows of a token tile.
// The next tile's addresses are looked up before the present one is issued.
template <class T, int D, int N>
__device__ __forceinline__ void produce_any(const DecodeMaps& maps, const DecodeParams& p,
                                            DecodeShared<D, N>& sh, uint32_t stages,
                                            uint32_t q_ring) {
  using L = DecodeLayout<D, N>;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const bool leader = warp == 0 && lane == 0;
  const T* k_base = static_cast<const T*>(p.k);
  const T* v_base = static_cast<const T*>(p.v);
  uint32_t count = 0, k = 0;
  Unit next_unit = p.units[blockIdx.x];
  const uint32_t total = p.list_units[p.rows * p.list_heads];
  for (uint32_t u = blockIdx.x; u < total; u += gridDim.x, ++k) {
    const Unit unit = next_unit;
    if (u + gridDim.x < total) next_unit = p.units[u + gridDim.x];
    const WorkList& w = unit.work;
    const uint32_t kv_head = (unit.list % p.list_heads) * p.kv_heads / p.list_heads;
    const uint32_t* table = p.block_table + (uint64_t)unit.table * p.table_stride;
    const uint32_t block_tiles = list_tiles(w) - (w.token_count + kBlock - 1) / kBlock;
    // Cache row of this lane's token, or of the tile's block.
    auto locate = [&](uint32_t t, float& weight) -> uint32_t {
      weight = w.token_ln_weight;
      if (t >= unit.tile_end) return 0;
      uint32_t pos;
      if (t < block_tiles) {
        pos = block_tile(w, p.block_ids, t).block * kBlock;
      } else {
        const uint32_t i = (t - block_tiles) * kBlock + warp * 16 + (lane & 15);
        const uint64_t at = (uint64_t)w.token_first + min(i, w.token_count - 1);
        pos = p.token_ids[at];
        if (p.token_ln_weight) weight += p.token_ln_weight[at];
      }
      return (table[pos / kBlock] * p.kv_heads + kv_head) * kBlock + pos % kBlock;
    };
    float weight, next_weight;
    uint32_t at = locate(unit.tile_begin, weight);
    if (leader)
      announce<D, N>(maps, p, sh, q_ring, k, {u, unit.tile_end - unit.tile_begin}, unit.list);
    for (uint32_t t = unit.tile_begin; t < unit.tile_end; ++t, ++count) {
      const uint32_t next = locate(t + 1, next_weight);
      const uint32_t stage = count % L::kStages, round = count / L::kStages;
      const uint32_t full = smem_u32(&sh.full[stage]), dst = stages + stage * L::kStage;
      mbar_wait(smem_u32(&sh.empty[stage]), (round & 1) ^ 1);
      if (t < block_tiles) {
        if (leader) {
          const BlockTile b = block_tile(w, p.block_ids, t);
          sh.meta[stage] = {b.lo, b.hi, b.ln_weight, 0};
          load_block<D, N>(maps, dst, full, at);
        } else {
          mbar_arrive(full);
        }
      } else {
        if (leader)
          sh.meta[stage] = {0, min(w.token_count - (t - block_tiles) * kBlock, (uint32_t)kBlock),
                            0.f, 1};
        if (lane < 16) sh.weight[stage][warp * 16 + lane] = weight;
        constexpr int kChunks = D / 8, kRows = 32 / kChunks;  // rows per warp-wide copy
#pragma unroll
        for (int i = 0; i < 16 / kRows; ++i) {
          const int r = i * kRows + lane / kChunks, chunk = lane % kChunks;
          const int64_t src = (int64_t)__shfl_sync(~0u, at, r) * D + chunk * 8;
          const uint32_t to =
              dst + (chunk / 8) * L::kPanel + swizzled(warp * 16 + r, chunk % 8);
          cp_async16(to, k_base + src);
          cp_async16(to + L::kTile, v_base + src);
        }
        cp_async_arrive(full);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(full);  // Publishes the warp's plain stores.
      at = next;
      weight = next_weight;
    }
  }
  if (leader) announce<D, N>(maps, p, sh, q_ring, k, {0, 0}, 0);
  cp_async_wait_all();
}

template <class T, int D, int N, bool GATHER>
__global__ void __launch_bounds__(GATHER ? 384 : 288, 1)
    decode_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ DecodeParams p) {
  using L = DecodeLayout<D, N>;
  extern __shared__ uint8_t raw[];
  __shared__ DecodeShared<D, N> sh;
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t q_ring = stages + L::kStages * L::kStage;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(smem_u32(&sh.full[i]), GATHER ? 132 : 1);
      mbar_init(smem_u32(&sh.empty[i]), 4);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_u32(&sh.q_full[i]), 1);
      mbar_init(smem_u32(&sh.q_empty[i]), 8);
    }
    mbar_init_fence();
    tma_prefetch_map(&maps.q);
    tma_prefetch_map(&maps.k);
    tma_prefetch_map(&maps.v);
  }
  __syncthreads();
  wait_for_predecessor();
  launch_dependents();
  if (threadIdx.x >= 256) {
    if constexpr (GATHER) produce_any<T, D, N>(maps, p, sh, stages, q_ring);
    else produce_blocks<D, N>(maps, p, sh, stages, q_ring);
    return;
  }
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
  DecodeConsumer<T, D, N> c{p,   sh,  stages,   q_ring,   q_ring + 2 * L::kQuery + wg * L::kProb,
                            wg,  tid, tid / 32, tid % 32, p.q_heads / p.list_heads};
  c.template run<GATHER>();
}

}  // namespace taper
