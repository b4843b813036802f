// Products of a few rows with a weight matrix, bound by the weight's bytes: what a decode
// step spends its time in.
//
// A warp walks pairs of outputs: two rows of the weight, 16 bytes a lane of each, and a piece
// that has been multiplied makes room for one that is to come. The first are fetched before
// the launch waits for its predecessor: with one thread block on each multiprocessor the next
// launch has room to do so while this one still runs. Inputs lie in shared memory, rounded to
// the weight's type, and are normalised on their way there if wanted: every thread block does
// that for itself, since a launch of its own would take longer. A row's sums are taken in the
// same order whatever the number of rows.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using ProductParams = TaperProductParams;

constexpr int kProductWarps = 8, kProductThreads = 32 * kProductWarps;
constexpr int kProductPieces = 8;  // of 16 bytes a lane has on their way of each weight row
constexpr int kProductRowsMax = 4;

// Weights are read once: they need no place in the first cache.
__device__ __forceinline__ uint4 ld_stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Asks for bytes in the second cache, a multiple of 16.
__device__ __forceinline__ void prefetch_bytes(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

template <class T>
__device__ __forceinline__ float2 widen(uint32_t two);
template <>
__device__ __forceinline__ float2 widen<__nv_bfloat16>(uint32_t two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 widen<__half>(uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

template <class T>
__device__ __forceinline__ void widen8(float (&to)[8], uint4 raw) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = widen<T>(word[i]);
    to[2 * i] = two.x, to[2 * i + 1] = two.y;
  }
}

// Rows of x into shared memory.
template <class T, int ROWS>
__device__ __forceinline__ void stage_inputs(const ProductParams& p, uint4* xs) {
  __shared__ float sums[ROWS][kProductWarps];
  const int pieces = p.inputs / 8, tid = threadIdx.x;
  auto eight = [&](int row, int at, float (&x)[8]) {
    const int64_t from = (int64_t)row * pieces + at;
    if (p.x_f32) {
      const float4* f = static_cast<const float4*>(p.x) + 2 * from;
      *reinterpret_cast<float4*>(x) = f[0];
      *reinterpret_cast<float4*>(x + 4) = f[1];
    } else {
      widen8<T>(x, static_cast<const uint4*>(p.x)[from]);
    }
  };
  float scale[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) scale[r] = 1.f;
  if (p.norm) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0.f, x[8];
      if (r < p.rows)
#pragma unroll 2
        for (int at = tid; at < pieces; at += kProductThreads) {
          eight(r, at, x);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += x[j] * x[j];
        }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if ((tid & 31) == 0) sums[r][tid / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kProductWarps; ++w) sum += sums[r][w];
      scale[r] = rsqrtf(sum / p.inputs + p.epsilon);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (r < p.rows)
#pragma unroll 2
      for (int at = tid; at < pieces; at += kProductThreads) {
        float x[8];
        eight(r, at, x);
        if (p.norm) {
          float g[8];
          *reinterpret_cast<float4*>(g) = reinterpret_cast<const float4*>(p.norm)[2 * at];
          *reinterpret_cast<float4*>(g + 4) = reinterpret_cast<const float4*>(p.norm)[2 * at + 1];
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] *= scale[r] * g[j];
        }
        xs[r * pieces + at] = make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]),
                                         pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
      }
  __syncthreads();
}

template <class T, int ROWS>
__global__ void __launch_bounds__(kProductThreads, 2) product_kernel(const ProductParams p) {
  extern __shared__ uint4 xs[];
  constexpr int kStride = 32 * kProductPieces;
  const int lane = threadIdx.x & 31, pieces = p.inputs / 8, pairs = p.outputs / 2;
  const int warps = gridDim.x * kProductWarps;
  const int first = blockIdx.x * kProductWarps + threadIdx.x / 32;
  const int turns = (pieces + kStride - 1) / kStride;
  const bool gated = p.to == TAPER_PRODUCT_GATED;
  const uint4* w = static_cast<const uint4*>(p.weight);
  // From a pair's first row to its second.
  const int64_t apart = gated ? (int64_t)pairs * pieces : pieces;
  auto row_of = [&](int pair) { return w + (int64_t)(gated ? pair : 2 * pair) * pieces; };

  uint4 a[kProductPieces], b[kProductPieces];
  auto fetch = [&](int i, const uint4* row, int turn, bool in) {
    const int at = turn * kStride + 32 * i + lane;
    const bool live = in && at < pieces;
    a[i] = live ? ld_stream(row + at) : make_uint4(0, 0, 0, 0);
    b[i] = live ? ld_stream(row + apart + at) : make_uint4(0, 0, 0, 0);
  };
#pragma unroll
  for (int i = 0; i < kProductPieces; ++i) fetch(i, row_of(first), 0, first < pairs);
  if (p.norm && threadIdx.x == 0) prefetch_bytes(p.norm, p.inputs * 4);
  wait_for_predecessor();
  launch_dependents();
  stage_inputs<T, ROWS>(p, xs);

  for (int pair = first; pair < pairs; pair += warps) {
    float sum[2][ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[0][r] = sum[1][r] = 0.f;
    for (int turn = 0; turn < turns; ++turn) {
      const bool last = turn + 1 == turns;
      const int next_pair = last ? pair + warps : pair;
      const uint4* next_row = row_of(next_pair);
#pragma unroll
      for (int i = 0; i < kProductPieces; ++i) {
        const int at = turn * kStride + 32 * i + lane;
        if (at < pieces) {
          float u[8], v[8], x[8];
          widen8<T>(u, a[i]);
          widen8<T>(v, b[i]);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            if (r >= p.rows) break;
            widen8<T>(x, xs[r * pieces + at]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[0][r] += u[j] * x[j], sum[1][r] += v[j] * x[j];
          }
        }
        fetch(i, next_row, last ? 0 : turn + 1, next_pair < pairs);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        sum[0][r] += __shfl_xor_sync(~0u, sum[0][r], d);
        sum[1][r] += __shfl_xor_sync(~0u, sum[1][r], d);
      }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (lane != r || r >= p.rows) continue;
      const float y0 = sum[0][r], y1 = sum[1][r];
      const int64_t at = (int64_t)r * pairs + pair;  // In pairs of outputs.
      switch (p.to) {
        case TAPER_PRODUCT_GATED:
          static_cast<T*>(p.out)[at] = T(y0 / (1.f + exp2_fast(-y0 * kLog2e)) * y1);
          break;
        case TAPER_PRODUCT_F32:
          static_cast<float2*>(p.out)[at] = make_float2(y0, y1);
          break;
        case TAPER_PRODUCT_ADD: {
          float2* to = static_cast<float2*>(p.out) + at;
          const float2 old = *to;
          *to = make_float2(old.x + y0, old.y + y1);
          break;
        }
        default:
          static_cast<uint32_t*>(p.out)[at] = pack2<T>(y0, y1);
      }
    }
  }
}

}  // namespace taper
