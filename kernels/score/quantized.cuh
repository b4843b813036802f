// Scores of query rows against quantized keys (taper_gpu.h says how they lie), every token of each row.
//
// One warp scores a block of 64 tokens for all heads of a group. Two bits of a key become a bf16 by the mask and the or of
// one instruction, as the mantissa of 128 + 4^s code for one of three places s; queries multiplied by steps and 4^-s undo
// the place, and the sum of the 128s is taken off by a product of the same numbers. That product and the one with the
// block's base begin the accumulators.
//
// Scores are brought nearer to one another by how far off they may be, which the steps of four blocks tell (the CPU's
// index/quantized.rs says why): a warp of each thread block looks at each of them while its first blocks are on their way.
#pragma once

#include <utility>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using QuantizedScoreParams = TaperQuantizedScoreParams;

// Blocks of a warp that are on their way or being scored: in shared memory, so that no registers wait for them.
constexpr int kQuantizedWarps = 4, kQuantizedStages = 4;
constexpr int kQuantizedMeasured = 4;  // blocks; MEASURED on the CPU
static_assert(kQuantizedMeasured <= kQuantizedWarps, "each has a warp");

// f(heads): as for_group(), and four by themselves.
template <class F>
cudaError_t for_quantized_group(int group, F f) {
  if (group <= 4) return f(std::integral_constant<int, 4>{});
  return for_group(group, f);
}

// The place in a row's table of one of the blocks that tell.
__device__ __forceinline__ uint32_t measured_block(int i, uint32_t blocks) {
  return (uint64_t)(2 * i + 1) * blocks / (2 * kQuantizedMeasured);
}

__device__ __forceinline__ uint32_t multiply2(uint32_t x, uint32_t y) {
  const __nv_bfloat162 z = __hmul2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const uint32_t&>(z);
}
// Pair k of a word's channels, k in 0 .. 7.
__device__ __forceinline__ constexpr int place_of(int k) { return k % 3; }
__device__ __forceinline__ uint32_t code2(uint32_t word, int k) {
  uint32_t x;
  // (a & b) | c; left to itself, the compiler takes two instructions for two constants.
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(x)
      : "r"(word >> (6 * (k / 3))), "r"(0x00030003u << (2 * place_of(k))), "r"(0x43004300u));
  return x;
}
// Which of the eight pairs of adjacent channels that is.
__device__ __forceinline__ constexpr int channels_of(int k) { return k < 4 ? 2 * k : 2 * k - 7; }

// One row's group of queries, up to G of them, and the copies of the blocks that a warp scores for them. Heads are columns
// of matrix products; up to four take every other one, so that all lanes have something of what comes out.
template <class T, int W, int G>
struct QuantizedScorer {
  static constexpr int NT = G > 8 ? 2 : 1, kEach = G > 4 ? 2 : 1;  // tiles of eight columns; heads of a lane in each
  static constexpr int kWords = W / 4, kBytes = 320 * W, kPieces = kBytes / 16, kCodes = 16 * W;
  static constexpr int kStepsAt = kBytes - 32 * W;
  uint32_t ring;  // shared memory, kQuantizedStages blocks
  int lane, quad, line;
  uint32_t q[NT][kWords][8];  // channels 16 (quad + 4 j) on of the head of column 8 t + line

  // The head of a lane's accumulators, and that of a lane's column.
  __device__ __forceinline__ int head(int t, int e) const { return G > 4 ? 8 * t + 2 * quad + e : quad; }
  __device__ __forceinline__ int column_head(int t) const { return G > 4 ? 8 * t + line : line % 2 ? G : line / 2; }

