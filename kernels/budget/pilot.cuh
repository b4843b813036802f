// Sums over a list's sampled keys: e, e^2, e v, e^2 v and e^2 |v|^2 of every query head,
// with e = exp(score - top). A fixed number of thread blocks share a list's sample in
// chunks of 64 keys, each with a running maximum that starts at the known keys' lse.
#pragma once

#include "../common/ptx.cuh"
#include "../common/worklist.cuh"

namespace taper {

constexpr int kPilotSplits = 32, kPilotThreads = 128;
constexpr int kCovarianceKeys = 96;  // sampled keys whose covariance is taken

template <int D>
struct PilotPart {
  float top, e, e2, e2v2;
  float ev[D], e2v[D];
};

struct BudgetParams {
  const void* q;                // [rows, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const void* v;                // as k
  const uint32_t* block_table;  // [tables, table_stride]
  const uint32_t* row_table;    // [rows] or null
  const uint32_t* block_ids;    // pool that `fixed` slices
  const WorkList* fixed;        // [rows, kv_heads], what is read exactly
  WorkList* sampled;            // [rows, kv_heads], what is to be read besides
  const float* fixed_o;         // [rows, q_heads, head_dim], attention over `fixed`
  const float* fixed_lse;       // [rows, q_heads]
  float* base_lse;              // [rows, q_heads], fixed_lse, or -inf where dense
  const uint32_t* ids;          // [rows, kv_heads, capacity], the draws in order
  uint32_t* state;              // [rows, kv_heads]
  uint32_t* wants;              // [rows, kv_heads], draws wanted
  uint32_t* residual;           // [rows, kv_heads], keys that the sample stands for
  uint32_t* head_counts;        // [rows, q_heads]
  float* head_ln_weight;        // [rows, q_heads]
  float* scores;                // [rows, kv_heads, 96, group]
  void* parts;                  // [rows, kv_heads, 32, group] PilotPart
  uint32_t* verdicts;           // [rows, q_heads]
  double* budgets;              // [rows, q_heads]
  // Quantiles, from the host: of the whole delta, of 0.9 delta for a vector and one-sided,
  // of 0.1 delta, and of six splits of delta.
  double epsilon, whole, most, upper, rest, split_vector[6], split_scalar[6];
  double pilot_share, dense_share;
  int32_t pilot_tokens, rule, last_round;
  int32_t rows, q_heads, kv_heads, head_dim, dtype, table_stride, capacity;
  float scale;
  int32_t overlap;
};

// Cache row of the i-th draw of a list.
__device__ __forceinline__ int64_t sampled_row(const BudgetParams& p, int list, uint32_t i) {
  const uint32_t row = list / p.kv_heads, kv_head = list % p.kv_heads;
  const uint32_t id = p.ids[(int64_t)list * p.capacity + i];
  const uint32_t* table =
      p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride;
  return ((int64_t)table[id / kBlock] * p.kv_heads + kv_head) * kBlock + id % kBlock;
}

template <class T, int D, int NT>
__global__ void __launch_bounds__(kPilotThreads) budget_pilot_kernel(const BudgetParams p) {
  constexpr int H = NT * 8, kLoads = D / 32;
  __shared__ float s[kBlock][H];
  __shared__ int64_t at[kBlock];
  constexpr int kParts = kPilotThreads / H, kKeys = kBlock / kParts;  // of a head's column
  __shared__ float top_s[H], fix_s[H], red[kParts][H], red2[kParts][H];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = lane & 3;
  const int list = blockIdx.y, group = p.q_heads / p.kv_heads;
  wait_for_predecessor();
  launch_dependents();
  if (p.state[list] != 0) return;
  const uint32_t want = p.wants[list];
  uint4 q[NT][kLoads];
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    const int h = t * 8 + lane / 4;
    const uint4* src = reinterpret_cast<const uint4*>(
        static_cast<const T*>(p.q) + ((int64_t)list * group + (h < group ? h : 0)) * D);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      q[t][i] = h < group ? src[quad + 4 * i] : make_uint4(0, 0, 0, 0);
  }
  float ev[H] = {}, e2v[H] = {}, e2v2[H] = {}, e = 0.f, e2 = 0.f;
  if (tid < H) top_s[tid] = tid < group ? p.fixed_lse[(int64_t)list * group + tid] : 0.f;

