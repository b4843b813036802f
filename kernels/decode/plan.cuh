// Decode attention: the plan, which cuts lists into units.
#pragma once

#include "lists.cuh"

namespace taper {

// Cuts every list into units. One thread block; lists are few (rows * list_heads).
__global__ void __launch_bounds__(1024) decode_plan_kernel(const DecodeParams p) {
  __shared__ uint32_t warp_sum[32];
  __shared__ uint32_t base;
  wait_for_predecessor();
  launch_dependents();
  const int lists = p.rows * p.list_heads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) base = 0;
  __syncthreads();
  for (int at = 0; at < lists; at += 1024) {
    const int i = at + threadIdx.x;
    uint32_t tiles = 0, n = 0, table = 0;
    WorkList work{};
    if (i < lists) {
      work = p.lists[i];
      table = i / p.list_heads;
      if (p.row_table) table = p.row_table[table];
      tiles = list_tiles(work);
      n = list_unit_count(tiles, p.list_heads);
    }
    uint32_t sum = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t o = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += o;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    uint32_t before = base;
    for (int w = 0; w < warp; ++w) before += warp_sum[w];
    const uint32_t first = before + sum - n;
    if (i < lists) {
      p.list_units[i] = min(first, (uint32_t)p.unit_capacity);
      for (uint32_t u = 0; u < n && first + u < (uint32_t)p.unit_capacity; ++u)
        p.units[first + u] = {(uint32_t)i, u * tiles / n, (u + 1) * tiles / n, table, work};
    }
    __syncthreads();
    if (threadIdx.x == 1023) base = before + sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.list_units[lists] = min(base, (uint32_t)p.unit_capacity);
}

}  // namespace taper
