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

  __device__ __forceinline__ void look_up(const PrefillParams& p) {
    const uint32_t at = chunk * 32 + (threadIdx.x & 31), pair = at / 2;
    const uint32_t e = (pair + 1 < pairs ? pair + 1 : 0) * 2 + at % 2;
    block = kNoBlock, y = 0;
    if (pair < pairs && e < keys.count) {
      block = keys.block(e);
      y = (table[unmarked(block)] * p.kv_heads + kv_head) * kBlock;
    }
  }
  __device__ __forceinline__ bool open(const PrefillParams& p, int round) {
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

// The single tokens of a tile, of which each of the warps that bring keys brings its half of every stage: a lane looks up two
// rows, a stage before they are copied, by tokens that it knows since the stage before that. What fills up the last stage
// is the last token once more, which no row sees there.
struct ColumnWalk {
  static constexpr int kOwn = kOwnColumns, kEach = kOwn / 32;
  int part;
  uint32_t far[kEach], id[kEach], y[kEach];  // tokens of the stage after the next; tokens of the next, and their cache rows

  __device__ __forceinline__ uint32_t place(uint32_t first, int i) const {
    return first + part * kOwn + i * 32 + (threadIdx.x & 31);
  }
  __device__ __forceinline__ void load(const TileKeys& keys, uint32_t first) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      far[i] = keys.columns > 0 ? keys.ids[min(place(first, i), keys.columns - 1)] : 0;
  }
  // Moves on: from here on the stage that begins `first` columns behind the tile's first is the farthest known.
  __device__ __forceinline__ void next(const PrefillParams& p, const TileWalk& walk, uint32_t first) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      id[i] = far[i];
      y[i] = (walk.table[unmarked(id[i]) / kBlock] * p.kv_heads + walk.kv_head) * kBlock + id[i] % kBlock;
    }
    load(walk.keys, first);
  }
};

// This warp's rows of a stage of single tokens, as pieces of 16 bytes: as many lanes as a row has pieces copy a run of them.
template <class T, int D>
__device__ __forceinline__ void copy_columns(const void* from, uint32_t to, int part, const uint32_t* rows) {
  constexpr int kPieces = D / 8, kRun = ColumnWalk::kOwn * kPieces / 32;
  const int lane = threadIdx.x & 31, piece = lane % kPieces, first = lane / kPieces * kRun;
  const T* base = static_cast<const T*>(from) + piece * 8;
  to += piece / 8 * PrefillLayout<D>::kPanel;
#pragma unroll 1
  for (int r = 0; r < kRun; r += 4) {
    const uint4 y = *reinterpret_cast<const uint4*>(rows + first + r);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      cp_async16(to + swizzled(part * ColumnWalk::kOwn + first + r + j, piece % 8),
                 base + (uint64_t)(j == 0 ? y.x : j == 1 ? y.y : j == 2 ? y.z : y.w) * D);
  }
}

template <class T, int D>
__device__ __forceinline__ void produce_columns(const PrefillParams& p,
                                                PrefillShared<PrefillLayout<D>::kStages>& sh,
                                                const TileWalk& walk, ColumnWalk& columns, uint32_t first,
                                                uint32_t count, uint32_t k_s, uint32_t v_s) {
  using L = PrefillLayout<D>;
  constexpr int kOwn = ColumnWalk::kOwn, kEach = ColumnWalk::kEach;
  const int lane = threadIdx.x & 31, part = columns.part;
  const uint32_t stage = count % L::kStages, free = ((count / L::kStages) & 1) ^ 1;
  const uint32_t kf = smem_u32(&sh.k_full[stage]), vf = smem_u32(&sh.v_full[stage]);
  uint32_t id[kEach];
  __syncwarp();  // All have read the rows of the stage before.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sh.column_rows[part][i * 32 + lane] = columns.y[i];
    id[i] = columns.place(first, i) < walk.keys.columns ? columns.id[i] : UINT32_MAX;
  }
  __syncwarp();
  columns.next(p, walk, first + 2 * kTileKeys);
  mbar_wait(smem_u32(&sh.k_empty[stage]), free);
  if (lane == 0 && part == 0) sh.blocks[stage] = make_uint2(kColumns, kNoBlock);
#pragma unroll
  for (int i = 0; i < kEach; ++i) sh.columns[stage][part * kOwn + i * 32 + lane] = id[i];
  copy_columns<T, D>(p.k, k_s + stage * L::kTile, part, sh.column_rows[part]);
  cp_async_arrive(kf);
  __syncwarp();
  if (lane == 0) mbar_arrive(kf);  // Publishes the warp's plain stores.
  mbar_wait(smem_u32(&sh.v_empty[stage]), free);
  copy_columns<T, D>(p.v, v_s + stage * L::kTile, part, sh.column_rows[part]);
  cp_async_arrive(vf);
  if (lane == 0) mbar_arrive(vf);
}

