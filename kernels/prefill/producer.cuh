// Prefill attention: the warps that bring keys, values and queries to shared memory.
#pragma once

#include "tiles.cuh"

namespace taper {

// Where 32 entries of a tile lie in the cache, one a lane. Pairs of entries run from the
// last to the second, after the very first: it holds the attention sink, and with the
// maximum known from there the rest need not be computed again.
struct TileWalk {
  TileKeys keys;
  const uint32_t* table;
  uint32_t kv_head, block, y, pairs;
  int chunk;

  __device__ __forceinline__ void look_up(const SparsePrefillParams& p) {
    const uint32_t at = chunk * 32 + (threadIdx.x & 31), pair = at / 2;
    const uint32_t e = (pair + 1 < pairs ? pair + 1 : 0) * 2 + at % 2;
    block = kNoBlock, y = 0;
    if (pair < pairs && e < keys.count) {
      block = keys.block(e);
      y = (table[block] * p.kv_heads + kv_head) * kBlock;
    }
  }
  __device__ __forceinline__ bool open(const SparsePrefillParams& p, int round) {
    const int w = work_item(round);
    if (w >= items(p)) return false;
    const int place = item_place(p, w);
    const PrefillTile t = p.tiles[item_tile(p, w)];
    keys = tile_keys(p, t, place);
    table = p.block_table + (uint64_t)t.table * p.table_stride;
    kv_head = head_at(p, place) * p.kv_heads / p.q_heads;
    pairs = (keys.count + 1) / 2;
    chunk = (int)(pairs + 15) / 16 - 1;
    look_up(p);
    return true;
  }
};

// One stage of single tokens: rows of 16-byte pieces by the whole warp, zeros where there
// are fewer than 128.
template <class T, int D>
__device__ __forceinline__ void produce_columns(const SparsePrefillParams& p,
                                                PrefillShared<PrefillLayout<D>::kStages>& sh,
                                                const TileWalk& walk, uint32_t first,
                                                uint32_t count, uint32_t k_s, uint32_t v_s) {
  using L = PrefillLayout<D>;
  constexpr int kPieces = D / 8, kRows = 32 / kPieces;  // rows a pass of the warp
  const int lane = threadIdx.x & 31;
  const uint32_t stage = count % L::kStages, free = ((count / L::kStages) & 1) ^ 1;
  uint32_t id[kTileKeys / 32], y[kTileKeys / 32];  // a lane's tokens and their cache rows
#pragma unroll
  for (int i = 0; i < kTileKeys / 32; ++i) {
    const uint32_t at = first + i * 32 + lane;
    id[i] = at < walk.keys.columns ? walk.keys.ids[at] : UINT32_MAX;
  }
#pragma unroll
  for (int i = 0; i < kTileKeys / 32; ++i)
    y[i] = id[i] == UINT32_MAX
               ? UINT32_MAX
               : (walk.table[id[i] / kBlock] * p.kv_heads + walk.kv_head) * kBlock + id[i] % kBlock;
  mbar_wait(smem_u32(&sh.k_empty[stage]), free);
  if (lane == 0) sh.blocks[stage] = make_uint2(kColumns, kNoBlock);
#pragma unroll
  for (int i = 0; i < kTileKeys / 32; ++i) sh.columns[stage][i * 32 + lane] = id[i];
  const uint32_t piece = lane % kPieces;
  auto gather = [&](const void* from, uint32_t to) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 32; ++i)
#pragma unroll 4
      for (int r = 0; r < 32; r += kRows) {
        const uint32_t row = r + lane / kPieces, from_row = __shfl_sync(~0u, y[i], row);
        const uint32_t dst =
            to + (piece / 8) * L::kPanel + swizzled(i * 32 + row, piece % 8);
        if (from_row == UINT32_MAX) {
          st_shared_v4(dst, make_uint4(0, 0, 0, 0));
        } else {
          cp_async16(dst, static_cast<const T*>(from) + (uint64_t)from_row * D + piece * 8);
        }
      }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  gather(p.k, k_s + stage * L::kTile);
  mbar_wait(smem_u32(&sh.v_empty[stage]), free);
  gather(p.v, v_s + stage * L::kTile);
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  fence_async_smem();
  mbar_arrive(smem_u32(&sh.k_full[stage]));
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  fence_async_smem();
  mbar_arrive(smem_u32(&sh.v_full[stage]));
}

