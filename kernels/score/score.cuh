// Scores of query rows against a view of the keys.
//
// A view is [blocks, kv_heads, per_block, width] beside the cache: all keys
// (per_block 64), block means (1), label channels (64, narrow), or a pair of upper and
// lower bounds, whose score sum_j max(q_j hi_j, q_j lo_j) is the product of q's positive
// part with hi plus that of its negative part with lo. One warp scores 64 entries for
// all heads of a group; the products' inner dimension is permuted so that every lane
// reads 16 consecutive bytes straight into its matrix fragment.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

enum ScoreReduce : int32_t { kPerHead = 0, kGroupMax = 1, kGroupMass = 2 };

struct ScoreParams {
  const void* q;                // [rows, q_heads, width]
  const void* view;             // [blocks, kv_heads, per_block, width]; upper bounds if `lower`
  const void* lower;            // lower bounds, or null
  const uint32_t* block_table;  // [tables, table_stride]
  const uint32_t* row_table;    // [rows] or null
  const uint32_t* lens;         // [rows], visible tokens
  const float* lse;             // [rows, q_heads], for kGroupMass
  float* out;       // [rows, q_heads or kv_heads, stride]: scaled scores, or the group's
  float* tile_max;  // [rows, q_heads, tile_stride]: of 64 entries each, or null
  float* tile_sum;  // as tile_max: sum of exp(score - max)
  int32_t rows, q_heads, kv_heads, width, dtype, table_stride;
  int32_t per_block, max_entries, stride, tile_stride;
  int32_t reduce, overlap;
  float scale;
  int32_t reserved;
};

constexpr int kScoreWarps = 8;

__device__ __forceinline__ uint32_t positive2(uint32_t x, bool keep_positive) {
  // Two 16-bit floats: zero those of the other sign.
  const uint32_t neg = (x >> 15) & 0x00010001u;
  const uint32_t mask = neg * 0xFFFFu;
  return keep_positive ? x & ~mask : x & mask;
}

template <class T, int W, int NT, bool BOUNDS>
__global__ void __launch_bounds__(kScoreWarps * 32) score_kernel(const ScoreParams p) {
  // A lane reads 16 consecutive bytes a load; of 16 labels only 8, and half a fragment.
  constexpr int kLoads = W < 32 ? 1 : W / 32;
  constexpr bool kHalf = W == 16;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
  const int kv_head = blockIdx.y, row = blockIdx.z, group = p.q_heads / p.kv_heads;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t len = p.lens[row], span = kBlock / p.per_block;
  const uint32_t entries = (len + span - 1) / span;
  const uint32_t* table =
      p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride;

  auto piece = [](const T* line, int i) {
    if constexpr (kHalf) {
      const uint2 x = reinterpret_cast<const uint2*>(line)[i];
      return make_uint4(x.x, x.y, 0, 0);
    } else {
      return reinterpret_cast<const uint4*>(line)[i];
    }
  };
  uint4 q[NT][kLoads];
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    const int h = t * 8 + lane / 4;
    const T* src = static_cast<const T*>(p.q) +
                   ((int64_t)row * p.q_heads + kv_head * group + (h < group ? h : 0)) * W;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      q[t][i] = h < group ? piece(src, quad + 4 * i) : make_uint4(0, 0, 0, 0);
  }
  auto line = [&](const void* view, uint32_t e) {
    e = min(e, entries - 1);
    const uint64_t at =
        ((uint64_t)table[e / p.per_block] * p.kv_heads + kv_head) * p.per_block + e % p.per_block;
    return static_cast<const T*>(view) + at * W;
  };
  // 16 entries' rows; as many of the four such tiles as registers allow are in flight.
  constexpr int kFull = kLoads * (BOUNDS ? 2 : 1), kAhead = kFull <= 2 ? 4 : kFull == 4 ? 2 : 1;
  struct Rows {
    uint4 x[kLoads], y[kLoads];
  };
  auto fetch = [&](Rows& to, const void* view, uint32_t e) {
    const T* lo = line(view, e);
    const T* hi = line(view, e + 8);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to.x[i] = piece(lo, quad + 4 * i);
      to.y[i] = piece(hi, quad + 4 * i);
    }
  };
  auto multiply = [&](float(&c)[NT][4], const Rows& rows, bool part) {
    const auto& x = rows.x;
    const auto& y = rows.y;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        uint4 b = q[t][i];
        if (BOUNDS) {
          b = make_uint4(positive2(b.x, part), positive2(b.y, part), positive2(b.z, part),
                         positive2(b.w, part));
        }
        mma_16x8x16<T>(c[t], x[i].x, y[i].x, x[i].y, y[i].y, b.x, b.y);
        if constexpr (!kHalf) mma_16x8x16<T>(c[t], x[i].z, y[i].z, x[i].w, y[i].w, b.z, b.w);
      }
  };

  Rows rows[kAhead], lower[BOUNDS ? kAhead : 1];
  auto fetch_tiles = [&](uint32_t from) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      fetch(rows[a], p.view, from + a * 16 + lane / 4);
      if (BOUNDS) fetch(lower[a], p.lower, from + a * 16 + lane / 4);
    }
  };
  if (blockIdx.x * kScoreWarps * 64 + warp * 64 < entries)
    fetch_tiles((blockIdx.x * kScoreWarps + warp) * 64);
