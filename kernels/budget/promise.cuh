// The rules that turn a sample's moments into a budget: those of the CPU.
#pragma once

#include <float.h>

#include "sampled.cuh"

namespace taper {

enum Verdict : uint32_t { kSample = 0, kNoisy = 1, kGoDense = 2 };

__device__ __forceinline__ float root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x < 0 ? 0.f : x));  // NaN stays NaN.
  return y;
}
// x / y to two units in the last place, for y below 2^126.
__device__ __forceinline__ float over(float x, float y) { return __fdividef(x, y); }

// Of a head and its sample; e sums to 1, so `inverse` is 1 over the denominator. `heaviest` and
// `alignment` are chi2's alone, trace_n of the rules that it is not.
struct Moments {
  float n, b, inverse, o2, variance_d, trace_n, trace_r, alignment, heaviest;
};

// One head's verdict; `limit` draws and more are not worth while.
struct Promise {
  const SampledParams& p;
  const Moments& m;
  const float limit;

  // The draws without replacement that err as r^2 draws with it; NaN stays NaN.
  __device__ __forceinline__ float draws(float r) const {
    const float b = r * r;
    return isinf(b) ? m.n : ceilf(over(b, 1.f + over(b, m.n)));
  }
  // The 1 - delta quantile of the error's norm, from Tr(S^2) / Tr(S)^2 of its covariance S:
  // Satterthwaite's gamma, by Wilson and Hilferty.
  __device__ __forceinline__ float quantile(float alignment) const {
    const float spread = alignment * (2.f / 9.f);
    const float q = fmaxf(1 - spread + p.upper * root(spread), 0.f);
    return root(q * q * q);
  }
  // A rule's bound for the norm that errors are measured against; c is chi2's quantile.
  __device__ __forceinline__ float bound(float norm, float c, float scalar) const {
    if (p.rule == kRatio || p.rule == kChi2) {
      // The denominator's own error changes the output's to second order only: chi2 leaves it out.
      const bool chi2 = p.rule == kChi2;
      const float trace = m.trace_r * (1.f + (chi2 ? p.unseen * m.heaviest * root(m.heaviest) : 0.f));
      const float deviation = m.n * root(trace) * m.inverse;
      return draws(c * over(deviation, p.epsilon * norm) + (chi2 ? 0.f : p.rest * scalar));
    }
    const float deviation = over(m.n * root(m.trace_n) * m.inverse, norm);
    float r = INFINITY;
#pragma unroll 1
    for (int i = 0; i < 6; ++i) {
      const float x = p.split_vector[i] * deviation, y = p.split_scalar[i] * scalar;
      r = fminf(r, p.rule == kLemma ? over(2 * (x + y), p.epsilon)
                                    : over(x + (1 + p.epsilon) * y, p.epsilon));
    }
    return x_or(r, deviation);
  }
  // fminf drops NaN, which must stay.
  __device__ __forceinline__ float x_or(float r, float deviation) const {
    return deviation != deviation ? deviation : draws(r);
  }
  // By a whole warp, all of whose lanes have the same moments and get the same verdict.
  __device__ __forceinline__ Verdict verdict(int lane, float& budget) const {
    const float scalar = m.n * root(m.variance_d) * m.inverse;
    if (p.rule == kDenominator) {
      budget = draws(over(p.whole * scalar, p.epsilon));
      return budget != budget ? kGoDense : kSample;
    }
    const float trace = p.rule == kRatio || p.rule == kChi2 ? m.trace_r : m.trace_n;
    const float reach = m.n * m.inverse;
    const float left = m.o2 - reach * reach * fmaxf(trace, 0.f) * (over(1, m.b) - over(1, m.n));
    // Lane 0: by the norm with its noise, lane 1: by the norm without, lane 2: by chi2's own quantile.
    // As a function of the spread's root that is concave: least at an end.
    const bool own = lane == 2 && p.rule == kChi2;
    const float q = quantile(own ? m.alignment : 1.f);
    const float c = p.rule == kRatio ? p.most : own ? q : fminf(q, 1.f);
    const float mine = bound(root(lane == 0 ? m.o2 : left), c, scalar);
    const float first = __shfl_sync(~0u, mine, 0), at_least = __shfl_sync(~0u, mine, 1);
    budget = at_least > limit ? at_least : __shfl_sync(~0u, mine, 2);
    // Where even the norm with its noise is too small, no larger sample is asked for.
    if (!(m.o2 > 0) || isinf(m.o2) || first > limit) return kGoDense;
    if (left < kLeastSignal * m.o2) return kNoisy;
    return budget != budget ? kGoDense : kSample;
  }
};

}  // namespace taper
