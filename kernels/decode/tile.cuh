// Decode attention: one warpgroup's running softmax over tiles, and the join of the two
// warpgroups of a thread block into one partial result.
#pragma once

#include "ring.cuh"

namespace taper {

struct NoScores {
  __device__ __forceinline__ void operator()(int, int, float) const {}
};

// SQUARES: of sampled keys quarters of their probabilities' squares, rounded as the product with values takes them, are summed
// too, for the error of the sums. They are N columns more of that product.
template <class T, int D, int N, int S = kStagesBeside<D, N>, bool SQUARES = false>
struct TileSums {
  using L = DecodeLayout<D, N, S>;
  static constexpr int C = N / 4;  // head columns per thread
  DecodeShared<D, N, S>& sh;
  const float scale2;  // of scores, times log2(e)
  const uint32_t stages, prob_s;
  const int wg, tid, warp, lane, group;
  static constexpr int kColumns = SQUARES ? 2 * N : N;
  float m[C], l[C], o[D / 64][kColumns / 2];
  uint32_t limit[C];   // sampled keys that the head reads; of rows that share a list: tokens at its end that it does not see
  float ln_weight[C];  // and their log weight
  float e2[C], e2v2[C], most[C], most_v[C];  // squares alone and times values' squared norms: their sums, and the largest

