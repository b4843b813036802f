// Prefill attention: 128 query rows at any absolute positions against paged keys.
//
// A tile is up to 128 rows of one launch and one query head. Its keys are all blocks
// up to its last position (dense), sink and window blocks (sliding window), or the
// blocks of a compressed row list; the causal test uses each row's own position, so
// strided anchor rows, tails and sampled slices are ordinary tiles.
//
// One thread block per multiprocessor walks the tiles in a snake over a table that
// the caller sorts longest first. One warp streams pairs of 64-token blocks by bulk
// tensor copies, three warps gather the next tile's query rows, and two consumer warpgroups of 64
// rows each take turns at the tensor cores: while one computes its softmax the other
// multiplies. Inside a warpgroup the next scores are computed beside the present
// value product. No maximum is taken in the common case: probabilities are computed
// against the maximum known so far, and only a sum above 2^10 makes the step repeat
// with the true one.
#pragma once

#include <stddef.h>

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

// Where 32 entries of a tile lie in the cache, one a lane.
struct TileWalk {
  TileKeys keys;
  const uint32_t* table;
  uint32_t kv_head, block, y;
  int chunk;

  __device__ __forceinline__ void look_up(const PrefillParams& p) {
    const uint32_t e = chunk * 32 + (threadIdx.x & 31);
    block = kNoBlock, y = 0;
    if (e < keys.count) {
      block = keys.block(e);
      y = (table[block] * p.kv_heads + kv_head) * kBlock;
    }
  }
  __device__ __forceinline__ bool open(const PrefillParams& p, int round) {
    const int w = work_item(round);
    if (w >= p.tile_count * p.q_heads) return false;
    const int head = w % p.q_heads;
    const PrefillTile t = p.tiles[w / p.q_heads];
    keys = tile_keys(p, t, head);
    table = p.block_table + (uint64_t)t.table * p.table_stride;
    kv_head = head * p.kv_heads / p.q_heads;
    chunk = (int)(keys.count + 31) / 32 - 1;
    look_up(p);
    return true;
  }
};

template <int D>
__device__ __forceinline__ void produce_keys(const CUtensorMap* km, const CUtensorMap* vm,
                                             const PrefillParams& p,
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
      const int pairs = (min(walk.keys.count - walk.chunk * 32, 32u) + 1) / 2;
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
      }
    }
  }
}

// Three warps copy the next tile's query rows, wherever they lie, and its outline.
template <class T, int D, class Shared>
__device__ __forceinline__ void produce_queries(const PrefillParams& p, Shared& sh, uint32_t q_s) {
  using L = PrefillLayout<D>;
  const int tid = (threadIdx.x & 127) - 32, total = p.tile_count * p.q_heads;
  for (int round = 0, w; (w = work_item(round)) < total; ++round) {
    const int head = w % p.q_heads, slot = round & 1;
    const PrefillTile t = p.tiles[w / p.q_heads];
    const uint32_t pairs = (tile_keys(p, t, head).count + 1) / 2;
    mbar_wait(smem_u32(&sh.q_empty[slot]), ((round >> 1) & 1) ^ 1);
    TileOutline& outline = sh.outline[slot];
    if (tid == 0) outline.tile = t, outline.pairs = pairs;
    for (uint32_t r = tid; r < kTileRows; r += 96)
      outline.positions[r] = r < t.rows ? p.positions[t.row_begin + r] : t.pos_max;
    for (uint32_t i = tid; i < kTileRows * (D / 8); i += 96) {
      const uint32_t r = i / (D / 8), chunk = i % (D / 8);
      const uint32_t dst = q_s + slot * L::kTile + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8);
      if (r < t.rows) {
        const uint32_t src = p.q_rows ? p.q_rows[t.row_begin + r] : t.row_begin + r;
        cp_async16(dst, static_cast<const T*>(p.q) + ((int64_t)src * p.q_heads + head) * D +
                            chunk * 8);
      } else {
        st_shared_v4(dst, make_uint4(0, 0, 0, 0));
      }
    }
    cp_async_wait_all();
    fence_async_smem();
    mbar_arrive(smem_u32(&sh.q_full[slot]));
  }
}

// Turns words held column-wise by the four lanes of a quad into 16 consecutive bytes
// per lane: lane q gets block q of the four.
__device__ __forceinline__ uint4 quad_transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = threadIdx.x & 3;
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t s0 = __shfl_xor_sync(~0u, odd ? a : b, 1);
  const uint32_t s1 = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint32_t e0 = odd ? s0 : a, e1 = odd ? b : s0, e2 = odd ? s1 : c, e3 = odd ? d : s1;
  const uint32_t t0 = __shfl_xor_sync(~0u, high ? e0 : e2, 2);
  const uint32_t t1 = __shfl_xor_sync(~0u, high ? e1 : e3, 2);
  return high ? make_uint4(t0, t1, e2, e3) : make_uint4(e0, e1, t0, t1);
}