#pragma unroll 1
  for (uint32_t first = (blockIdx.x * kScoreWarps + warp) * 64; first < entries;
       first += gridDim.x * kScoreWarps * 64) {
    float c[4][NT][4];
#pragma unroll
    for (int r0 = 0; r0 < 4; r0 += kAhead) {
      if (r0 > 0) fetch_tiles(first + r0 * 16);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int r = r0 + a;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) c[r][t][i] = 0.f;
        multiply(c[r], rows[a], true);
        if (BOUNDS) multiply(c[r], lower[a], false);
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) c[r][t][i] *= p.scale;
      }
    }
    // The next run's first rows come while this one's scores are written.
    if (first + gridDim.x * kScoreWarps * 64 < entries)
      fetch_tiles(first + gridDim.x * kScoreWarps * 64);

    // Accumulator i of tile t belongs to head t * 8 + 2 * quad + (i & 1), entry + 8 * (i / 2).
    auto head_of = [&](int t, int i) { return t * 8 + 2 * quad + (i & 1); };
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t e = first + r * 16 + lane / 4 + 8 * half;
        float joint = p.reduce == kGroupMax ? -INFINITY : 0.f;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int h = head_of(t, i);
            const float s = c[r][t][2 * half + i];
            if (h >= group) continue;
            const int64_t qh = kv_head * group + h;
            if (p.reduce == kPerHead) {
              if (e < entries) p.out[((int64_t)row * p.q_heads + qh) * p.stride + e] = s;
            } else if (p.reduce == kGroupMax) {
              joint = fmaxf(joint, s);
            } else {
              joint += exp2_fast((s - p.lse[(int64_t)row * p.q_heads + qh]) * kLog2e);
            }
          }
        if (p.reduce != kPerHead) {
#pragma unroll
          for (int d = 1; d < 4; d *= 2) {
            const float other = __shfl_xor_sync(~0u, joint, d);
            joint = p.reduce == kGroupMax ? fmaxf(joint, other) : joint + other;
          }
          if (quad == 0 && e < entries)
            p.out[((int64_t)row * p.kv_heads + kv_head) * p.stride + e] = joint;
        }
      }
    }
    if (!p.tile_max) continue;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = -INFINITY, sum = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t e = first + (k / 2) * 16 + lane / 4 + 8 * (k & 1);
          if (e < entries) top = fmaxf(top, c[k / 2][t][2 * (k & 1) + i]);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t e = first + (k / 2) * 16 + lane / 4 + 8 * (k & 1);
          if (e < entries) sum += exp2_fast((c[k / 2][t][2 * (k & 1) + i] - top) * kLog2e);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        const int h = head_of(t, i);
        if (lane < 4 && h < group) {
          const int64_t at =
              ((int64_t)row * p.q_heads + kv_head * group + h) * p.tile_stride + first / 64;
          p.tile_max[at] = top;
          p.tile_sum[at] = sum;
        }
      }
  }
}

}  // namespace taper
