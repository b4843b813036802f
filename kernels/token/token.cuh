// The next token of each row, from its logits: the likeliest, or one drawn by weight among those that
// the row's filters keep. A cluster of thread blocks holds a row's weights in its registers.
//
// Weights are added up as whole numbers, so that sums depend on no order. Filters keep, of equal
// weights, those of the first tokens.
#pragma once

#include <cooperative_groups.h>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/scan.cuh"

namespace taper {

using TokenParams = TaperTokenParams;
using TokenRow = TaperTokenRow;

constexpr int kTokenCluster = 8, kTokenThreads = 1024, kTokenWarps = kTokenThreads / 32;
constexpr float kTokenUnit = 0x1p44f;  // what the likeliest token's weight of 1 counts
constexpr uint64_t kNotFinite = ~(uint64_t)0;

template <int PER>
struct TokenShared {
  uint64_t ranks[2][3][kTokenCluster], warps[3][kTokenWarps], grid[PER * kTokenWarps];
};

// Thread t of rank r holds tokens (r * PER + i) * kTokenThreads + t.
template <int PER>
struct TokenBlock {
  TokenShared<PER>& sh;
  const cooperative_groups::cluster_group cluster;
  const uint32_t rank, lane, warp;
  float w[PER];
  uint32_t turn;

  __device__ __forceinline__ uint32_t token(int i) const {
    return (rank * PER + i) * kTokenThreads + threadIdx.x;
  }
  static __device__ __forceinline__ uint64_t mass(float w) { return __float2ull_rz(w * kTokenUnit); }

