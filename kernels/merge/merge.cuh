// Merges the partial results of split attention, in a fixed order.
//
// Every partial is (o normalised, lse); an empty one has lse -inf, one that is no number
// makes the head's output none. Warp w takes every
// W-th partial from w on, and the warps' sums are added in warp order. W depends on how
// finely the model's lists are cut and on nothing else, so a result depends only on the
// number of partials.
#pragma once

#include <type_traits>

#include "../decode/lists.cuh"

namespace taper {

using MergeParams = TaperMergeParams;

template <int D, int W, class Out>
__global__ void __launch_bounds__(W * 32) merge_kernel(const MergeParams p) {
  constexpr int V = D / 32;                // elements per lane
  constexpr int kUnroll = W == 4 ? 9 : 8;  // partials of a warp in flight
  using Vec = typename std::conditional<V == 4, float4, float2>::type;
  __shared__ float acc_s[W][D];
  __shared__ float top_s[W], sum_s[W];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int fold = p.fold > 1 ? p.fold : 1, own = p.q_heads / p.list_heads, group = own * fold;
  const int row = blockIdx.x / p.q_heads, qh = blockIdx.x % p.q_heads;
  const int list = row / fold * p.list_heads + qh / own, g = row % fold * own + qh % own;
  // Plan and lists were complete before the attention let this kernel start, so the unit
  // ranges may be read ahead of the wait; the partials may not.
  uint32_t first = 0, n;
  if (p.lists) {
    for (int i = lane; i < list; i += 32) first += unit_count(p.lists[i], p.list_heads);
    first = __reduce_add_sync(~0u, first);
    n = unit_count(p.lists[list], p.list_heads);
  } else {
    first = p.list_units[list], n = p.list_units[list + 1] - first;
  }
  // No kernel reads, before it waits, what this one's predecessors write.
  launch_dependents();
  wait_for_predecessor();
  const float* lse = p.part_lse + (int64_t)first * group + g;
  const float* o = p.part_o + ((int64_t)first * group + g) * D + lane * V;

  float acc[V] = {}, sum = 0.f, top = -INFINITY;
  for (uint32_t i = warp; i < n; i += W * kUnroll) {
    Vec x[kUnroll];
    float w[kUnroll], now = top;
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t at = min(i + k * W, n - 1);
      w[k] = lse[(int64_t)at * group];
      x[k] = *reinterpret_cast<const Vec*>(o + (int64_t)at * group * D);
      if (i + k * W >= n) w[k] = -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) now = max_nan(now, w[k]);
    if (now == -INFINITY) continue;
    const float fix = exp2_fast((top - now) * kLog2e);
    top = now;
    sum *= fix;
#pragma unroll
    for (int v = 0; v < V; ++v) acc[v] *= fix;
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const float f = exp2_fast((w[k] - top) * kLog2e);
      sum += f;
#pragma unroll
      for (int v = 0; v < V; ++v) acc[v] += f * reinterpret_cast<const float*>(&x[k])[v];
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) acc_s[warp][lane * V + v] = acc[v];
  if (lane == 0) top_s[warp] = top, sum_s[warp] = sum;
  __syncthreads();
  if (threadIdx.x >= D) return;
  top = -INFINITY;
#pragma unroll
  for (int w = 0; w < W; ++w) top = max_nan(top, top_s[w]);
  float x = 0.f;
  sum = 0.f;
  if (p.base_o && p.base_lse[blockIdx.x] != -INFINITY) {
    const float base = p.base_lse[blockIdx.x];
    top = max_nan(top, base);
    sum = exp2_fast((base - top) * kLog2e);
    x = sum * p.base_o[(int64_t)blockIdx.x * D + threadIdx.x];
  }
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const float f = top_s[w] == -INFINITY ? 0.f : exp2_fast((top_s[w] - top) * kLog2e);
    x += f * acc_s[w][threadIdx.x];
    sum += f * sum_s[w];
  }
  static_cast<Out*>(p.out)[(int64_t)blockIdx.x * D + threadIdx.x] =
      static_cast<Out>(sum == 0.f ? 0.f : x / sum);
  if (p.lse && threadIdx.x == 0) p.lse[blockIdx.x] = sum == 0.f ? -INFINITY : top + logf(sum);
}

}  // namespace taper
