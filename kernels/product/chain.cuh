// Products in a row of a single row of activations, each of which takes what one before gives: what stands between one
// layer's attention and the next one's, in one launch.
//
// One thread block on each multiprocessor. A warp walks the pairs of outputs of all products in order, as in product.cuh, and
// has copied what it will multiply to its own part of shared memory far ahead, past a product's end into the next one's weight:
// weights wait for nobody. They leave L2 before anything else does, since nothing of them is read twice. Between products
// all thread blocks meet, so all must be on the device at once: there are no more of them than multiprocessors, and
// none of the launch behind begins before all of these have. A row's sums are taken in the same order as by product.cuh.
#pragma once

#include "../common/team.cuh"
#include "product.cuh"

namespace taper {

using ChainParams = TaperChainParams;

constexpr int kChainPieces = 4;  // of 16 bytes a lane multiplies together of each of two weight rows
constexpr int kChainPart = 32 * kChainPieces;  // pieces of a row in a warp's group
constexpr int kChainGroups = 6;  // that a warp has on their way or there
constexpr int kChainRing = kChainGroups * 2 * kChainPart * kProductWarps * 16;  // bytes
constexpr int kChainInputsMax = (227 * 1024 - 1024 - kChainRing) / 2;
constexpr int kBlocksLeft = 16;  // word of the counters; the first one counts blocks that have met

// What a warp copies, in the order in which it multiplies it.
struct ChainFeed {
  const ChainParams& p;
  const int first, warps, lane;
  const uint32_t ring, full;  // the warp's slots and their barriers
  const uint64_t policy = evict_first();
  int step = 0, pair = 0, pieces = 0, pairs = 0, at = 0, slot = 0;
  int64_t apart = 0, stride = 0;
  const uint4* row = nullptr;

  __device__ __forceinline__ ChainFeed(const ChainParams& p, int first, int warps, int lane, uint32_t ring, uint32_t full)
      : p(p), first(first), warps(warps), lane(lane), ring(ring), full(full) {
    enter();
  }
  // The first product from here on of which the warp has outputs.
  __device__ __forceinline__ void enter() {
    for (; step < p.count; ++step) {
      const ProductParams& of = p.products[step];
      pieces = of.inputs / 8, pairs = of.outputs / 2, pair = first, at = 0;
      const bool gated = of.to == TAPER_PRODUCT_GATED;
      apart = gated ? (int64_t)pairs * pieces : pieces;
      stride = (int64_t)warps * (gated ? 1 : 2) * pieces;
      row = static_cast<const uint4*>(of.weight) + (int64_t)(gated ? pair : 2 * pair) * pieces;
      if (pair < pairs) return;
    }
  }
  __device__ __forceinline__ void group() {
    if (step >= p.count) return;
    if (lane == 0) {
      const uint32_t bytes = min(kChainPart, pieces - at) * 16, bar = full + slot * 8;
      const uint32_t to = ring + slot * 2 * kChainPart * 16;
      mbar_expect_tx(bar, 2 * bytes);
      bulk_load(to, row + at, bytes, bar, policy);
      bulk_load(to + kChainPart * 16, row + apart + at, bytes, bar, policy);
    }
    at += kChainPart;
    if (at >= pieces) {
      at = 0, pair += warps, row += stride;
      if (pair >= pairs) ++step, enter();
    }
    slot = slot + 1 == kChainGroups ? 0 : slot + 1;
  }
};

// A product's inputs into shared memory, as in product.cuh, but past the first cache: other thread blocks wrote them.
template <class T>
__device__ __forceinline__ void stage_row(const ProductParams& p, uint4* xs) {
  __shared__ float sums[kProductWarps];
  const int pieces = p.inputs / 8, tid = threadIdx.x;
  if (!p.x_f32 && !p.norm) {
#pragma unroll 8
    for (int at = tid; at < pieces; at += kProductThreads) xs[at] = __ldcg(static_cast<const uint4*>(p.x) + at);
    __syncthreads();
    return;
  }
  constexpr int kHeld = 4;  // pieces that a thread reads once and keeps
  float x[kHeld][8], g[kHeld][8];
  auto eight = [&](int at, float (&to)[8]) {
    if (p.x_f32) {
      const float4* f = static_cast<const float4*>(p.x) + 2 * at;
      *reinterpret_cast<float4*>(to) = __ldcg(f);
      *reinterpret_cast<float4*>(to + 4) = __ldcg(f + 1);
    } else {
      widen8<T>(to, __ldcg(static_cast<const uint4*>(p.x) + at));
    }
  };
  auto weight = [&](int at, float (&to)[8]) {
    *reinterpret_cast<float4*>(to) = __ldg(reinterpret_cast<const float4*>(p.norm) + 2 * at);
    *reinterpret_cast<float4*>(to + 4) = __ldg(reinterpret_cast<const float4*>(p.norm) + 2 * at + 1);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = tid + k * kProductThreads;
    if (at < pieces) {
      eight(at, x[k]);
      if (p.norm) weight(at, g[k]);
    }
  }
  float scale = 1.f;
  if (p.norm) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (tid + k * kProductThreads < pieces)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[k][j] * x[k][j];
    for (int at = tid + kHeld * kProductThreads; at < pieces; at += kProductThreads) {
      float y[8];
      eight(at, y);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += y[j] * y[j];
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if ((tid & 31) == 0) sums[tid / 32] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < kProductWarps; ++w) sum += sums[w];
    scale = rsqrtf(sum / p.inputs + p.epsilon);
  }
  auto put = [&](int at, float (&y)[8], float (&by)[8]) {
    if (p.norm)
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] *= scale * by[j];
    xs[at] = make_uint4(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3]), pack2<T>(y[4], y[5]), pack2<T>(y[6], y[7]));
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (tid + k * kProductThreads < pieces) put(tid + k * kProductThreads, x[k], g[k]);
  for (int at = tid + kHeld * kProductThreads; at < pieces; at += kProductThreads) {
    float y[8], by[8];
    eight(at, y);
    if (p.norm) weight(at, by);
    put(at, y, by);
  }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kProductThreads, 1) chain_kernel(const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) uint4 xs[];
  __shared__ uint64_t full[kProductWarps][kChainGroups];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32, warps = gridDim.x * kProductWarps;
  // Neighbouring outputs to neighbouring multiprocessors, so that all have their share of a small product.
  const int first = warp * gridDim.x + blockIdx.x;
  uint4* ring = xs + p.inputs_most / 8 + warp * (kChainGroups * 2 * kChainPart);
  if (lane < kChainGroups) mbar_init(smem_u32(&full[warp][lane]), 1);
  mbar_init_fence();
  __syncwarp();
  ChainFeed feed(p, first, warps, lane, smem_u32(ring), smem_u32(&full[warp][0]));