  // x becomes what all threads of the cluster have of it.
  template <int N, class F>
  __device__ __forceinline__ void combine(uint64_t (&x)[N], F f) {
    auto over_warp = [&](uint64_t v) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) v = f(v, __shfl_xor_sync(~0u, v, d));
      return v;
    };
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = over_warp(x[n]);
      if (lane == 0) sh.warps[n][warp] = x[n];
    }
    __syncthreads();
    if (warp == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint64_t v = over_warp(sh.warps[n][lane]);
        if (lane < kTokenCluster) *cluster.map_shared_rank(&sh.ranks[turn][n][rank], lane) = v;
      }
    cluster.sync();
    // Two buffers in turn: whoever is ahead cannot overwrite what others still read.
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = sh.ranks[turn][n][0];
#pragma unroll
      for (int r = 1; r < kTokenCluster; ++r) x[n] = f(x[n], sh.ranks[turn][n][r]);
    }
    turn ^= 1;
  }
  template <int N>
  __device__ __forceinline__ void sum(uint64_t (&x)[N]) {
    combine(x, [](uint64_t a, uint64_t b) { return a + b; });
  }
  // Of the latest sums' n-th: what the ranks before this one have.
  __device__ __forceinline__ uint64_t before(int n) const {
    uint64_t x = 0;
    for (uint32_t r = 0; r < rank; ++r) x += sh.ranks[turn ^ 1][n][r];
    return x;
  }
  // The grid, a number for each i and warp, becomes what comes before each, in the order of tokens.
  __device__ __forceinline__ void scan() {
    __syncthreads();
    const uint64_t own = threadIdx.x < PER * kTokenWarps ? sh.grid[threadIdx.x] : 0, to = warp_upto(own);
    if (lane == 31) sh.warps[0][warp] = to;
    __syncthreads();
    if (warp == 0) {
      const uint64_t v = sh.warps[0][lane];
      sh.warps[0][lane] = warp_upto(v) - v;
    }
    __syncthreads();
    if (threadIdx.x < PER * kTokenWarps) sh.grid[threadIdx.x] = sh.warps[0][warp] + to - own;
    __syncthreads();
  }

  // Keeps the fewest heaviest tokens that reach the goal by `of`; all, if they do not.
  template <class F>
  __device__ __forceinline__ void keep(uint64_t goal, F of) {
    // The largest threshold with which they reach it, two bits at a time: the bits of numbers that are
    // not negative order as they do, and no weight is above 1.
    uint32_t least = 0;
#pragma unroll 1
    for (int shift = 28; shift >= 0; shift -= 2) {
      uint64_t x[3] = {};
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const uint32_t bits = __float_as_uint(w[i]);
        const uint64_t v = of(w[i]);
#pragma unroll
        for (int j = 0; j < 3; ++j) x[j] += bits >= (least | (j + 1) << shift) ? v : 0;
      }
      sum(x);
      least |= (x[2] >= goal ? 3 : x[1] >= goal ? 2 : x[0] >= goal ? 1 : 0) << shift;
    }
    if (least == 0) return;
    uint64_t x[2] = {};
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t bits = __float_as_uint(w[i]);
      x[0] += bits > least ? of(w[i]) : 0, x[1] += bits == least;
    }
    sum(x);
    const uint64_t each = of(__uint_as_float(least)), first = before(1);
    const uint64_t most = each == 0 ? x[1] : (goal - min(goal, x[0]) + each - 1) / each;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t equal = __ballot_sync(~0u, __float_as_uint(w[i]) == least);
      if (lane == 0) sh.grid[i * kTokenWarps + warp] = __popc(equal);
    }
    scan();
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t bits = __float_as_uint(w[i]), equal = __ballot_sync(~0u, bits == least);
      const uint64_t place = first + sh.grid[i * kTokenWarps + warp] + __popc(equal & ((1u << lane) - 1));
      if (bits < least || (bits == least && place >= most)) w[i] = 0.f;
    }
    __syncthreads();
  }

  // The token at which the running mass passes the share `uniform` of all of it.
  __device__ __forceinline__ void draw(double uniform, uint32_t* out) {
    uint64_t x[1] = {};
#pragma unroll
    for (int i = 0; i < PER; ++i) x[0] += mass(w[i]);
    sum(x);
    const uint64_t total = x[0], first = before(0), own = sh.ranks[turn ^ 1][0][rank];
    const uint64_t target = min((uint64_t)(uniform * total), total - 1);
    if (target < first || target - first >= own) return;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      uint64_t v = mass(w[i]);
#pragma unroll
      for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
      if (lane == 0) sh.grid[i * kTokenWarps + warp] = v;
    }
    scan();
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint64_t own = mass(w[i]);
      const uint64_t to = first + sh.grid[i * kTokenWarps + warp] + warp_upto(own);
      if (to > target && to - own <= target) *out = token(i);
    }
  }

  __device__ __forceinline__ void run(const TokenParams& p, uint32_t row) {
    const float* logits = p.logits + (int64_t)row * p.vocab;
    // Numbers that order as the logits do, and of equal ones the first token before the others.
    uint64_t best[1] = {};
#pragma unroll
    for (int i = 0; i < PER; ++i) w[i] = token(i) < p.vocab ? logits[token(i)] : -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t bits = __float_as_uint(w[i] + 0.f);  // one zero
      const uint32_t order = bits >> 31 ? ~bits : bits | 1u << 31;
      best[0] = max(best[0], w[i] < INFINITY ? (uint64_t)order << 32 | ~token(i) : kNotFinite);
    }
    combine(best, [](uint64_t a, uint64_t b) { return max(a, b); });
    const uint32_t order = (uint32_t)(best[0] >> 32), likeliest = ~(uint32_t)best[0];
    const float top = __uint_as_float(order >> 31 ? order ^ 1u << 31 : ~order);
    const TokenRow how = p.how ? p.how[row] : TokenRow{};
    const bool none = best[0] == kNotFinite || top == -INFINITY;
    if (none || how.temperature == 0.f) {
      if (rank == 0 && threadIdx.x == 0) p.tokens[row] = none ? ~0u : likeliest;
      return;
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      w[i] = expf((w[i] - top) / how.temperature);
      if (w[i] < how.min_p) w[i] = 0.f;
    }
    if (how.top_k > 0 && how.top_k < p.vocab) keep(how.top_k, [](float w) { return (uint64_t)(w > 0.f); });
    if (how.top_p < 1.f) {
      uint64_t all[1] = {};
#pragma unroll
      for (int i = 0; i < PER; ++i) all[0] += mass(w[i]);
      sum(all);
      keep(max((uint64_t)ceil((double)how.top_p * all[0]), (uint64_t)1), [](float w) { return mass(w); });
    }
    draw(how.uniform, p.tokens + row);
  }
};

template <int PER>
__global__ void __cluster_dims__(kTokenCluster, 1, 1) __launch_bounds__(kTokenThreads, 1)
    token_kernel(const TokenParams p) {
  __shared__ TokenShared<PER> sh;
  const auto cluster = cooperative_groups::this_cluster();
  wait_for_predecessor();
  launch_dependents();
  cluster.sync();  // No block is written to before it has started.
  TokenBlock<PER> block{sh, cluster, blockIdx.x % kTokenCluster, threadIdx.x % 32, threadIdx.x / 32, {}, 0};
  block.run(p, blockIdx.x / kTokenCluster);
}

}  // namespace taper