template <class T, int D, bool COLUMNS>
__device__ __forceinline__ void produce_keys(const CUtensorMap* km, const CUtensorMap* vm,
                                             const PrefillParams& p,
                                             PrefillShared<PrefillLayout<D>::kStages>& sh,
                                             uint32_t k_s, uint32_t v_s, int part) {
  using L = PrefillLayout<D>;
  const int lane = threadIdx.x & 31;
  const bool leader = lane == 0 && part == 0;
  uint32_t count = 0;
  TileWalk walk, ahead;
  ColumnWalk columns;
  columns.part = part;
  bool more = ahead.open(p, 0);
  for (int round = 1; more; ++round) {
    walk = ahead;
    more = ahead.open(p, round);  // Its look-ups are done by the time this tile is.
    if constexpr (COLUMNS) {
      columns.load(walk.keys, 0);
      columns.next(p, walk, kTileKeys);
    }
    for (; walk.chunk >= 0; --walk.chunk, walk.look_up(p)) {
      const int pairs = min(walk.pairs - walk.chunk * 16, 16u);
      for (int i = pairs - 1; i >= 0; --i, ++count) {
        const uint32_t b0 = __shfl_sync(~0u, walk.block, 2 * i);
        const uint32_t b1 = __shfl_sync(~0u, walk.block, 2 * i + 1);
        const int y0 = __shfl_sync(~0u, walk.y, 2 * i);
        int y1 = __shfl_sync(~0u, walk.y, 2 * i + 1);
        if (b1 == kNoBlock) y1 = y0;  // Any finite rows: the mask hides them.
        const uint32_t stage = count % L::kStages, free = ((count / L::kStages) & 1) ^ 1;
        const uint32_t kf = smem_u32(&sh.k_full[stage]), vf = smem_u32(&sh.v_full[stage]);
        if (COLUMNS || leader) mbar_wait(smem_u32(&sh.k_empty[stage]), free);
        if (leader) {
          const uint32_t kd = k_s + stage * L::kTile;
          sh.blocks[stage] = make_uint2(b0, b1);
          mbar_expect_tx(kf, L::kTile);
#pragma unroll
          for (int h = 0; h < D / 64; ++h) {
            tma_load_2d(kd + h * L::kPanel, km, kf, h * 64, y0);
            tma_load_2d(kd + h * L::kPanel + L::kPanel / 2, km, kf, h * 64, y1);
          }
        }
        if (COLUMNS || leader) mbar_wait(smem_u32(&sh.v_empty[stage]), free);
        if (leader) {
          const uint32_t vd = v_s + stage * L::kTile;
          mbar_expect_tx(vf, L::kTile);
#pragma unroll
          for (int h = 0; h < D / 64; ++h) {
            tma_load_2d(vd + h * L::kPanel, vm, vf, h * 64, y0);
            tma_load_2d(vd + h * L::kPanel + L::kPanel / 2, vm, vf, h * 64, y1);
          }
        }
        __syncwarp();
        if constexpr (COLUMNS) {
          // As many arrive as where single tokens are copied.
          if (!leader) mbar_arrive(kf), mbar_arrive(vf);
          if (lane == 0) mbar_arrive(kf), mbar_arrive(vf);
        }
      }
    }
    if constexpr (COLUMNS)
      for (uint32_t at = 0; at < walk.keys.columns; at += kTileKeys, ++count)
        produce_columns<T, D>(p, sh, walk, columns, at, count, k_s, v_s);
  }
  if constexpr (COLUMNS) cp_async_wait_all();
}

// The other warps copy the next tile's query rows, and its outline.
template <class T, int D, bool COLUMNS, class Shared>
__device__ __forceinline__ void produce_queries(const PrefillParams& p, Shared& sh,
                                                uint32_t q_s) {
  using L = PrefillLayout<D>;
  constexpr int kThreads = kQueryThreads<COLUMNS>;
  const int tid = (threadIdx.x & 127) - 32 * kKeyWarps<COLUMNS>, total = items(p);
  for (int round = 0, w; (w = work_item(round)) < total; ++round) {
    const int place = item_place(p, w), slot = round & 1;
    const PrefillTile t = p.tiles[item_tile(p, w)];
    const uint32_t pairs = tile_keys(p, t, place).pairs();
    const int head = head_at(p, place);
    mbar_wait(smem_u32(&sh.q_empty[slot]), ((round >> 1) & 1) ^ 1);
    TileOutline& outline = sh.outline[slot];
    if (tid == 0) outline.tile = t, outline.pairs = pairs;
    for (uint32_t r = tid; r < kTileRows; r += kThreads)
      outline.positions[r] = row_of(p, r) < t.rows ? p.positions[t.row_begin + row_of(p, r)] : t.pos_max;
    for (uint32_t i = tid; i < kTileRows * (D / 8); i += kThreads) {
      const uint32_t r = i / (D / 8), chunk = i % (D / 8);
      const uint32_t dst = q_s + slot * L::kTile + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8);
      if (row_of(p, r) < t.rows) {
        const uint32_t row = t.row_begin + row_of(p, r);
        const int of = p.head_pairs && r >= kTileRows / 2 ? head + 1 : head;
        cp_async16(dst, static_cast<const T*>(p.q) + ((int64_t)row * p.q_heads + of) * D + chunk * 8);
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