#pragma unroll 1
  for (int i = 0; i < kChainGroups; ++i) feed.group();
  if (tid == 0 && blockIdx.x < p.count && p.products[blockIdx.x].norm)
    prefetch_bytes(p.products[blockIdx.x].norm, p.products[blockIdx.x].inputs * 4);
  wait_for_predecessor();
  launch_dependents();

  int slot = 0;
  uint32_t round = 0;
#pragma unroll 1
  for (int step = 0; step < p.count; ++step) {
    const ProductParams& of = p.products[step];
    if (step > 0) {
      __syncthreads();
      if (tid == 0) team_meet(p.sync, step * gridDim.x);
      __syncthreads();
    }
    stage_row<T>(of, xs);
    const int pieces = of.inputs / 8, pairs = of.outputs / 2, to = of.to;
#pragma unroll 1
    for (int pair = first; pair < pairs; pair += warps) {
      float2* sum_at = static_cast<float2*>(of.out) + pair;
      float2 old = make_float2(0.f, 0.f);
      if (to == TAPER_PRODUCT_ADD && lane == 0) old = __ldcg(sum_at);
      float a = 0.f, b = 0.f;
#pragma unroll 1
      for (int start = 0; start < pieces; start += kChainPart) {
        mbar_wait(smem_u32(&full[warp][slot]), round);
        const uint4* from = ring + slot * 2 * kChainPart + lane;
#pragma unroll
        for (int i = 0; i < kChainPieces; ++i) {
          if (start + 32 * i + lane < pieces) {
            float u[8], v[8], x[8];
            widen8<T>(u, from[32 * i]);
            widen8<T>(v, from[kChainPart + 32 * i]);
            widen8<T>(x, xs[start + 32 * i + lane]);
#pragma unroll
            for (int j = 0; j < 8; ++j) a += u[j] * x[j], b += v[j] * x[j];
          }
        }
        if (++slot == kChainGroups) slot = 0, round ^= 1;
        __syncwarp();
        feed.group();
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        a += __shfl_xor_sync(~0u, a, d);
        b += __shfl_xor_sync(~0u, b, d);
      }
      if (lane != 0) continue;
      switch (to) {
        case TAPER_PRODUCT_GATED:
          static_cast<T*>(of.out)[pair] = T(a / (1.f + exp2_fast(-a * kLog2e)) * b);
          break;
        case TAPER_PRODUCT_F32:
          *sum_at = make_float2(a, b);
          break;
        case TAPER_PRODUCT_ADD:
          *sum_at = make_float2(old.x + a, old.y + b);
          break;
        default:
          static_cast<uint32_t*>(of.out)[pair] = pack2<T>(a, b);
      }
    }
  }
  if (tid == 0 && p.count > 1 && atomicAdd(p.sync + kBlocksLeft, 1u) == gridDim.x - 1)
    p.sync[0] = 0, p.sync[kBlocksLeft] = 0;  // All have met for the last time.
}

}  // namespace taper
