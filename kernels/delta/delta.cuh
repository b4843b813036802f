// Delta Attention's correction of a sparse prefill.
//
// Every row takes the difference between the dense and the sparse output of the last
// anchor row at or before it (multiples of gamma by absolute position). Anchors and
// the tail become the dense rows themselves.
#pragma once

#include "../common/eight.cuh"
#include "../common/launch.cuh"

namespace taper {

using DeltaParams = TaperDeltaParams;

template <int D>
__global__ void __launch_bounds__(256) delta_kernel(const DeltaParams p) {
  constexpr int kChunks = D / 8;
  wait_for_predecessor();
  launch_dependents();
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  const int64_t per_row = (int64_t)p.q_heads * kChunks;
  if (i >= per_row * p.tokens) return;
  const int64_t row = i / per_row, in_row = i % per_row;
  const int64_t pos = p.position + row;
  const int64_t anchor = pos / p.gamma - p.anchor_first;
  const bool tail = pos >= p.tail_begin, on_anchor = pos % p.gamma == 0;
  const int64_t dense_row = tail ? p.anchors + pos - p.tail_begin : anchor;
  if (!tail && !on_anchor && !p.propagate) return;
  float* out = p.out + (row * per_row + in_row) * 8;
  float x[8];
  load8(p.anchor_dense + (dense_row * per_row + in_row) * 8, x);
  if (!tail && !on_anchor) {
    float b[8], sparse[8];
    load8(p.anchor_base + (anchor * per_row + in_row) * 8, b);
    load8(out, sparse);
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = sparse[k] + (x[k] - b[k]);
  }
  store8(out, x);
}

}  // namespace taper