  struct Raw {
    uint4 of[NT][kWords][2];
  };
  // `first`: the group's first query. Loads alone: what waits for them comes with take().
  __device__ __forceinline__ void load_queries(Raw& raw, const T* first, int group) const {
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int j = 0; j < kWords; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int h = column_head(t);
          raw.of[t][j][half] = make_uint4(0, 0, 0, 0);
          if (h < group)
            raw.of[t][j][half] = reinterpret_cast<const uint4*>(first + (int64_t)h * 16 * W)[2 * (quad + 4 * j) + half];
        }
  }
  __device__ __forceinline__ void take(const Raw& raw) {
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int j = 0; j < kWords; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const T* x = reinterpret_cast<const T*>(&raw.of[t][j][half]);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            q[t][j][4 * half + i] = pack2<__nv_bfloat16>(to_float(x[2 * i]), to_float(x[2 * i + 1]));
        }
  }
  // The steps of a block, in memory of either kind.
  struct Steps {
    uint4 of[kWords][2];
  };
  __device__ __forceinline__ void load_steps(Steps& to, const void* steps) const {
#pragma unroll
    for (int j = 0; j < kWords; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) to.of[j][half] = static_cast<const uint4*>(steps)[2 * (quad + 4 * j) + half];
  }
  // What those of one of the blocks that tell say of each head, to `to` [G].
  __device__ __forceinline__ void measure(const Steps& steps, float* to) const {
    float sum[NT] = {};
#pragma unroll
    for (int j = 0; j < kWords; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 raw = steps.of[j][half];
        const uint32_t step[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t own = q[t][j][4 * half + k];
            const float low = __uint_as_float(own << 16) * __uint_as_float(step[k] << 16);
            const float high = __uint_as_float(own & 0xFFFF0000u) * __uint_as_float(step[k] & 0xFFFF0000u);
            sum[t] += low * low + high * high;
          }
      }
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      sum[t] += __shfl_xor_sync(~0u, sum[t], 1);
      sum[t] += __shfl_xor_sync(~0u, sum[t], 2);
      if (quad == 0 && column_head(t) < G) to[column_head(t)] = sum[t];
    }
  }
  // What the heads of this lane's accumulators are multiplied by.
  __device__ __forceinline__ void scales(float (&to)[NT][kEach], float scale,
                                         const float (&sums)[kQuantizedMeasured][G]) const {
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kQuantizedMeasured; ++i) sum += sums[i][head(t, e)];
        const float variance = sum * scale * scale / (12 * kQuantizedMeasured);
        to[t][e] = scale * rsqrtf(1.f + 0.785398163f * variance);
      }
  }
  // Pieces of 16 bytes: those of four words stand at other columns each, or the four quads would read of the same banks.
  // `from`: this lane's first.
  __device__ __forceinline__ void fetch(uint32_t stage, const uint8_t* from) const {
    const uint32_t at = ring + stage * kBytes;
    fetch_pieces(at + 16 * (lane ^ (lane >> 3 & 6)), at + 16 * (lane ^ ((lane >> 3) + 4 & 6)), at + 16 * lane, from,
                 std::make_integer_sequence<int, (kPieces + 31) / 32>{});
  }
  template <int... I>
  __device__ __forceinline__ void fetch_pieces(uint32_t even, uint32_t odd, uint32_t line_to, const uint8_t* from,
                                               std::integer_sequence<int, I...>) const {
    ((32 * I + 32 <= kPieces || 32 * I + lane < kPieces
          ? cp_async16<512 * I, 512 * I>(32 * I >= kCodes ? line_to : I % 2 ? odd : even, from)
          : (void)0),
     ...);
  }
  __device__ __forceinline__ void load8(uint32_t (&x)[8], uint32_t first, uint32_t second) const {
    const uint4 a = ld_shared_v4(first), b = ld_shared_v4(second);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
  // Accumulator e of tile i: column 8 t + 2 quad + e % 2, token 4 line + i % 2 * 2 + e / 2 of the block's half i / 2.
  __device__ __forceinline__ void score(float (&c)[NT][4][4], uint32_t stage) const {
    const uint32_t at = ring + stage * kBytes;
    uint32_t scaled[NT][kWords][8];
    float even[NT][4] = {}, odd[NT][4] = {}, less[NT][kWords][4] = {};
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint32_t step[8];
      const uint32_t own = at + 16 * kCodes + 32 * (quad + 4 * j);
      const uint4 base[2] = {ld_shared_v4(own), ld_shared_v4(own + 16)};
      load8(step, own + 32 * W, own + 32 * W + 16);
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          scaled[t][j][k] = multiply2(q[t][j][channels_of(k)], step[channels_of(k)]);
          // 1, 1/4, 1/16: exact.
          if (place_of(k) > 0) scaled[t][j][k] = multiply2(scaled[t][j][k], place_of(k) == 1 ? 0x3E803E80u : 0x3D803D80u);
        }
      // The base as it was loaded: even pairs are the upper rows, odd ones the lower, and each meets its own in half of
      // what comes out.
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          constexpr uint32_t kLess = 0xC300C300u;  // -128
          const uint4 b = base[h];
          mma_16x8x16<__nv_bfloat16>(even[t], b.x, b.y, b.z, b.w, q[t][j][4 * h], q[t][j][4 * h + 2]);
          mma_16x8x16<__nv_bfloat16>(odd[t], b.x, b.y, b.z, b.w, q[t][j][4 * h + 1], q[t][j][4 * h + 3]);
#pragma unroll
          for (int k = 4 * h; k < 4 * h + 4; k += 2)
            mma_16x8x16<__nv_bfloat16>(less[t][j], kLess, kLess, kLess, kLess, scaled[t][j][k], scaled[t][j][k + 1]);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float all = even[t][e] + odd[t][2 + e];
#pragma unroll
        for (int j = 0; j < kWords; ++j) all += less[t][j][e];
#pragma unroll
        for (int i = 0; i < 4; ++i) c[t][i][e] = c[t][i][2 + e] = all;
      }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      // Tokens 4 line to 4 line + 3 of both halves.
      uint32_t word[8];
      const uint32_t own = at + 256 * (quad + 4 * j) + 16 * (line ^ 2 * quad);
      load8(word, own, own + 128);