template <class T, int D>
struct PrefillConsumer {
  using L = PrefillLayout<D>;
  static constexpr float kFloor = -1e30f;  // Stands for "no key seen"; finite, so it subtracts.
  static constexpr float kSumMax = 1024.f;
  const PrefillParams& p;
  PrefillShared<L::kStages>& sh;
  const uint32_t bars, q_s, k_s, v_s;  // shared-memory addresses
  const uint64_t q_desc, k_desc, v_desc;
  const int wg, tid, warp, lane;
  const float scale2;
  float s[kTileKeys / 2], o[D / 2];
  uint32_t prob[kTileKeys / 16][4];
  float m[2], l[2], fix[2];
  uint32_t pos[2];
  uint32_t q_at;  // byte offset of the tile's query buffer

  __device__ __forceinline__ void scores(uint32_t stage) {
    const uint64_t k = k_desc + stage * (L::kTile >> 4), q = q_desc + (q_at >> 4);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t at = ((kk / 4) * L::kPanel + (kk % 4) * 32) >> 4;
      wgmma_ss<T, kTileKeys, false>(s, q + at, k + at, kk > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void values(uint32_t stage) {
    const uint64_t v = v_desc + stage * (L::kTile >> 4);
#pragma unroll
    for (int kk = 0; kk < kTileKeys / 16; ++kk)
      wgmma_rs<T, D>(o, prob[kk], v + kk * (2048 >> 4), 1);
    wgmma_commit();
  }
  static constexpr uint32_t kFull = offsetof(PrefillShared<L::kStages>, k_full);
  static constexpr uint32_t kEmpty = offsetof(PrefillShared<L::kStages>, k_empty);
  static constexpr uint32_t vFull = offsetof(PrefillShared<L::kStages>, v_full);
  static constexpr uint32_t vEmpty = offsetof(PrefillShared<L::kStages>, v_empty);
  static constexpr uint32_t qFull = offsetof(PrefillShared<L::kStages>, q_full);
  static constexpr uint32_t qEmpty = offsetof(PrefillShared<L::kStages>, q_empty);
  __device__ __forceinline__ void release(uint32_t bar) {
    if (lane == 0) mbar_arrive(bars + bar);
  }

  // The scores of this warp's rows alone: its neighbours may have had no need, so the
  // warpgroup's instruction is out of reach. The fragments are laid out alike.
  __device__ __forceinline__ void scores_again(uint32_t stage) {
    const uint32_t q = q_s + q_at + (wg * 64 + warp * 16) * 128, k = k_s + stage * L::kTile;
    const uint32_t r = lane / 4, in_chunk = (lane & 3) * 4;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
      float c[4] = {};
#pragma unroll 1
      for (int kk = 0; kk < D / 16; ++kk) {
        const uint32_t panel = (kk / 4) * L::kPanel, chunk = (kk % 4) * 2;
        const uint32_t a0 = q + panel + in_chunk, b0 = k + panel + in_chunk;
        mma_16x8x16<T>(c, ld_shared_u32(a0 + swizzled(r, chunk)),
                       ld_shared_u32(a0 + swizzled(r + 8, chunk)),
                       ld_shared_u32(a0 + swizzled(r, chunk + 1)),
                       ld_shared_u32(a0 + swizzled(r + 8, chunk + 1)),
                       ld_shared_u32(b0 + swizzled(8 * j + r, chunk)),
                       ld_shared_u32(b0 + swizzled(8 * j + r, chunk + 1)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] = c[i];
    }
  }

  // Rows of V past the sequence's end may hold anything; probability 0 does not hide a NaN.
  __device__ __forceinline__ void clear_tail(uint32_t stage, uint2 b, uint32_t kv_len) {
    const uint32_t last = b.y == kNoBlock ? b.x : b.y;
    if ((last + 1) * kBlock <= kv_len) return;
    const uint32_t v = v_s + stage * L::kTile, keep = kv_len - last * kBlock;
    for (uint32_t i = tid; i < kTileKeys * (D / 8); i += 128) {
      const uint32_t r = i / (D / 8), chunk = i % (D / 8);
      const bool in_last = r / kBlock == 1 || b.y == kNoBlock;
      if (in_last && r % kBlock >= keep)
        st_shared_v4(v + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8),
                     make_uint4(0, 0, 0, 0));
    }
    fence_async_smem();
    bar_sync(3 + wg, 128);
  }

  __device__ __forceinline__ bool needs_mask(uint2 b, const PrefillTile& t) const {
    const uint32_t last = max(b.x, b.y) * kBlock + kBlock - 1;
    if (last > t.pos_min) return true;
    if (p.window == 0) return false;
    bool cut = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t lo = (i ? b.y : b.x) * kBlock;
      cut |= lo + kBlock > (uint32_t)p.sink && lo + (uint32_t)p.window <= t.pos_max;
    }
    return cut;
  }
  // A row sees keys below `sink` and the last `window` up to its own position. A key
  // beyond the row wraps to a difference of 2^31 or more, outside every window.
  __device__ __forceinline__ void mask(uint2 b) {
    const uint32_t sink = p.window > 0 ? (uint32_t)p.sink : 0u;
    const uint32_t window = p.window > 0 ? (uint32_t)p.window : 0x7FFFFFFFu;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
      const uint32_t key = (j < 8 ? b.x : b.y) * kBlock + (j % 8) * 8 + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = key + (i & 1), row = pos[i / 2];
        const bool seen = (row - at < window) | ((at < sink) & (at <= row));
        s[4 * j + i] = seen ? s[4 * j + i] : -INFINITY;
      }
    }
  }

  // Scores to probabilities in place against the running maximum as it is. True if a
  // sum shows that the maximum must rise, and the caller has to start over.
  __device__ __forceinline__ bool exponentiate(float (&sum)[2]) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = exp2_fast(fmaf(s[4 * j + i], scale2, -m[i / 2]));
      sum[0] += s[4 * j] + s[4 * j + 1];
      sum[1] += s[4 * j + 2] + s[4 * j + 3];
    }
    return __any_sync(~0u, sum[0] > kSumMax || sum[1] > kSumMax);
  }
  __device__ __forceinline__ void raise_maximum() {
    float top[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int j = 1; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i / 2][i & 1] = fmaxf(top[i / 2][i & 1], s[4 * j + i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = fmaxf(top[r][0], top[r][1]);
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      now = fmaxf(m[r], now * scale2);
      fix[r] = exp2_fast(m[r] - now);
      m[r] = now;
      l[r] *= fix[r];
    }
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      o[4 * j] *= fix[0];
      o[4 * j + 1] *= fix[0];
      o[4 * j + 2] *= fix[1];
      o[4 * j + 3] *= fix[1];
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < kTileKeys / 16; ++kk)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        prob[kk][i] = pack2<T>(s[8 * kk + 2 * i], s[8 * kk + 2 * i + 1]);
  }

  __device__ __forceinline__ void store(const PrefillTile& t, int head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = l[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inv = sum > 0.f ? 1.f / sum : 0.f;
      const uint32_t in_tile = wg * 64 + warp * 16 + lane / 4 + 8 * r;
      const bool live = in_tile < t.rows;
      const uint32_t row = t.row_begin + in_tile;
      if (live && p.lse && (lane & 3) == 0)
        p.lse[(int64_t)row * p.q_heads + head] = sum > 0.f ? m[r] * kLn2 + logf(sum) : -INFINITY;
      if (p.out_f32) {
        float* out = static_cast<float*>(p.out) + ((int64_t)row * p.q_heads + head) * D;
        if (live) store_f32(out, r, inv);
      } else {
        const uint32_t to = live && p.q_rows ? p.q_rows[row] : row;
        T* out = static_cast<T*>(p.out) + ((int64_t)to * p.q_heads + head) * D;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            w[i] = pack2<T>(o[4 * (j + i) + 2 * r] * inv, o[4 * (j + i) + 2 * r + 1] * inv);
          const uint4 x = quad_transpose(w[0], w[1], w[2], w[3]);
          if (live) *reinterpret_cast<uint4*>(out + (j + (lane & 3)) * 8) = x;
        }
      }
      if (live && p.anchor_stride > 0 && pos[r] % p.anchor_stride == 0)
        store_f32(p.anchor_out + ((int64_t)(pos[r] / p.anchor_stride) * p.q_heads + head) * D, r,
                  inv);
    }
  }
  __device__ __forceinline__ void store_f32(float* out, int r, float inv) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<float2*>(out + j * 8 + (lane & 3) * 2) =
          make_float2(o[4 * j + 2 * r] * inv, o[4 * j + 2 * r + 1] * inv);
  }

  __device__ __forceinline__ void run() {
    const int total = p.tile_count * p.q_heads;
    uint32_t count = 0;  // pairs of this thread block so far
    if (wg == 1) bar_arrive(1, 256);
    for (int round = 0, w; (w = work_item(round)) < total; ++round) {
      const int slot = round & 1;
      mbar_wait(bars + qFull + slot * 8, (round >> 1) & 1);
      const PrefillTile t = sh.outline[slot].tile;
      const uint32_t n = sh.outline[slot].pairs;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pos[r] = sh.outline[slot].positions[wg * 64 + warp * 16 + lane / 4 + 8 * r];
        m[r] = kFloor, l[r] = 0.f, fix[r] = 1.f;
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
      if (n == 0) release(qEmpty + slot * 8);
      else attend(t, n, count, slot);
      count += n;
      store(t, w % p.q_heads);
    }
  }

  __device__ __forceinline__ void attend(const PrefillTile& t, uint32_t n, uint32_t count,
                                         int slot) {
    q_at = slot * L::kTile;
    float sum[2];
    uint32_t stage = count % L::kStages, parity = (count / L::kStages) & 1;
    mbar_wait(bars + kFull + stage * 8, parity);
    uint2 b = sh.blocks[stage];
    scores(stage);
    wgmma_wait<0>();
    pin(s);
    release(kEmpty + stage * 8);
    if (needs_mask(b, t)) mask(b);
    raise_maximum();
    exponentiate(sum);
    l[0] = sum[0], l[1] = sum[1];
    pack();
    for (uint32_t i = 1; i < n; ++i) {
      const uint32_t next = (count + i) % L::kStages, next_parity = ((count + i) / L::kStages) & 1;
      mbar_wait(bars + kFull + next * 8, next_parity);
      mbar_wait(bars + vFull + stage * 8, parity);
      if (i == 1) clear_tail(stage, b, t.kv_len);
      bar_sync(1 + wg, 256);
      pin(o);
      scores(next);
      values(stage);
      bar_arrive(2 - wg, 256);
      b = sh.blocks[next];
      const bool masked = needs_mask(b, t);
      wgmma_wait<1>();
      pin(s);
      if (masked) mask(b);
      const bool over = exponentiate(sum);
      pin(s);  // Keeps the exponentials before the wait, beside the value product.
      wgmma_wait<0>();
      pin(o);
      release(vEmpty + stage * 8);
      if (over) {
        // Rare: a score is far above all before it. The keys are still there, so the
        // scores are computed once more and taken against the new maximum.
        scores_again(next);
        if (masked) mask(b);
        raise_maximum();
        exponentiate(sum);
        rescale();
      }
      release(kEmpty + next * 8);
      l[0] += sum[0], l[1] += sum[1];
      pack();
      stage = next;
      parity = next_parity;
    }
    release(qEmpty + slot * 8);
    mbar_wait(bars + vFull + stage * 8, parity);
    if (n == 1) clear_tail(stage, b, t.kv_len);
    pin(o);
    wgmma_fence();
    values(stage);
    wgmma_wait<0>();
    pin(o);
    release(vEmpty + stage * 8);
  }
};

