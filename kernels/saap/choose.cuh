// SAAP's query side: a two-layer classifier a KV head says which clusters hold a query's
// attention, and the tokens of the best of them become the decode attention's list.
//
// Both layers are one kernel, 16 outputs a warp or thread block: weights are loaded into
// matrix fragments before the launch waits for its predecessor, so the second layer's 16
// MB arrive while the first is computed, and are read once for all rows and heads.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

struct LinearParams {
  const void* x;       // [rows, q_heads, inputs]
  const void* weight;  // [kv_heads, outputs, inputs]
  const float* bias;   // [kv_heads, outputs]
  void* out;           // [rows, q_heads, outputs]: dtype after max(., 0) if `relu`, else f32
  int32_t rows, q_heads, kv_heads, inputs, outputs, dtype, relu, overlap;
};

struct ChooseParams {
  const float* logits;      // [rows, q_heads, clusters]
  const uint32_t* offsets;  // [sequences, kv_heads, clusters + 1]
  const uint32_t* tokens;   // [sequences, kv_heads, index_capacity]
  const uint32_t* sequences;  // [rows], which index each row reads; null: row r reads r
  const uint32_t* lens;       // [rows], visible tokens
  const uint32_t* indexed;    // [rows], the first token after the index, read as a range from there
  WorkList* work;             // [rows, kv_heads]
  uint32_t* token_ids;        // [rows, kv_heads, capacity]
  int32_t rows, q_heads, kv_heads, clusters, take, sink;
  int32_t index_capacity, capacity, overlap, reserved;
};

// K inputs a warp, SPLIT warps to one row of outputs.
template <class T, int K, int SPLIT>
__global__ void __launch_bounds__(128) linear_kernel(const LinearParams p) {
  constexpr int kLoads = K / 32;
  __shared__ float part[4][16][9];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
  const int kv_head = blockIdx.y, group = p.q_heads / p.kv_heads;
  const int out0 = (blockIdx.x * (4 / SPLIT) + warp / SPLIT) * 16, in0 = (warp % SPLIT) * K;
  uint4 lo[kLoads], hi[kLoads];
  const T* w = static_cast<const T*>(p.weight) +
               ((int64_t)kv_head * p.outputs + out0 + lane / 4) * p.inputs + in0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    lo[i] = reinterpret_cast<const uint4*>(w)[quad + 4 * i];
    hi[i] = reinterpret_cast<const uint4*>(w + (int64_t)8 * p.inputs)[quad + 4 * i];
  }
  wait_for_predecessor();
  launch_dependents();
  const int columns = p.rows * group;
#pragma unroll 1
  for (int c0 = 0; c0 < columns; c0 += 8) {
    const int column = min(c0 + lane / 4, columns - 1);
    auto at = [&](int c) { return (int64_t)(c / group) * p.q_heads + kv_head * group + c % group; };
    const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) +
                                                    at(column) * p.inputs + in0);
    float acc[4] = {};
    uint4 b[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) b[i] = x[quad + 4 * i];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      mma_16x8x16<T>(acc, lo[i].x, hi[i].x, lo[i].y, hi[i].y, b[i].x, b[i].y);
      mma_16x8x16<T>(acc, lo[i].z, hi[i].z, lo[i].w, hi[i].w, b[i].z, b[i].w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) part[warp][lane / 4 + 8 * (j / 2)][2 * quad + (j & 1)] = acc[j];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 8 * (4 / SPLIT); i += 128) {
      const int o = i % 16, c = i / 16 % 8, tile = i / 128;
      if (c0 + c >= columns) continue;
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) sum += part[tile * SPLIT + s][o][c];
      const int output = (blockIdx.x * (4 / SPLIT) + tile) * 16 + o;
      sum += p.bias[(int64_t)kv_head * p.outputs + output];
      const int64_t to = at(c0 + c) * p.outputs + output;
      if (p.relu) static_cast<T*>(p.out)[to] = T(fmaxf(sum, 0.f));
      else static_cast<float*>(p.out)[to] = sum;
    }
    __syncthreads();
  }
}

constexpr int kChoosePer = 4, kChooseShare = 4;  // clusters a thread; thread blocks a list