#pragma unroll
      for (int m = 0; m < 8; m += 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t a0 = code2(word[2 * i], m), a1 = code2(word[2 * i + 1], m), a2 = code2(word[2 * i], m + 1),
                         a3 = code2(word[2 * i + 1], m + 1);
#pragma unroll
          for (int t = 0; t < NT; ++t)
            mma_16x8x16<__nv_bfloat16>(c[t][i], a0, a1, a2, a3, scaled[t][j][m], scaled[t][j][m + 1]);
        }
    }
  }
  // Tokens of a block from `left` on are none.
  __device__ __forceinline__ void hide(float (&c)[NT][4][4], uint32_t left) const {
    if (__builtin_expect(left >= kBlock, 1)) return;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (4 * line + 32 * (i / 2) + 2 * (i % 2) + e / 2 >= left) c[t][i][e] = -INFINITY;
  }
};

template <class T, int W, int G>
__global__ void __launch_bounds__(kQuantizedWarps * 32, G <= 8 ? 4 : 3) quantized_kernel(const QuantizedScoreParams p) {
  using Scorer = QuantizedScorer<T, W, G>;
  constexpr int NT = Scorer::NT, kEach = Scorer::kEach;
  __shared__ __align__(128) uint8_t rings[kQuantizedWarps][kQuantizedStages * Scorer::kBytes];
  __shared__ float measured[kQuantizedMeasured][G];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, line = lane >> 2;
  const int kv_head = blockIdx.y, row = blockIdx.z, group = p.q_heads / p.kv_heads;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t len = p.lens[row], blocks = (len + kBlock - 1) / kBlock;
  const uint32_t first = blockIdx.x * kQuantizedWarps + warp, pace = gridDim.x * kQuantizedWarps;
  if (blockIdx.x * kQuantizedWarps >= blocks) return;
  const uint32_t runs = first < blocks ? (blocks - first + pace - 1) / pace : 0;
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  const int64_t head = (int64_t)row * p.q_heads + kv_head * group;
  Scorer scorer{smem_u32(rings[warp]), lane, quad, line};

  // The table's words come 32 runs at a time, one a lane. All that waits for nothing else is asked for first.
  uint32_t named = table[min(first + lane * pace, blocks - 1)], tells = 0;
  if (warp < kQuantizedMeasured) tells = table[measured_block(warp, blocks)];
  typename Scorer::Raw raw;
  scorer.load_queries(raw, static_cast<const T*>(p.q) + head * 16 * W, group);
  auto block_of = [&](uint64_t block) {
    return reinterpret_cast<const uint8_t*>(p.index) + (block * p.kv_heads + kv_head) * Scorer::kBytes;
  };
  auto fetch = [&](uint32_t run) {
    if (run < runs) {
      if (run > 0 && run % 32 == 0) named = table[min(first + (run + lane) * pace, blocks - 1)];
      scorer.fetch(run % kQuantizedStages, block_of(__shfl_sync(~0u, named, run % 32)) + 16 * lane);
    }
    cp_async_commit();
  };
  typename Scorer::Steps steps;
  if (warp < kQuantizedMeasured) scorer.load_steps(steps, block_of(tells) + Scorer::kStepsAt);
#pragma unroll 1
  for (uint32_t run = 0; run < kQuantizedStages - 1; ++run) fetch(run);
  scorer.take(raw);
  if (warp < kQuantizedMeasured) scorer.measure(steps, measured[warp]);
  __syncthreads();
  float scale[NT][kEach];
  scorer.scales(scale, p.scale, measured);
  float* lines = p.out + head * p.stride + 4 * line;
  const int64_t tiles = head * p.tile_stride;
#pragma unroll 1
  for (uint32_t run = 0; run < runs; ++run) {
    cp_async_wait<kQuantizedStages - 2>();
    __syncwarp();  // The whole warp's copies are there, and all have read what the next one is written over.
    fetch(run + kQuantizedStages - 1);
    float c[NT][4][4];
    scorer.score(c, run % kQuantizedStages);

    const uint32_t block = first + run * pace;
    scorer.hide(c, len - block * kBlock);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float v[8], top = -INFINITY, sum = 0.f;
#pragma unroll
        for (int s = 0; s < 8; ++s) v[s] = c[t][s / 2][2 * (s & 1) + e] * scale[t][e], top = fmaxf(top, v[s]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
        for (int s = 0; s < 8; ++s) sum += exp2_fast(v[s] * kLog2e - top * kLog2e);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        const int h = scorer.head(t, e);
        if (h < group) {
          float4* to = reinterpret_cast<float4*>(lines + h * (int64_t)p.stride + (int64_t)block * kBlock);
          to[0] = make_float4(v[0], v[1], v[2], v[3]);
          to[8] = make_float4(v[4], v[5], v[6], v[7]);
          if (line == 0) {
            p.tile_max[tiles + h * p.tile_stride + block] = top;
            p.tile_sum[tiles + h * p.tile_stride + block] = sum;
          }
        }
      }
  }
}

}  // namespace taper
