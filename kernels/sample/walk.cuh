// Lists key by key: which token each place in a list is, and the scores there, with the log weights of
// samples, in the form that the draws of values take.
#pragma once

#include "../common/ptx.cuh"
#include "../decode/lists.cuh"

namespace taper {

using WalkParams = TaperWalkParams;
using WeighParams = TaperWeighParams;

constexpr int kWalkThreads = 256, kWeighWarps = 8;

// A list as a walk goes through it.
struct Walk {
  WorkList w;
  const uint32_t *block_ids, *token_ids, *sample;
  int shift;
  uint32_t range[2], blocks;  // keys of each range and of the blocks
  uint32_t fixed, count;      // keys before the sample, and with it
  bool whole;                 // every token, in order

  __device__ __forceinline__ Walk(const WalkParams& p, uint32_t list)
      : w(p.work[list]), block_ids(p.block_ids), token_ids(p.token_ids), shift(p.token_shift) {
    fixed = fixed_keys(w, block_ids);
    blocks = fixed - w.token_count;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      range[r] = w.end[r] > w.begin[r] ? w.end[r] - w.begin[r] : 0;
      blocks -= range[r];
    }
    uint32_t sampled = w.sample_count;
    sample = token_ids + w.sample_first;
    whole = false;
    if (p.states) {
      whole = p.states[list] != TAPER_SAMPLED;
      sampled = whole ? 0 : p.sampled[list];
      sample = p.draws + (int64_t)list * p.draw_stride;
    }
    if (whole) fixed = w.len;
    whole |= fixed == w.len && sampled == 0;
    fixed = min(fixed, (uint32_t)p.capacity);
    count = min(fixed + sampled, (uint32_t)p.capacity);
  }
  // The token at a place.
  __device__ __forceinline__ uint32_t at(uint32_t e) const {
    if (whole) return e;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (e < range[r]) return w.begin[r] + e;
      e -= range[r];
    }
    if (e < blocks) return block_ids[(uint64_t)w.block_first + e / kBlock] * kBlock + e % kBlock;
    e -= blocks;
    if (e < w.token_count) return token_at(token_ids, shift, (uint64_t)w.token_first + e);
    return sample[e - w.token_count];
  }
};

__global__ void __launch_bounds__(kWalkThreads) walk_kernel(const WalkParams p) {
  wait_for_predecessor();
  launch_dependents();
  const uint32_t list = blockIdx.y;
  const Walk walk(p, list);
  uint32_t* ids = p.ids + (int64_t)list * p.capacity;
#pragma unroll 4
  for (uint32_t e = blockIdx.x * kWalkThreads + threadIdx.x; e < walk.count; e += gridDim.x * kWalkThreads)
    ids[e] = walk.at(e);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.counts[list] = walk.count, p.firsts[list] = walk.fixed;
}

// A warp takes 64 entries of a query head.
__global__ void __launch_bounds__(kWeighWarps * 32) weigh_kernel(const WeighParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t head = blockIdx.y;
  const int64_t list = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
  const uint32_t count = p.counts[list], from = p.firsts[list];
  // Where the keys that the head reads of the sample end, and their log weight.
  uint32_t to = count;
  float ln_weight = 0.f;
  if (from < count) {
    if (p.residual) ln_weight = logf((float)p.residual[list] / (float)(count - from));
    if (p.head_ln_weight) ln_weight = p.head_ln_weight[head];
    if (p.head_counts) to = min(count, from + p.head_counts[head]);
  }
  const uint32_t* ids = p.ids + list * p.stride;
  const float* known = p.known ? p.known + head * p.known_stride : nullptr;
  float* scores = p.scores + head * p.stride;
  for (uint32_t first = (blockIdx.x * kWeighWarps + warp) * kBlock; first < count;
       first += gridDim.x * kWeighWarps * kBlock) {
    float s[2], top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t e = first + lane + k * 32;
      s[k] = -INFINITY;
      if (e < count) {
        if (e < to) s[k] = known ? known[ids[e]] : scores[e];
        if (e >= from) s[k] += ln_weight;
        scores[e] = s[k];
      }
      top = fmaxf(top, s[k]);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int k = 0; k < 2; ++k) sum += s[k] == -INFINITY ? 0.f : exp2_fast((s[k] - top) * kLog2e);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) {
      const int64_t at = head * (p.stride / kBlock) + first / kBlock;
      p.tile_max[at] = top;
      p.tile_sum[at] = sum;
    }
  }
}

}  // namespace taper
