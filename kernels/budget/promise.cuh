// The rules that turn a sample's moments into a budget: those of the CPU.
#pragma once

#include <float.h>

#include "sampled.cuh"

namespace taper {

enum Verdict : uint32_t { kSample = 0, kNoisy = 1, kGoDense = 2 };

__device__ __forceinline__ float root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x < 0 ? 0.f : x));  // NaN stays NaN.
  return y;
}
// x / y to two units in the last place, for y below 2^126. What is below 2^-126 is 0: to make more of it would cost as much as
// the division.
__device__ __forceinline__ float over(float x, float y) {
  float z;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

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

  // The draws without replacement that err as so many with it; NaN stays NaN.
  __device__ __forceinline__ float draws(float b) const {
    return isinf(b) ? m.n : ceilf(over(b, 1.f + over(b, m.n)));
  }
  // The square of the 1 - delta quantile of the error's norm, from Tr(S^2) / Tr(S)^2 of its covariance S:
  // Satterthwaite's gamma, by Wilson and Hilferty.
  __device__ __forceinline__ float quantile2(float alignment) const {
    const float spread = alignment * (2.f / 9.f);
    const float q = fmaxf(1 - spread + p.upper * root(spread), 0.f);
    return q * q * q;
  }
  // Of a squared norm what is left once its noise is taken off.
  __device__ __forceinline__ float signal(float trace) const {
    const float reach = m.n * m.inverse;
    return m.o2 - reach * reach * fmaxf(trace, 0.f) * (over(1.f, m.b) - over(1.f, m.n));
  }
  // By budgets from the squared norm with its noise and from that without: at least so many, and so many.
  __device__ __forceinline__ Verdict judged(float left, float first, float at_least, float asked, float& budget) const {
    budget = at_least > limit ? at_least : asked;
    // Where even the norm with its noise is too small, no larger sample is asked for. Squares beyond these would be lost.
    if (!(m.o2 >= 0x1p-80f && m.o2 < 0x1p120f) || first > limit) return kGoDense;
    if (left < kLeastSignal * m.o2) return kNoisy;
    return budget != budget ? kGoDense : kSample;
  }
  // By squares, whose roots nobody needs. The denominator's own error changes the output's to second order only: it is left out.
  __device__ __forceinline__ Verdict chi2(int lane, float& budget) const {
    const float left = signal(m.trace_r), reach = over(m.n * m.inverse, p.epsilon);
    // Of four lanes the first: by the norm with its noise, the second: by the norm without, the third: by its own quantile.
    // As a function of the spread's root that is concave: least at an end.
    const bool own = lane % 4 == 2;
    const float q = quantile2(own ? m.alignment : 1.f), c = own ? q : fminf(q, 1.f);
    const float trace = m.trace_r * (1.f + p.unseen * m.heaviest * root(m.heaviest)), norm = lane % 4 == 0 ? m.o2 : left;
    // NaN stays NaN.
    const float mine = draws(c * reach * reach * over(trace < 0.f ? 0.f : trace, norm < 0.f ? 0.f : norm));
    return judged(left, __shfl_sync(~0u, mine, 0, 4), __shfl_sync(~0u, mine, 1, 4), __shfl_sync(~0u, mine, 2, 4), budget);
  }
  // A rule's bound for the norm that errors are measured against.
  __device__ __forceinline__ float bound(float norm, float scalar) const {
    if (p.rule == kRatio) {
      const float r = p.most * over(m.n * root(m.trace_r) * m.inverse, p.epsilon * norm) + p.rest * scalar;
      return draws(r * r);
    }
    const float deviation = over(m.n * root(m.trace_n) * m.inverse, norm);
    float r = INFINITY;
#pragma unroll 1
    for (int i = 0; i < 6; ++i) {
      const float x = p.split_vector[i] * deviation, y = p.split_scalar[i] * scalar;
      r = fminf(r, p.rule == kLemma ? over(2 * (x + y), p.epsilon)
                                    : over(x + (1 + p.epsilon) * y, p.epsilon));
    }
    // fminf drops NaN, which must stay.
    return deviation != deviation ? deviation : draws(r * r);
  }
  // By four lanes side by side, which have the same moments and get the same verdict; the whole warp calls this.
  __device__ __forceinline__ Verdict verdict(int lane, float& budget) const {
    if (p.rule == kChi2) return chi2(lane, budget);
    const float scalar = m.n * root(m.variance_d) * m.inverse;
    if (p.rule == kDenominator) {
      const float r = over(p.whole * scalar, p.epsilon);
      budget = draws(r * r);
      return budget != budget ? kGoDense : kSample;
    }
    const float left = signal(p.rule == kRatio ? m.trace_r : m.trace_n);
    const float mine = bound(root(lane % 4 == 0 ? m.o2 : left), scalar);
    const float first = __shfl_sync(~0u, mine, 0, 4), asked = __shfl_sync(~0u, mine, 1, 4);
    return judged(left, first, asked, asked, budget);
  }
};

}  // namespace taper