  // Head column of accumulator column c, and its first accumulator.
  __device__ __forceinline__ int head(int c) const { return (c / 2) * 8 + (lane & 3) * 2 + (c & 1); }
  static __device__ __forceinline__ int acc(int c) { return (c / 2) * 4 + (c & 1); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < C; ++c) m[c] = -INFINITY, l[c] = 0.f;
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) o[h][i] = 0.f;
  }
  // Before tiles of which some are not sampled: the squares of those.
  __device__ __forceinline__ void no_squares() const {
    bar_sync(1 + wg, 128);  // The products before may read the last tile's.
    if (tid < N * 8) st_shared_v4(prob_s + L::kProb + tid * 16, make_uint4(0, 0, 0, 0));
  }

  // Raises the running maximum to cover this tile and rescales what was summed; `squared`: of squares too.
  __device__ __forceinline__ void rebase(const float (&s)[N / 2], bool squared) {
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
      if constexpr (SQUARES) {
        const float f2 = squared ? f * f : 1.f;
        e2[c] *= f2, e2v2[c] *= f2, most[c] *= f2, most_v[c] *= f2;
#pragma unroll
        for (int h = 0; h < D / 64; ++h) o[h][N / 2 + acc(c)] *= f2, o[h][N / 2 + acc(c) + 2] *= f2;
      }
    }
  }

  // A tile's squares, alone and times its values' squared norms.
  __device__ __forceinline__ void add(const float (&square)[C][2], uint32_t v_s) {
    // Half a row a lane.
    const int row = warp * 16 + lane / 2, half = lane & 1;
    float norm = 0.f;
#pragma unroll 2
    for (int i = 0; i < D / 16; ++i) {
      const uint32_t at = D == 128 ? half * L::kPanel + swizzled(row, i ^ (half * 4)) : swizzled(row, half * 4 + i);
      const uint4 y = ld_shared_v4(v_s + at);
      const T* v = reinterpret_cast<const T*>(&y);
#pragma unroll
      for (int k = 0; k < 8; ++k) norm += to_float(v[k]) * to_float(v[k]);
    }
    norm += __shfl_xor_sync(~0u, norm, 1);
    float v2[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) v2[i] = __shfl_sync(~0u, norm, lane / 4 * 2 + 16 * i);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      e2[c] += square[c][0] + square[c][1];
      const float with[2] = {square[c][0] * v2[0], square[c][1] * v2[1]};
      e2v2[c] += with[0] + with[1];
      most[c] = fmaxf(most[c], fmaxf(square[c][0], square[c][1]));
      most_v[c] = fmaxf(most_v[c], fmaxf(with[0], with[1]));
    }
  }

  // `save` is given the row, head column and score (times log2(e)) of what is read. FOLD: rows share the list.
  template <bool GATHER, bool FOLD = false, class Save = NoScores>
  __device__ __forceinline__ void tile(int stage, uint32_t q_s, Save save = {}) {
    const StageMeta meta = sh.meta[stage];
    const bool squared = SQUARES && __any_sync(~0u, meta.sampled != kNotSampled);
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
    score_tile<T, D, N>(s, k_s, q_s);

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
      if (GATHER && meta.sampled != kNotSampled) {
        s[j] = meta.sampled + r0 < limit[c] ? s[j] + ln_weight[c] * kLog2e : -INFINITY;
        s[j + 2] = meta.sampled + r0 + 8 < limit[c] ? s[j + 2] + ln_weight[c] * kLog2e : -INFINITY;
      }
      if (FOLD) {
        s[j] = r0 + limit[c] < meta.end ? s[j] : -INFINITY;
        s[j + 2] = r0 + 8 + limit[c] < meta.end ? s[j + 2] : -INFINITY;
      }
      save(r0, head(c), s[j]);
      save(r0 + 8, head(c), s[j + 2]);
      // Columns beyond the group's heads hold queries of other lists, or none: their scores must decide nothing here.
      over |= head(c) < group && fmaxf(s[j], s[j + 2]) > m[c] + 8.f;
    }
    // The maximum may lag by 2^8: fp32 sums carry it, and rescaling becomes rare.
    if (bar_any(1 + wg, 128, over)) rebase(s, squared);
    float square[C][2];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int j = acc(c), h = head(c);
      const float base = m[c] == -INFINITY ? 0.f : m[c];
      const float e0 = exp2_fast(s[j] - base), e1 = exp2_fast(s[j + 2] - base);
      l[c] += e0 + e1;
      const uint32_t pair = pack2<T>(e0, e1);
      st_shared_u16(prob_s + swizzled(h, r0 / 8) + (r0 % 8) * 2, (uint16_t)pair);
      st_shared_u16(prob_s + swizzled(h, r0 / 8 + 1) + (r0 % 8) * 2, (uint16_t)(pair >> 16));
      if constexpr (SQUARES) {
        if (!squared) continue;
        // Quarters, since a maximum that lags makes squares of 2^16, more than fp16 holds.
        const uint32_t both = pack2<T>(0.25f * e0 * e0, 0.25f * e1 * e1);
        st_shared_u16(prob_s + L::kProb + swizzled(h, r0 / 8) + (r0 % 8) * 2, (uint16_t)both);
        st_shared_u16(prob_s + L::kProb + swizzled(h, r0 / 8 + 1) + (r0 % 8) * 2, (uint16_t)(both >> 16));
        const T* of = reinterpret_cast<const T*>(&both);
        square[c][0] = to_float(of[0]), square[c][1] = to_float(of[1]);
      }
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
        wgmma_ss<T, kColumns, true>(o[h], v_desc + ((h * L::kPanel + kk * 2048) >> 4),
                                    p_desc + ((kk * 32) >> 4), 1);
    wgmma_commit();
    if constexpr (SQUARES) {
      if (squared) add(square, v_s);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < D / 64; ++h) pin(o[h]);
  }

  // x f + y g, rounded alike whichever warpgroup holds x: no fused multiply-add.
  static __device__ __forceinline__ float mix(float x, float f, float y, float g) {
    return __fadd_rn(__fmul_rn(x, f), __fmul_rn(y, g));
  }

  // Joins the two warpgroups' parts and writes the k-th partial result of this thread
  // block: part_o [group, D] normalised, part_lse [group], -inf where nothing was seen. Two barriers hand the join
  // buffer over and back. The sums are spent, unless `l` is put back.
  __device__ __forceinline__ void store(float* part_o, float* part_lse, uint32_t k) {
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
      mbar_wait(smem_u32(&sh.join_empty), (k & 1) ^ 1);
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
      mbar_arrive(smem_u32(&sh.join_full));
      return;
    }
    mbar_wait(smem_u32(&sh.join_full), k & 1);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int hd = head(c), j = acc(c);
      const float m1 = sh.join_m[hd], top = fmaxf(m[c], m1);
      const float f0 = m[c] == -INFINITY ? 0.f : exp2_fast(m[c] - top);
      const float f1 = m1 == -INFINITY ? 0.f : exp2_fast(m1 - top);
      const float sum = mix(l[c], f0, sh.join_l[hd], f1);
      if (hd >= group) continue;
      const float inv = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      float* out = part_o + hd * D + dim;
#pragma unroll
      for (int h = 0; h < D / 64; ++h) {
        out[h * 64] = mix(o[h][j], f0, sh.join_o[hd][h * 64 + dim], f1) * inv;
        out[h * 64 + 8] = mix(o[h][j + 2], f0, sh.join_o[hd][h * 64 + dim + 8], f1) * inv;
      }
      if (warp == 0 && lane < 4)
        part_lse[hd] = sum == 0.f ? -INFINITY : top * kLn2 + logf(sum);
    }
    mbar_arrive(smem_u32(&sh.join_empty));
  }
};

}  // namespace taper
