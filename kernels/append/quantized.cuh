// Keys of 2 bits a channel, channel by channel within a block: taper_gpu.h says how they lie.
//
// A block is made anew from all of its visible rows whenever it gets one, so what is there is a function of the keys
// alone, and a truncation is repaired as well.
#pragma once

#include "append.cuh"

namespace taper {

template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  using Of = __nv_bfloat162;
  static __device__ __forceinline__ __nv_bfloat16 up(float x) { return __float2bfloat16_ru(x); }
};
template <>
struct Pair<__half> {
  using Of = __half2;
  static __device__ __forceinline__ __half up(float x) { return __float2half_ru(x); }
};

__device__ __forceinline__ float min_nan(float x, float y) { return -max_nan(-x, -y); }

// A thread block a cache block and head: 128 threads are 128 / (D / 8) rows of 16-byte pieces, and later a channel each.
template <class T, int D>
__global__ void __launch_bounds__(128) quantize_kernel(const AppendParams p) {
  using T2 = typename Pair<T>::Of;
  constexpr int kPieces = D / 8, kRows = 128 / kPieces, kEach = kBlock / kRows, W = D / 16;
  // Words of 16 channels lie apart by 4 banks more than their 64 tokens.
  constexpr int kPitch = kBlock + 4;
  __shared__ __align__(16) T least[4][D], most[4][D], limits[3][D];
  __shared__ __align__(16) uint32_t codes[W * kPitch];
  __shared__ __align__(16) __nv_bfloat16 lines[2][D];
  wait_for_predecessor();
  launch_dependents();
  const AppendSpan span = p.spans[blockIdx.z];
  const uint32_t b = span.begin / kBlock + blockIdx.x;
  if (span.end <= span.begin || b * kBlock >= span.end) return;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32, piece = tid % kPieces, kv_head = blockIdx.y;
  const uint32_t rows = min(span.end - b * kBlock, (uint32_t)kBlock);
  const uint64_t at = (uint64_t)p.block_table[(uint64_t)span.table * p.table_stride + b] * p.kv_heads + kv_head;
  const uint4* k = reinterpret_cast<const uint4*>(static_cast<const T*>(p.k) + at * kBlock * D);

  // What is not visible is read as the last row that is.
  uint4 raw[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) raw[i] = k[min((uint32_t)(tid / kPieces + i * kRows), rows - 1) * kPieces + piece];
  auto pairs = [](uint4& x) { return reinterpret_cast<T2*>(&x); };
  uint4 low = raw[0], high = raw[0];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      pairs(low)[j] = __hmin2_nan(pairs(low)[j], pairs(raw[i])[j]);
      pairs(high)[j] = __hmax2_nan(pairs(high)[j], pairs(raw[i])[j]);
    }
#pragma unroll
    for (int d = kPieces; d < 32; d *= 2) {
      pairs(low)[j] = __hmin2_nan(pairs(low)[j], __shfl_xor_sync(~0u, pairs(low)[j], d));
      pairs(high)[j] = __hmax2_nan(pairs(high)[j], __shfl_xor_sync(~0u, pairs(high)[j], d));
    }
  }
  if (lane < kPieces) {
    reinterpret_cast<uint4*>(least[warp])[piece] = low;
    reinterpret_cast<uint4*>(most[warp])[piece] = high;
  }
  __syncthreads();
  if (tid < D) {
    float lo = to_float(least[0][tid]), hi = to_float(most[0][tid]);
#pragma unroll
    for (int w = 1; w < 4; ++w) lo = min_nan(lo, to_float(least[w][tid])), hi = max_nan(hi, to_float(most[w][tid]));
    // As the CPU has it: nothing is contracted.
    const float step = __fmul_rn(__fsub_rn(hi, lo), 0.25f);
    // A key is of T, so it reaches a limit where it reaches the next number of T from there up.
#pragma unroll
    for (int i = 0; i < 3; ++i) limits[i][tid] = Pair<T>::up(__fadd_rn(lo, __fmul_rn(i + 1.f, step)));
    lines[0][tid] = __float2bfloat16_rn(__fadd_rn(lo, __fmul_rn(0.5f, step)));
    lines[1][tid] = __float2bfloat16_rn(step);
  }
  __syncthreads();
  uint4 limit[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) limit[i] = reinterpret_cast<const uint4*>(limits[i])[piece];
  uint32_t word[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    word[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T2 x = pairs(raw[i])[j];
      const uint32_t one = __hge2_mask(x, pairs(limit[0])[j]), two = __hge2_mask(x, pairs(limit[1])[j]),
                     three = __hge2_mask(x, pairs(limit[2])[j]);
      // Who reaches a limit reaches those below it: the low bit is set where an odd number is reached.
      const int shift = 2 * (j / 2) + 8 * (j % 2);
      word[i] |= ((one ^ two ^ three) & (0x00010001u << shift)) | (two & (0x00020002u << shift));
    }
    word[i] <<= 4 * (piece & 1);
    word[i] |= __shfl_xor_sync(~0u, word[i], 1);
  }
  // Two threads have the word of each row: each writes every other.
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    const uint32_t r = tid / kPieces + (i + (piece & 1)) * kRows;
    codes[piece / 2 * kPitch + r] = r < rows ? (piece & 1 ? word[i + 1] : word[i]) : 0;
  }
  __syncthreads();
  uint4* to = reinterpret_cast<uint4*>(p.quantized + at * (5 * D));
#pragma unroll
  for (int e = tid; e < 20 * W; e += 128)
    to[e] = e < 16 * W ? *reinterpret_cast<const uint4*>(codes + e / 16 * kPitch + e % 16 * 4)
                       : reinterpret_cast<const uint4*>(lines)[e - 16 * W];
}

}  // namespace taper
