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

using LinearParams = TaperLinearParams;
using ChooseParams = TaperChooseParams;

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
  // A thread's outputs below are the same for all columns.
  float bias[4 / SPLIT];
#pragma unroll
  for (int t = 0; t < 4 / SPLIT; ++t)
    bias[t] = p.bias[(int64_t)kv_head * p.outputs + (blockIdx.x * (4 / SPLIT) + t) * 16 +
                     threadIdx.x % 16];
  // The second layer lets the choice start while the first still runs; the first waits, so
  // that nothing starts before what came ahead of both is done.
  if (!p.relu) launch_dependents();
  wait_for_predecessor();
  if (p.relu) launch_dependents();
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
#pragma unroll
    for (int tile = 0; tile < 4 / SPLIT; ++tile) {
      const int o = threadIdx.x % 16, c = threadIdx.x / 16;
      if (c0 + c >= columns) continue;
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) sum += part[tile * SPLIT + s][o][c];
      const int output = (blockIdx.x * (4 / SPLIT) + tile) * 16 + o;
      sum += bias[tile];
      const int64_t to = at(c0 + c) * p.outputs + output;
      if (p.relu) static_cast<T*>(p.out)[to] = T(fmaxf(sum, 0.f));
      else static_cast<float*>(p.out)[to] = sum;
    }
    __syncthreads();
  }
}

constexpr int kClustersMost = 4096;
constexpr int kChooseThreads = 256, kChooseShare = 8;  // thread blocks a list
constexpr int kChooseHeads = 4;                         // whose softmax is computed side by side
constexpr int kChooseBins = 512, kChooseFew = 32;

struct ChooseShared {
  alignas(16) uint32_t bins[kChooseBins];
  uint64_t few[kChooseFew];
  uint32_t scratch[33], few_count;
  float warp_top[2][kChooseHeads][8], warp_sum[2][kChooseHeads][8];
  uint32_t chosen[1024], place[1024], from[1024];
};

// Bins of sixteen to a power of two, for masses of up to 32; below 2^-27 all fall on the first.
__device__ __forceinline__ uint32_t mass_bin(float mass) {
  const int bin = (int)(__float_as_uint(mass) >> 19) - ((127 + 5 - 32) << 4);
  return min(max(bin, 0), kChooseBins - 1);
}
// Masses in their order, the lower of equal clusters first: no two are equal.
__device__ __forceinline__ uint64_t ranked_mass(float mass, uint32_t cluster) {
  return (uint64_t)__float_as_uint(mass) << 32 | (~cluster);
}

