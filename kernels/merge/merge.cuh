// Merges the partial results of split attention, in a fixed order.
//
// Every partial is (o normalised, lse); an empty one has lse -inf. Warp w takes
// partials w, w + 8, ... and the eight sums are added in warp order, so the result
// depends only on the number of partials.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

struct MergeParams {
  const float* part_o;         // [2 * units, group, head_dim]
  const float* part_lse;       // [2 * units, group]
  const uint32_t* list_units;  // [lists + 1]
  void* out;                   // [rows, q_heads, head_dim], dtype or f32
  float* lse;                  // [rows, q_heads] or null
  int32_t rows, q_heads, list_heads, head_dim, dtype;
  int32_t out_f32, overlap, reserved;
};

template <int D, class Out>
__global__ void __launch_bounds__(256) merge_kernel(const MergeParams p) {
  constexpr int V = D / 32;  // elements per lane
  constexpr int kWarps = 8, kUnroll = 4;
  __shared__ float acc_s[kWarps][D];
  __shared__ float red[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = p.q_heads / p.list_heads;
  const int row = blockIdx.x / p.q_heads, qh = blockIdx.x % p.q_heads;
  const int list = row * p.list_heads + qh / group, g = qh % group;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t first = 2 * p.list_units[list], n = 2 * p.list_units[list + 1] - first;
  const float* lse = p.part_lse + (int64_t)first * group + g;
  const float* o = p.part_o + ((int64_t)first * group + g) * D + lane * V;

  float top = -INFINITY;
  for (uint32_t i = threadIdx.x; i < n; i += 256) top = fmaxf(top, lse[(int64_t)i * group]);
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) red[warp] = top;
  __syncthreads();
  top = red[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) top = fmaxf(top, red[w]);
  __syncthreads();

  float acc[V] = {}, sum = 0.f;
  if (top > -INFINITY) {
    for (uint32_t i = warp; i < n; i += kWarps * kUnroll) {
      float x[kUnroll][V], w[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const uint32_t at = i + k * kWarps;
        w[k] = at < n ? lse[(int64_t)at * group] : -INFINITY;
#pragma unroll
        for (int v = 0; v < V; ++v) x[k][v] = at < n ? o[(int64_t)at * group * D + v] : 0.f;
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const float f = exp2_fast((w[k] - top) * kLog2e);
        sum += f;
#pragma unroll
        for (int v = 0; v < V; ++v) acc[v] += f * x[k][v];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) acc_s[warp][lane * V + v] = acc[v];
  if (lane == 0) red[warp] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += red[w];
  if (threadIdx.x < D) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += acc_s[w][threadIdx.x];
    static_cast<Out*>(p.out)[(int64_t)blockIdx.x * D + threadIdx.x] =
        static_cast<Out>(sum > 0.f ? x / sum : 0.f);
  }
  if (p.lse && threadIdx.x == 0) p.lse[blockIdx.x] = sum > 0.f ? top + logf(sum) : -INFINITY;
}

}  // namespace taper