  for (uint32_t chunk = blockIdx.x; chunk * kBlock < want; chunk += kPilotSplits) {
    __syncthreads();
    if (tid < kBlock) at[tid] = sampled_row(p, list, min(chunk * kBlock + tid, want - 1));
    __syncthreads();
    float c[NT][4] = {};
    const uint4* lo = reinterpret_cast<const uint4*>(static_cast<const T*>(p.k) +
                                                     at[warp * 16 + lane / 4] * D);
    const uint4* hi = reinterpret_cast<const uint4*>(static_cast<const T*>(p.k) +
                                                     at[warp * 16 + lane / 4 + 8] * D);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = lo[quad + 4 * i], y = hi[quad + 4 * i];
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        mma_16x8x16<T>(c[t], x.x, y.x, x.y, y.y, q[t][i].x, q[t][i].y);
        mma_16x8x16<T>(c[t], x.z, y.z, x.w, y.w, q[t][i].z, q[t][i].w);
      }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = warp * 16 + lane / 4 + 8 * (i / 2), h = t * 8 + quad * 2 + (i & 1);
        const uint32_t draw = chunk * kBlock + key;
        const float score = c[t][i] * p.scale;
        s[key][h] = draw < want ? score : -INFINITY;
        if (draw < want && draw < kCovarianceKeys && h < group)
          p.scores[((int64_t)list * kCovarianceKeys + draw) * group + h] = score;
      }
    __syncthreads();
    // Head `tid % H`, keys of part `tid / H`.
    const int my = tid % H, part = tid / H;
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) top = fmaxf(top, s[part * kKeys + i][my]);
    red[part][my] = top;
    __syncthreads();
    const float before = top_s[my];
    top = before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, red[i][my]);
    const float my_fix = before == -INFINITY ? 0.f : __expf(before - top);
    e *= my_fix;
    e2 *= my_fix * my_fix;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      float& x = s[part * kKeys + i][my];
      x = x == -INFINITY ? 0.f : __expf(x - top);
      e += x;
      e2 += x * x;
    }
    __syncthreads();
    if (part == 0) top_s[my] = top, fix_s[my] = my_fix;
    __syncthreads();
    if (tid < D) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        ev[h] *= fix_s[h];
        e2v[h] *= fix_s[h] * fix_s[h];
        e2v2[h] *= fix_s[h] * fix_s[h];
      }
      const T* v = static_cast<const T*>(p.v) + tid;
#pragma unroll 16
      for (int i = 0; i < kBlock; ++i) {
        const float x = to_float(v[at[i] * D]);
#pragma unroll
        for (int h = 0; h < H; ++h) {
          const float w = s[i][h], wx = w * x;
          ev[h] += wx;
          e2v[h] += w * wx;
          e2v2[h] += wx * wx;
        }
      }
    }
  }
  __syncthreads();
  red[tid / H][tid % H] = e;
  red2[tid / H][tid % H] = e2;
  __syncthreads();
  float sum = 0.f, sum2 = 0.f, norm = 0.f;
  if (tid < H)
    for (int i = 0; i < kParts; ++i) sum += red[i][tid], sum2 += red2[i][tid];
  __syncthreads();
#pragma unroll
  for (int h = 0; h < H; ++h) {
    float x = e2v2[h];
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    if (lane == 0) red[warp][h] = x;
  }
  __syncthreads();
  if (tid < H)
    for (int w = 0; w < kPilotThreads / 32; ++w) norm += red[w][tid];
  const bool any = blockIdx.x * kBlock < want;
  PilotPart<D>* parts = static_cast<PilotPart<D>*>(p.parts) +
                        ((int64_t)list * kPilotSplits + blockIdx.x) * group;
  if (tid < group) {
    PilotPart<D>& out = parts[tid];
    out.top = any ? top_s[tid] : -INFINITY;
    out.e = sum, out.e2 = sum2, out.e2v2 = norm;
  }
  if (tid < D)
#pragma unroll
    for (int h = 0; h < H; ++h)
      if (h < group) parts[h].ev[tid] = ev[h], parts[h].e2v[tid] = e2v[h];
}

}  // namespace taper