// Over the eight lanes of a group; all of them get the result.
__device__ __forceinline__ float eight_max(float x) {
#pragma unroll
  for (int d = 1; d < 8; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float eight_sum(float x) {
#pragma unroll
  for (int d = 1; d < 8; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Which of the index's lists a list reads.
__device__ __forceinline__ int64_t index_of(const ChooseParams& p, int list) {
  const int row = list / p.kv_heads;
  return (int64_t)(p.sequences ? (int)p.sequences[row] : row) * p.kv_heads + list % p.kv_heads;
}

// The `need`-th of a bin's masses, as ranked, where they are many: from the top bit by bit.
template <int PER, class Meet>
__device__ __forceinline__ uint64_t least_of_bin(const ChooseParams& p, ChooseShared& sh, const float (&mass)[PER],
                                                 int first, uint32_t bin, uint32_t need, Meet meet) {
  uint64_t least = 0;
  int n;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t with = least | (uint64_t)1 << bit;
    meet();
    if (threadIdx.x == 0) sh.few_count = 0;
    meet();
    n = 0;
#pragma unroll
    for (int j = 0; j < PER; ++j)
      n += first + j < p.clusters && mass_bin(mass[j]) == bin && ranked_mass(mass[j], first + j) >= with;
    n = __reduce_add_sync(~0u, n);
    if (threadIdx.x % 32 == 0) atomicAdd(&sh.few_count, n);
    meet();
    if (sh.few_count >= need) least = with;
  }
  meet();
  return least;
}

// The choice of a list, by the first kChooseThreads threads of a thread block: sh.chosen, place and from of
// `slots` clusters with `rows` tokens. Few threads with several clusters each, since most of the time goes
// into barriers. The index was complete two launches ago, so its offsets are read before `ready` says
// that the logits are there.
template <int PER, class Ready, class Meet>
__device__ __forceinline__ void choose(const ChooseParams& p, int list, ChooseShared& sh, uint32_t& slots,
                                       uint32_t& rows, Ready ready, Meet meet) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int row = list / p.kv_heads, kv_head = list % p.kv_heads, group = p.q_heads / p.kv_heads;
  const uint32_t* offsets = p.offsets + index_of(p, list) * (p.clusters + 1);
  // The group's mass of a cluster: its softmax probabilities, summed. Thread t owns the
  // clusters PER t .. PER t + PER - 1.
  const int first = tid * PER;
  float mass[PER];
  uint32_t begin[PER + 1];
#pragma unroll
  for (int j = 0; j <= PER; ++j) begin[j] = offsets[min(first + j, p.clusters)];
#pragma unroll
  for (int j = 0; j < PER; ++j) mass[j] = 0.f;
  reinterpret_cast<uint2*>(sh.bins)[tid] = make_uint2(0, 0);
  if (tid == 0) sh.few_count = 0;
  ready();
#pragma unroll 1
  for (int g0 = 0; g0 < group; g0 += kChooseHeads) {
    const float* logits =
        p.logits + ((int64_t)row * p.q_heads + kv_head * group + g0) * p.clusters + first;
    float x[kChooseHeads][PER];
#pragma unroll
    for (int g = 0; g < kChooseHeads; ++g)
#pragma unroll
      for (int j = 0; j < PER; ++j)
        x[g][j] = g0 + g < group && first + j < p.clusters ? logits[(int64_t)g * p.clusters + j]
                                                           : -1e30f;
    // A warp's probabilities by its own maximum; the warps' maxima and sums meet once. So equal logits of clusters
    // in different warps may differ in their masses' last place, always alike.
    const int turn = g0 / kChooseHeads & 1;
    float top[kChooseHeads], sum[kChooseHeads];
#pragma unroll
    for (int g = 0; g < kChooseHeads; ++g) {
      top[g] = x[g][0];
#pragma unroll
      for (int j = 1; j < PER; ++j) top[g] = fmaxf(top[g], x[g][j]);
      const int i = __float_as_int(top[g]), most = __reduce_max_sync(~0u, i < 0 ? i ^ 0x7FFFFFFF : i);
      top[g] = __int_as_float(most < 0 ? most ^ 0x7FFFFFFF : most);
      sum[g] = 0.f;
#pragma unroll
      for (int j = 0; j < PER; ++j) sum[g] += x[g][j] = exp2_fast((x[g][j] - top[g]) * kLog2e);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
#pragma unroll
      for (int g = 0; g < kChooseHeads; ++g) sum[g] += __shfl_xor_sync(~0u, sum[g], d);
#pragma unroll
    for (int g = 0; g < kChooseHeads; ++g)
      if (lane == g) sh.warp_top[turn][g][warp] = top[g], sh.warp_sum[turn][g][warp] = sum[g];
    meet();
    // Lane 8 g + w: head g, warp w.
    const float own = (&sh.warp_top[turn][0][0])[lane], most = eight_max(own);
    const float share = exp2_fast((own - most) * kLog2e);
    const float all = eight_sum(share * (&sh.warp_sum[turn][0][0])[lane]);
    const float factor = g0 + lane / 8 < group ? share / all : 0.f;
#pragma unroll
    for (int g = 0; g < kChooseHeads; ++g) {
      const float f = __shfl_sync(~0u, factor, 8 * g + warp);
#pragma unroll
      for (int j = 0; j < PER; ++j) mass[j] += x[g][j] * f;
    }
  }
  // The masses are counted in bins, and those of the bin that holds the last one to take are compared
  // with one another, or looked at bit by bit where they are many.
#pragma unroll
  for (int j = 0; j < PER; ++j)
    if (first + j < p.clusters) atomicAdd(&sh.bins[mass_bin(mass[j])], 1u);
  meet();
  uint32_t need = min(p.take, p.clusters), bin = 0, bin_size = 0;
  {
    // Every warp reads the counts from the top on its own; lane l owns bins 511 - 16 l - j.
    uint32_t c[16], mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(&sh.bins[kChooseBins - 4 - 16 * lane - 4 * i]);
      c[4 * i] = x.w, c[4 * i + 1] = x.z, c[4 * i + 2] = x.y, c[4 * i + 3] = x.x;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) mine += c[j];
    uint32_t above = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t o = __shfl_up_sync(~0u, above, d);
      if (lane >= d) above += o;
    }
    above -= mine;
    uint32_t left = 0;
    const uint32_t owner = __ffs(__ballot_sync(~0u, above < need && need <= above + mine)) - 1;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (above < need && need <= above + c[j])
        bin = kChooseBins - 1 - 16 * lane - j, left = need - above, bin_size = c[j];
      above += c[j];
    }
    bin = __shfl_sync(~0u, bin, owner);
    need = __shfl_sync(~0u, left, owner);
    bin_size = __shfl_sync(~0u, bin_size, owner);
  }
  uint64_t least = 0;  // of those to take in the bin
  if (bin_size > need && bin_size <= kChooseFew) {
#pragma unroll
    for (int j = 0; j < PER; ++j)
      if (first + j < p.clusters && mass_bin(mass[j]) == bin)
        sh.few[atomicAdd(&sh.few_count, 1u)] = ranked_mass(mass[j], first + j);
    meet();
    const uint64_t mine = lane < bin_size ? sh.few[lane] : 0;
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < bin_size; ++i) better += sh.few[i] > mine;
    least = __shfl_sync(~0u, mine, __ffs(__ballot_sync(~0u, lane < bin_size && better == need - 1)) - 1);
  } else if (bin_size > need) {
    least = least_of_bin<PER>(p, sh, mass, first, bin, need, meet);
  }
  uint32_t take = 0, held = 0;
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const uint32_t in = mass_bin(mass[j]);
    if (first + j < p.clusters && (in > bin || (in == bin && ranked_mass(mass[j], first + j) >= least))) {
      take |= 1u << j;
      held += begin[j + 1] - begin[j];
    }
  }
  uint32_t slot = block_exclusive_sum(__popc(take), sh.scratch, slots, kChooseThreads / 32, meet);
  uint32_t at = block_exclusive_sum(held, sh.scratch, rows, kChooseThreads / 32, meet);