template <class T, int D, bool COLUMNS>
__device__ __forceinline__ void produce_keys(const CUtensorMap* km, const CUtensorMap* vm,
                                             const SparsePrefillParams& p,
                                             PrefillShared<PrefillLayout<D>::kStages>& sh,
                                             uint32_t k_s, uint32_t v_s) {
  using L = PrefillLayout<D>;
  const int lane = threadIdx.x & 31;
  uint32_t count = 0;
  TileWalk walk, ahead;
  bool more = ahead.open(p, 0);
  for (int round = 1; more; ++round) {
    walk = ahead;
    more = ahead.open(p, round);  // Its look-ups are done by the time this tile is.
    for (; walk.chunk >= 0; --walk.chunk, walk.look_up(p)) {
      const int pairs = min(walk.pairs - walk.chunk * 16, 16u);
      for (int i = pairs - 1; i >= 0; --i, ++count) {
        const uint32_t b0 = __shfl_sync(~0u, walk.block, 2 * i);
        const uint32_t b1 = __shfl_sync(~0u, walk.block, 2 * i + 1);
        const int y0 = __shfl_sync(~0u, walk.y, 2 * i);
        int y1 = __shfl_sync(~0u, walk.y, 2 * i + 1);
        if (b1 == kNoBlock) y1 = y0;  // Any finite rows: the mask hides them.
        if (lane == 0) {
          const uint32_t stage = count % L::kStages, free = ((count / L::kStages) & 1) ^ 1;
          const uint32_t kf = smem_u32(&sh.k_full[stage]), vf = smem_u32(&sh.v_full[stage]);
          const uint32_t kd = k_s + stage * L::kTile, vd = v_s + stage * L::kTile;
          mbar_wait(smem_u32(&sh.k_empty[stage]), free);
          sh.blocks[stage] = make_uint2(b0, b1);
          mbar_expect_tx(kf, L::kTile);
#pragma unroll
          for (int h = 0; h < D / 64; ++h) {
            tma_load_2d(kd + h * L::kPanel, km, kf, h * 64, y0);
            tma_load_2d(kd + h * L::kPanel + L::kPanel / 2, km, kf, h * 64, y1);
          }
          mbar_wait(smem_u32(&sh.v_empty[stage]), free);
          mbar_expect_tx(vf, L::kTile);
#pragma unroll
          for (int h = 0; h < D / 64; ++h) {
            tma_load_2d(vd + h * L::kPanel, vm, vf, h * 64, y0);
            tma_load_2d(vd + h * L::kPanel + L::kPanel / 2, vm, vf, h * 64, y1);
          }
        }
        __syncwarp();
        if (COLUMNS && lane > 0) {
          const uint32_t stage = count % L::kStages;
          mbar_arrive(smem_u32(&sh.k_full[stage]));
          mbar_arrive(smem_u32(&sh.v_full[stage]));
        }
      }
    }
    if constexpr (COLUMNS)
      for (uint32_t at = 0; at < walk.keys.columns; at += kTileKeys, ++count)
        produce_columns<T, D>(p, sh, walk, at, count, k_s, v_s);
  }
}

// Three warps copy the next tile's query rows, wherever they lie, and its outline.
template <class T, int D, class Shared>
__device__ __forceinline__ void produce_queries(const SparsePrefillParams& p, Shared& sh,
                                                uint32_t q_s) {
  using L = PrefillLayout<D>;
  const int tid = (threadIdx.x & 127) - 32, total = items(p);
  for (int round = 0, w; (w = work_item(round)) < total; ++round) {
    const int place = item_place(p, w), slot = round & 1;
    const PrefillTile t = p.tiles[item_tile(p, w)];
    const uint32_t pairs = tile_keys(p, t, place).pairs();
    const int head = head_at(p, place);
    mbar_wait(smem_u32(&sh.q_empty[slot]), ((round >> 1) & 1) ^ 1);
    TileOutline& outline = sh.outline[slot];
    if (tid == 0) outline.tile = t, outline.pairs = pairs;
    for (uint32_t r = tid; r < kTileRows; r += 96)
      outline.positions[r] = row_of(p, r) < t.rows ? p.positions[t.row_begin + row_of(p, r)] : t.pos_max;
    for (uint32_t i = tid; i < kTileRows * (D / 8); i += 96) {
      const uint32_t r = i / (D / 8), chunk = i % (D / 8);
      const uint32_t dst = q_s + slot * L::kTile + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8);
      if (row_of(p, r) < t.rows) {
        const uint32_t row = t.row_begin + row_of(p, r), src = p.q_rows ? p.q_rows[row] : row;
        const int of = p.head_pairs && r >= kTileRows / 2 ? head + 1 : head;
        cp_async16(dst, static_cast<const T*>(p.q) + ((int64_t)src * p.q_heads + of) * D + chunk * 8);
      } else {
        st_shared_v4(dst, make_uint4(0, 0, 0, 0));
      }
    }
    cp_async_wait_all();
    fence_async_smem();
    mbar_arrive(smem_u32(&sh.q_full[slot]));
  }
}

}  // namespace taper