template <class T, int D>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap km, const __grid_constant__ CUtensorMap vm,
                   const __grid_constant__ PrefillParams p) {
  using L = PrefillLayout<D>;
  extern __shared__ uint8_t raw[];
  __shared__ PrefillShared<L::kStages> sh;
  const uint32_t q_s = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t k_s = q_s + 2 * L::kTile, v_s = k_s + L::kStages * L::kTile;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_u32(&sh.q_full[i]), 96);
      mbar_init(smem_u32(&sh.q_empty[i]), 8);
    }
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(smem_u32(&sh.k_full[i]), 1);
      mbar_init(smem_u32(&sh.v_full[i]), 1);
      mbar_init(smem_u32(&sh.k_empty[i]), 8);
      mbar_init(smem_u32(&sh.v_empty[i]), 8);
    }
    mbar_init_fence();
    tma_prefetch_map(&km);
    tma_prefetch_map(&vm);
  }
  __syncthreads();
  wait_for_predecessor();
  launch_dependents();
  if (threadIdx.x >= 256) {
    regs_shrink<40>();
    if (threadIdx.x < 288) produce_keys<D>(&km, &vm, p, sh, k_s, v_s);
    else produce_queries<T, D>(p, sh, q_s);
  } else {
    regs_grow<232>();
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
    PrefillConsumer<T, D> c{p,
                            sh,
                            smem_u32(&sh),
                            q_s,
                            k_s,
                            v_s,
                            smem_desc(q_s + wg * (64 * 128)),
                            smem_desc(k_s),
                            smem_desc(v_s, L::kPanel),
                            wg,
                            tid,
                            tid / 32,
                            tid % 32,
                            p.scale * kLog2e};
    c.run();
  }
}

}  // namespace taper