#pragma unroll
  for (int j = 0; j < PER; ++j)
    if (take >> j & 1) {
      const uint32_t n = begin[j + 1] - begin[j];
      if (slot < 1024) sh.chosen[slot] = n, sh.place[slot] = at, sh.from[slot] = begin[j];
      ++slot;
      at += n;
    }
  meet();
}

// What a list reads besides clusters: the sinks, and all from the index on.
__device__ __forceinline__ WorkList unclustered(const ChooseParams& p, int list) {
  WorkList w{};
  w.len = p.lens[list / p.kv_heads];
  w.end[0] = min((uint32_t)p.sink, w.len);
  w.begin[1] = min(max(p.indexed[list / p.kv_heads], w.end[0]), w.len);
  w.end[1] = w.len;
  return w;
}

// Every block of a list makes the same choice and copies its share of the clusters.
template <int PER>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const ChooseParams p) {
  __shared__ ChooseShared sh;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, list = blockIdx.y;
  WorkList w = unclustered(p, list);
  uint32_t slots, rows;
  auto ready = [] {
    wait_for_predecessor();
    launch_dependents();
  };
  choose<PER>(p, list, sh, slots, rows, ready, [] { __syncthreads(); });
  const bool fits = rows <= (uint32_t)p.capacity && slots <= 1024;
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    if (fits) {
      w.token_first = list * p.capacity;
      w.token_count = rows;
    } else {  // Too much was chosen: read everything.
      w.end[0] = w.len;
      w.begin[1] = w.end[1] = 0;
    }
    p.work[list] = w;
  }
  if (!fits) return;
  uint32_t* out = p.token_ids + (int64_t)list * p.capacity;
  const uint32_t* tokens = p.tokens + index_of(p, list) * p.index_capacity;
  for (uint32_t s = warp * gridDim.x + blockIdx.x; s < slots; s += 8 * gridDim.x) {
    const uint32_t n = sh.chosen[s], to = sh.place[s];
    const uint32_t* src = tokens + sh.from[s];
#pragma unroll 8
    for (uint32_t i = lane; i < n; i += 32) out[to + i] = src[i];
  }
}

}  // namespace taper
