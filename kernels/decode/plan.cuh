// Decode attention: the plan, which cuts lists into units.
#pragma once

#include "lists.cuh"

namespace taper {

// Cuts every list into units. Lists are few (rows * list_heads), so every thread block adds up the units of all; units are
// many: a warp writes a list's.
constexpr int kPlanLists = 16;  // lists a thread block
__global__ void __launch_bounds__(1024) decode_plan_kernel(const DecodeParams p) {
  __shared__ uint32_t scratch[33], firsts[1024];
  wait_for_predecessor();
  launch_dependents();
  const int lists = p.rows * p.list_heads, lane = threadIdx.x & 31;
  const uint32_t capacity = p.unit_capacity;
  uint32_t base = 0;
  for (int at = 0; at < lists; at += 1024) {
    const int i = at + threadIdx.x;
    uint32_t total;
    const uint32_t mine =
        base + block_exclusive_sum(i < lists ? unit_count(p.lists[i], p.list_heads) : 0, scratch, total);
    if (blockIdx.x == 0 && i < lists) p.list_units[i] = min(mine, capacity);
    firsts[threadIdx.x] = mine;
    __syncthreads();
    for (int j = blockIdx.x + (threadIdx.x >> 5) * gridDim.x; j < min(lists - at, 1024); j += 32 * gridDim.x) {
      const WorkList work = p.lists[at + j];
      const uint32_t n = unit_count(work, p.list_heads), first = firsts[j];
      for (uint32_t u = lane; u < n && first + u < capacity; u += 32)
        p.units[first + u] = unit_of(p, at + j, work, u, n);
    }
    base += total;
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.list_units[lists] = min(base, capacity);
}

}  // namespace taper