// One value of each thread over the block; `Op` must not care for order.
template <class Op>
__device__ __forceinline__ float block_reduce(float x, float* scratch, Op op) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = op(x, __shfl_xor_sync(~0u, x, d));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[threadIdx.x & 31];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = op(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// Every block of a list makes the same choice and copies its share of the clusters.
template <int PER>
__global__ void __launch_bounds__(1024) choose_kernel(const ChooseParams p) {
  __shared__ uint32_t hist[256], scratch[33], found[2];
  __shared__ float sums[32];
  __shared__ uint32_t chosen[1024], place[1024], from[1024];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int list = blockIdx.y, row = list / p.kv_heads, kv_head = list % p.kv_heads;
  const int group = p.q_heads / p.kv_heads;
  wait_for_predecessor();
  launch_dependents();
  const int sequence = p.sequences ? (int)p.sequences[row] : row;
  const uint32_t* offsets = p.offsets + ((int64_t)sequence * p.kv_heads + kv_head) * (p.clusters + 1);
  const uint32_t* tokens =
      p.tokens + ((int64_t)sequence * p.kv_heads + kv_head) * p.index_capacity;
  // The group's mass of a cluster: its softmax probabilities, summed. Thread t owns the
  // clusters PER t .. PER t + PER - 1.
  float mass[PER];
  uint32_t begin[PER], size[PER];
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const int c = tid * PER + j;
    mass[j] = 0.f;
    begin[j] = c < p.clusters ? offsets[c] : 0;
    size[j] = c < p.clusters ? offsets[c + 1] - begin[j] : 0;
  }
#pragma unroll 1
  for (int g = 0; g < group; ++g) {
    const float* logits = p.logits + ((int64_t)row * p.q_heads + kv_head * group + g) * p.clusters;
    float x[PER], top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      x[j] = tid * PER + j < p.clusters ? logits[tid * PER + j] : -INFINITY;
      top = fmaxf(top, x[j]);
    }
    top = block_reduce(top, sums, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int j = 0; j < PER; ++j) x[j] = exp2_fast((x[j] - top) * kLog2e), sum += x[j];
    sum = block_reduce(sum, sums, [](float a, float b) { return a + b; });
#pragma unroll
    for (int j = 0; j < PER; ++j) mass[j] += x[j] / sum;
  }
  // Masses are not negative: their bits order them.
  uint32_t prefix = 0, need = min(p.take, p.clusters);
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (tid < 256) hist[tid] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      const uint32_t u = __float_as_uint(mass[j]);
      if (tid * PER + j < p.clusters && (uint64_t)u >> (shift + 8) == prefix)
        atomicAdd(&hist[u >> shift & 255], 1u);
    }
    __syncthreads();
    uint32_t total;
    const uint32_t mine = tid < 256 ? hist[255 - tid] : 0;
    const uint32_t above = block_exclusive_sum(mine, scratch, total);
    if (above < need && need <= above + mine) found[0] = 255 - tid, found[1] = need - above;
    __syncthreads();
    prefix = prefix << 8 | found[0];
    need = found[1];
  }
  uint32_t equal = 0, kept = 0, held = 0, total;
#pragma unroll
  for (int j = 0; j < PER; ++j)
    equal += tid * PER + j < p.clusters && __float_as_uint(mass[j]) == prefix;
  uint32_t rank = block_exclusive_sum(equal, scratch, total);
  bool take[PER];
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const uint32_t u = __float_as_uint(mass[j]);
    take[j] = tid * PER + j < p.clusters && (u > prefix || (u == prefix && rank < need));
    rank += u == prefix;
    kept += take[j];
    held += take[j] ? size[j] : 0;
  }
  uint32_t slots, rows;
  uint32_t slot = block_exclusive_sum(kept, scratch, slots);
  uint32_t at = block_exclusive_sum(held, scratch, rows);
#pragma unroll
  for (int j = 0; j < PER; ++j)
    if (take[j]) {
      if (slot < 1024) chosen[slot] = size[j], place[slot] = at, from[slot] = begin[j];
      ++slot;
      at += size[j];
    }
  __syncthreads();
  const uint32_t len = p.lens[row], indexed = p.indexed[row];
  const bool fits = rows <= (uint32_t)p.capacity && slots <= 1024;
  if (tid == 0 && blockIdx.x == 0) {
    WorkList w{};
    w.len = len;
    if (fits) {
      w.end[0] = min((uint32_t)p.sink, len);
      w.begin[1] = min(max(indexed, w.end[0]), len);
      w.end[1] = len;
      w.token_first = list * p.capacity;
      w.token_count = rows;
    } else {
      w.end[0] = len;  // Too much was chosen: read everything.
    }
    p.work[list] = w;
  }
  if (!fits) return;
  uint32_t* out = p.token_ids + (int64_t)list * p.capacity;
  for (uint32_t s = warp * gridDim.x + blockIdx.x; s < slots; s += 32 * gridDim.x) {
    const uint32_t n = chosen[s], to = place[s];
    const uint32_t* src = tokens + from[s];
#pragma unroll 4
    for (uint32_t i = lane; i < n; i += 32) out[to + i] = src[i];
  }
}

}  // namespace taper
