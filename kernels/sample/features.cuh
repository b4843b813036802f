// Queries of which only some features are left: the draws of the CPU, in its arithmetic.
//
// Source: S2ANTA, the section on Bernoulli sampling of the query.
#pragma once

#include "../common/launch.cuh"
#include "../common/philox.cuh"
#include "../common/ptx.cuh"

namespace taper {

using FeaturesParams = TaperFeaturesParams;

constexpr uint32_t kFeatureDraws = 0x42450000u;  // words of a head's draws

// x^n for n of at least 1, by the products of the CPU's library.
__device__ __forceinline__ float power(float x, int n) {
  float product = 1.f;
  for (;; x = __fmul_rn(x, x)) {
    if (n & 1) product = __fmul_rn(product, x);
    n /= 2;
    if (n == 0) return product;
  }
}

// A thread block takes the heads that keep one set of features, a thread one feature of them.
__global__ void features_kernel(const FeaturesParams p) {
  __shared__ float warps[32];
  wait_for_predecessor();
  launch_dependents();
  const int d = p.head_dim, c = threadIdx.x, heads = p.group > 0 ? p.group : 1;
  const int units = p.q_heads / heads, row = blockIdx.x / units, first = blockIdx.x % units * heads;
  const int64_t at = ((int64_t)row * p.q_heads + first) * d + c;
  float sum = 0.f;
  for (int h = 0; h < heads; ++h) sum = __fadd_rn(sum, fabsf(p.q[at + (int64_t)h * d]));
  const float size = __fdiv_rn(sum, (float)heads);
  float most = size;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  if ((c & 31) == 0) warps[c >> 5] = most;
  const bool some = __syncthreads_or(!isfinite(size));
  for (int w = 0; w < d / 32; ++w) most = fmaxf(most, warps[w]);
  // A query that is no number is left as it was, for its error to show; so is one of zeros.
  const bool kept = some || !(most > 0.f);
  const float chance = __fdiv_rn(size, most);
  const Stream stream{p.seeds[row], (uint32_t)p.layer, (uint32_t)first, p.positions[row]};
  int hits = 0;
  for (int b = 0; b < p.draws && !kept; ++b)
    hits += (float)(stream.words(kFeatureDraws + b * d + c).x >> 8) * (1.f / (1 << 24)) < chance;
  for (int h = 0; h < heads; ++h) {
    const int64_t i = at + (int64_t)h * d;
    const float x = p.q[i];
    if (kept) p.out[i] = x;
    else if (p.group == 0)
      p.out[i] = __fdiv_rn(__fmul_rn(__fmul_rn(copysignf(1.f, x), most), (float)hits), (float)p.draws);
    else p.out[i] = hits == 0 ? 0.f : __fdiv_rn(x, __fsub_rn(1.f, power(__fsub_rn(1.f, chance), p.draws)));
  }
}

}  // namespace taper
