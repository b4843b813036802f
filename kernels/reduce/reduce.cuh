// Sums of attention probabilities over sampled query rows, along columns and diagonals:
// what SampleAttention, MInference and SnapKV choose keys by.
//
// A slice is up to 64 neighbouring rows of one sequence. The first pass computes each
// row's log-sum-exp over its keys, the second the probabilities against it, 64 rows by
// 64 keys at a time; no matrix of rows by keys exists. A thread block takes one slice,
// one query head and a run of 32 blocks of keys; its warps take 16 rows each and read
// the keys straight into matrix fragments (the inner dimension permuted, so that a lane
// reads 16 consecutive bytes). Every sum has a fixed order.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using Slice = TaperSlice;

static_assert(sizeof(Slice) == 16, "shared with the caller");

using ReduceParams = TaperReduceParams;

constexpr int kSliceRows = 64, kSplitBlocks = 32, kProbStride = 72;

// One tile of 16 rows by 64 keys a warp: scores times scale * log2(e), -inf where masked.
template <class T, int D>
struct SliceScores {
  static constexpr int kLoads = D / 32;
  uint4 lo[kLoads], hi[kLoads];  // query rows lane / 4 and lane / 4 + 8 of the warp
  uint32_t row;                  // lane / 4 of the warp, within the slice
  const uint32_t* table;
  int kv_heads, kv_head;
  const T* keys;
  float scale2;
  uint32_t window;
  Slice slice;

  __device__ __forceinline__ SliceScores(const ReduceParams& p, const Slice& s, int head)
      : table(p.block_table + (uint64_t)s.table * p.table_stride),
        kv_heads(p.kv_heads),
        kv_head(head / (p.q_heads / p.kv_heads)),
        keys(static_cast<const T*>(p.k)),
        scale2(p.scale * kLog2e),
        window(p.window > 0 ? p.window : UINT32_MAX),
        slice(s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    row = warp * 16 + lane / 4;
    auto load = [&](uint4(&to)[kLoads], uint32_t r) {
      const uint4* src = reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.q) +
          ((int64_t)(s.q_row + min(r, s.rows - 1)) * p.q_heads + head) * D);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) to[i] = src[(lane & 3) + 4 * i];
    };
    load(lo, row);
    load(hi, row + 8);
  }
  // c[j][i]: row `row` + 8 * (i / 2), key 8 * j + 2 * (lane & 3) + (i & 1) of the block.
  __device__ __forceinline__ void operator()(uint32_t block, float (&c)[8][4]) const {
    const int lane = threadIdx.x & 31, quad = lane & 3;
    const T* base = keys + ((uint64_t)table[block] * kv_heads + kv_head) * kBlock * D;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint4* src = reinterpret_cast<const uint4*>(base + (8 * j + lane / 4) * D);
      uint4 x[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) x[i] = src[quad + 4 * i];
      c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        mma_16x8x16<T>(c[j], lo[i].x, hi[i].x, lo[i].y, hi[i].y, x[i].x, x[i].y);
        mma_16x8x16<T>(c[j], lo[i].z, hi[i].z, lo[i].w, hi[i].w, x[i].z, x[i].w);
      }
    }
    const uint32_t first = block * kBlock, last = slice.position + slice.rows - 1;
    const bool cut = first + kBlock > slice.position + 1 || (last >= window && first <= last - window);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c[j][i] *= scale2;
        // A row beyond the slice copies the last one, so that no key unseen gets a weight.
        const uint32_t key = first + 8 * j + 2 * quad + (i & 1);
        const uint32_t at = slice.position + min(row + 8 * (i / 2), slice.rows - 1);
        if (cut && (key > at || at - key >= window)) c[j][i] = -INFINITY;
      }
  }
};

__device__ __forceinline__ uint32_t slice_blocks(const Slice& s) {
  return (s.position + s.rows + kBlock - 1) / kBlock;
}

template <class T, int D>
__global__ void __launch_bounds__(128) slice_lse_kernel(const ReduceParams p) {
  const int head = blockIdx.y, lane = threadIdx.x & 31;
  wait_for_predecessor();
  launch_dependents();
  const Slice s = p.slices[blockIdx.z];
  const uint32_t nb = slice_blocks(s), begin = blockIdx.x * kSplitBlocks;
  if (begin >= nb) return;
  const uint32_t end = min(begin + kSplitBlocks, nb);
  const SliceScores<T, D> scores(p, s, head);
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  for (uint32_t b = begin; b < end; ++b) {
    float c[8][4];
    scores(b, c);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = top[r];
#pragma unroll
      for (int j = 0; j < 8; ++j) now = fmaxf(now, fmaxf(c[j][2 * r], c[j][2 * r + 1]));
      if (now == -INFINITY) continue;  // This lane's keys are all masked so far.
      sum[r] *= exp2_fast(top[r] - now);
      top[r] = now;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        sum[r] += exp2_fast(c[j][2 * r] - now) + exp2_fast(c[j][2 * r + 1] - now);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      const float t = __shfl_xor_sync(~0u, top[r], d), x = __shfl_xor_sync(~0u, sum[r], d);
      const float now = fmaxf(top[r], t);
      if (now > -INFINITY)
        sum[r] = sum[r] * exp2_fast(top[r] - now) + x * exp2_fast(t - now);
      top[r] = now;
    }
    if ((lane & 3) == 0)
      reinterpret_cast<float2*>(p.parts)[(((int64_t)blockIdx.z * p.q_heads + head) * p.splits + blockIdx.x) * kSliceRows +
              scores.row + 8 * r] = make_float2(top[r], sum[r]);
  }
}

struct SliceShared {
  float prob[kSliceRows * kProbStride];
  float lse2[kSliceRows];  // log2 of the row's sum of exp2
  float half[kBlock];
};

template <class T, int D>
__global__ void __launch_bounds__(128) slice_mass_kernel(const ReduceParams p) {
  __shared__ SliceShared sh;
  const int head = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
  const Slice s = p.slices[blockIdx.z];
  wait_for_predecessor();
  launch_dependents();
  const uint32_t nb = slice_blocks(s), begin = blockIdx.x * kSplitBlocks;
  if (begin >= nb) return;
  const uint32_t end = min(begin + kSplitBlocks, nb), splits = (nb + kSplitBlocks - 1) / kSplitBlocks;
  const int64_t at = (int64_t)blockIdx.z * p.q_heads + head;
  if (tid < kSliceRows) {
    const float2* part = reinterpret_cast<const float2*>(p.parts) + at * p.splits * kSliceRows + tid;
    float top = -INFINITY, sum = 0.f;
#pragma unroll 8
    for (uint32_t i = 0; i < splits; ++i) {
      const float2 x = part[(int64_t)i * kSliceRows];
      const float now = fmaxf(top, x.x);
      if (now > -INFINITY) sum = sum * exp2_fast(top - now) + x.y * exp2_fast(x.x - now);
      top = now;
    }
    const bool live = tid < s.rows;
    sh.lse2[tid] = live ? top + log2f(sum) : INFINITY;  // A row beyond the slice weighs nothing.
    if (blockIdx.x == 0 && live) p.lse[at * kSliceRows + tid] = (top + log2f(sum)) * kLn2;
  }
  __syncthreads();
  const SliceScores<T, D> scores(p, s, head);
  const float lse2[2] = {sh.lse2[scores.row], sh.lse2[scores.row + 8]};
  for (uint32_t b = begin; b < end; ++b) {
    float c[8][4];
    scores(b, c);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(
            &sh.prob[(scores.row + 8 * r) * kProbStride + 8 * j + 2 * (lane & 3)]) =
            make_float2(exp2_fast(c[j][2 * r] - lse2[r]), exp2_fast(c[j][2 * r + 1] - lse2[r]));
    __syncthreads();
    // A thread sums half a column, then one diagonal: row - key = tid - 63.
    float column = 0.f, diagonal = 0.f;
    const int key = tid & 63, from = (tid >> 6) * 32;
#pragma unroll 8
    for (int r = 0; r < 32; ++r) column += sh.prob[(from + r) * kProbStride + key];
#pragma unroll 8
    for (int r = 0; r < kSliceRows; ++r) {
      const int k = r - (tid - 63);
      if (k >= 0 && k < kBlock) diagonal += sh.prob[r * kProbStride + k];
    }
    if (tid >= 64) sh.half[key] = column;
    __syncthreads();
    p.tile_diagonals[(at * p.max_blocks + b) * 128 + tid] = diagonal;
    if (tid < 64) p.columns[(at * p.max_blocks + b) * kBlock + key] = column + sh.half[key];
    __syncthreads();
  }
}

// Adds the tiles' diagonals up: each comes from two tiles.
__global__ void __launch_bounds__(256) slice_diagonals_kernel(const ReduceParams p) {
  const int head = blockIdx.y;
  wait_for_predecessor();
  launch_dependents();
  const Slice s = p.slices[blockIdx.z];
  const int nb = (int)slice_blocks(s);
  const int64_t at = (int64_t)blockIdx.z * p.q_heads + head;
  const float* tiles = p.tile_diagonals + at * p.max_blocks * 128;
  const int b = blockIdx.x * 256 + threadIdx.x;
  if (b >= p.max_blocks) return;
  auto token = [&](int64_t offset) {  // The sum over all rows at this distance.
    // offset = position - 64 tile + index - 63
    const int64_t base = offset - s.position + 63;
    const int64_t first = base >= 0 ? 0 : (-base + 63) / 64;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t tile = first + i, index = base + 64 * tile;
      if (tile < nb && index < 127) sum += tiles[tile * 128 + index];
    }
    return sum;
  };
  for (int i = 0; i < kBlock; ++i)
    p.diagonals[(at * p.max_blocks + b) * kBlock + i] = token((int64_t)b * kBlock + i);
}

}  // namespace taper
