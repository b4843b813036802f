// vAttention's budgets: how many keys to sample so that each head keeps its promise.
//
// begin   sizes the pilot and sends lists that no sample can help to dense attention;
// pilot   sums up the sampled keys (pilot.cuh);
// judge   turns one head's sums into a verdict, one thread block a head;
// settle  joins a group's verdicts: sample so many, draw a larger pilot, or go dense.
//
// The caller queues pilot, judge and settle (after the draw) as often as a pilot may
// grow; lists that are settled cost nothing more. No step waits for the host. The rules
// are those of the CPU, which differ from these by rounding alone.
#pragma once

#include "pilot.cuh"

namespace taper {

enum BudgetRule : int32_t { kDenominator = 0, kLemma, kTight, kRatio, kChi2 };
enum ListState : uint32_t { kActive = 0, kSampled = 1, kDense = 2 };
enum Verdict : uint32_t { kSample = 0, kNoisy = 1, kGoDense = 2 };

constexpr int kJudgeThreads = 256;
constexpr double kLeastSignal = 0.25;  // of a squared norm, once its noise is taken off

// Keys that a list reads exactly. Its blocks are ascending, its parts disjoint.
__device__ __forceinline__ uint32_t fixed_keys(const WorkList& w, const uint32_t* block_ids) {
  uint32_t n = w.token_count + w.block_count * kBlock;
#pragma unroll
  for (int r = 0; r < 2; ++r) n += w.end[r] > w.begin[r] ? w.end[r] - w.begin[r] : 0;
  if (w.block_count > 0) {
    const uint32_t end = (block_ids[(uint64_t)w.block_first + w.block_count - 1] + 1) * kBlock;
    if (end > w.len) n -= end - w.len;
  }
  return n;
}
__device__ __forceinline__ double sample_limit(const BudgetParams& p, uint32_t n, uint32_t fixed) {
  return fmin(p.dense_share * n, (double)n) - fixed;
}

__device__ __forceinline__ void go_dense(const BudgetParams& p, int list) {
  const int group = p.q_heads / p.kv_heads;
  WorkList w{};
  w.len = p.fixed[list].len;
  w.end[0] = w.len;
  p.sampled[list] = w;
  p.state[list] = kDense;
  for (int g = 0; g < group; ++g) {
    p.base_lse[(int64_t)list * group + g] = -INFINITY;  // The dense pass reads all again.
    p.head_counts[(int64_t)list * group + g] = 0;
    p.head_ln_weight[(int64_t)list * group + g] = 0.f;
  }
}

__global__ void budget_begin_kernel(const BudgetParams p) {
  const int list = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_predecessor();
  launch_dependents();
  if (list >= p.rows * p.kv_heads) return;
  const WorkList w = p.fixed[list];
  const uint32_t fixed = fixed_keys(w, p.block_ids), residual = w.len - fixed;
  const uint32_t share = (uint32_t)ceil(p.pilot_share * residual);
  const uint32_t pilot = max(max((uint32_t)p.pilot_tokens, 2u), share);
  p.residual[list] = residual;
  p.wants[list] = pilot;
  p.state[list] = kActive;
  if (residual <= pilot || pilot >= sample_limit(p, w.len, fixed) || pilot > (uint32_t)p.capacity)
    go_dense(p, list);
}

__device__ __forceinline__ double block_sum(double x, double* scratch) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kJudgeThreads / 32; ++w) sum += scratch[w];
  return sum;
}

__device__ __forceinline__ double root(double variance) {
  return variance < 0 ? 0.0 : sqrt(variance);  // NaN stays NaN.
}
__device__ __forceinline__ double without_replacement(double r, double n) {
  const double b = r * r;
  return isinf(b) ? n : ceil(b / (1.0 + b / n));
}
// A norm with the sample's noise taken off its square.
__device__ __forceinline__ Verdict signal(double norm2, double trace, double residual, double drawn,
                                          double scale, double& norm) {
  if (!(norm2 > 0) || isinf(norm2)) return kGoDense;
  const double noise =
      residual * residual * fmax(trace, 0.0) * (1.0 / drawn - 1.0 / residual) / (scale * scale);
  const double left = norm2 - noise;
  norm = sqrt(left);
  return left < kLeastSignal * norm2 ? kNoisy : kSample;
}

// Trace of the squared sample covariance of e (v - o) over the first keys of the sample.
template <class T, int D>
__device__ double covariance_trace2(const BudgetParams& p, int list, int g, float top,
                                    const float* output, uint32_t drawn, float (*rows)[D + 1],
                                    double* scratch) {
  const int tid = threadIdx.x, group = p.q_heads / p.kv_heads;
  const int keys = min(drawn, (uint32_t)kCovarianceKeys);
  __shared__ float weight[kCovarianceKeys];
  __shared__ int64_t at[kCovarianceKeys];
  if (tid < kCovarianceKeys) {
    const int key = min(tid, keys - 1);
    const float score = p.scores[((int64_t)list * kCovarianceKeys + key) * group + g];
    weight[tid] = tid < keys ? expf(score - top) : 0.f;
    at[tid] = sampled_row(p, list, key) * D;
  }
  __syncthreads();
#pragma unroll
  for (int i = tid; i < kCovarianceKeys * (D / 8); i += kJudgeThreads) {
    const int key = i / (D / 8), dim = i % (D / 8) * 8;
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.v) + at[key] + dim);
    const T* v = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      rows[key][dim + j] = key < keys ? weight[key] * (to_float(v[j]) - output[dim + j]) : 0.f;
  }
  __syncthreads();
  if (tid < D) {
    float mean = 0.f;
#pragma unroll 8
    for (int k = 0; k < kCovarianceKeys; ++k) mean += rows[k][tid];  // 0 beyond `keys`
    mean /= keys;
#pragma unroll 8
    for (int k = 0; k < kCovarianceKeys; ++k) rows[k][tid] -= k < keys ? mean : 0.f;
  }
  __syncthreads();
  constexpr int kSide = kCovarianceKeys / 16;  // 16 x 16 threads, 6 x 6 products each
  const int a = tid / 16, b = tid % 16;
  float dot[kSide][kSide] = {};
  for (int k = 0; k < D; ++k) {
    float x[kSide], y[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) x[i] = rows[a + 16 * i][k], y[i] = rows[b + 16 * i][k];
#pragma unroll
    for (int i = 0; i < kSide; ++i)
#pragma unroll
      for (int j = 0; j < kSide; ++j) dot[i][j] += x[i] * y[j];
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kSide; ++i)
#pragma unroll
    for (int j = 0; j < kSide; ++j) sum += (double)dot[i][j] * dot[i][j];
  return block_sum(sum, scratch) / ((keys - 1.0) * (keys - 1.0));
}

template <class T, int D>
__global__ void __launch_bounds__(kJudgeThreads) budget_judge_kernel(const BudgetParams p) {
  extern __shared__ float dynamic[];
  auto* cov_rows = reinterpret_cast<float(*)[D + 1]>(dynamic);
  __shared__ float output[D];
  __shared__ double scratch[kJudgeThreads / 32];
  const int group = p.q_heads / p.kv_heads, list = blockIdx.x / group, g = blockIdx.x % group;
  const int tid = threadIdx.x;
  wait_for_predecessor();
  launch_dependents();
  if (p.state[list] != kActive) return;
  const uint32_t drawn = p.wants[list];
  const double n = p.residual[list], b = drawn;
  const float known_lse = p.fixed_lse[(int64_t)list * group + g];
  const PilotPart<D>* parts = static_cast<const PilotPart<D>*>(p.parts);

  __shared__ float share[kPilotSplits], joint_top;
  __shared__ double joint[4];
  parts += (int64_t)list * kPilotSplits * group + g;
  if (tid < kPilotSplits) {  // One lane a part.
    const PilotPart<D>& part = parts[tid * group];
    float top = fmaxf(part.top, known_lse);
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const double f = part.top == -INFINITY ? 0.0 : exp((double)part.top - top);
    double x[3] = {f * part.e, f * f * part.e2, f * f * part.e2v2};
#pragma unroll
    for (int i = 0; i < 3; ++i)
#pragma unroll
      for (int d = 16; d; d /= 2) x[i] += __shfl_xor_sync(~0u, x[i], d);
    share[tid] = (float)f;
    if (tid == 0) {
      joint_top = top;
      joint[0] = x[0], joint[1] = x[1], joint[2] = x[2];
      joint[3] = known_lse == -INFINITY ? 0.0 : exp((double)known_lse - top);
    }
  }
  __syncthreads();
  const float top = joint_top;
  const double e = joint[0], e2 = joint[1], e2v2 = joint[2], known_sum = joint[3];
  float ev = 0.f, e2v = 0.f;
  if (tid < D) {
#pragma unroll 8
    for (int s = 0; s < kPilotSplits; ++s) {
      const float f = share[s];
      ev += f * parts[s * group].ev[tid];
      e2v += f * f * parts[s * group].e2v[tid];
    }
  }
  const double scale = n / b, denominator = known_sum + scale * e;
  double out = 0;
  if (tid < D) {
    const double known = p.fixed_o[((int64_t)list * group + g) * D + tid] * known_sum;
    out = (known + scale * ev) / denominator;
    output[tid] = (float)out;
  }
  const bool in = tid < D;
  const double o2 = block_sum(in ? out * out : 0, scratch);
  const double off = ev - out * e;
  const double centred = block_sum(in ? off * off : 0, scratch);
  const double ob = block_sum(in ? out * e2v : 0, scratch);
  const double a2 = block_sum(in ? (double)ev * ev : 0, scratch);
  const double variance_d = (e2 - e * e / b) / (b - 1);
  const double trace_n = (e2v2 - a2 / b) / (b - 1);
  const double trace_r = (e2v2 - 2 * ob + o2 * e2 - centred / b) / (b - 1);

  const double scalar = n * root(variance_d) / denominator;
  double r = 0, norm = 0;
  Verdict verdict = kSample;
  if (p.rule == kDenominator) {
    r = p.whole * scalar / p.epsilon;
  } else if (p.rule == kLemma || p.rule == kTight) {
    verdict = signal(o2 * denominator * denominator, trace_n, n, b, 1.0, norm);
    const double vector = n * root(trace_n) / norm;
    r = INFINITY;
    for (int i = 0; i < 6; ++i)
      r = fmin(r, p.rule == kLemma
                      ? (p.split_vector[i] * vector + p.split_scalar[i] * scalar) / (p.epsilon / 2)
                      : (p.split_vector[i] * vector + (1 + p.epsilon) * p.split_scalar[i] * scalar) /
                            p.epsilon);
  } else {
    verdict = signal(o2, trace_r, n, b, denominator, norm);
    const double vector = n * root(trace_r) / (p.epsilon * denominator * norm);
    double c = p.most;
    if (p.rule == kChi2 && verdict == kSample) {
      // The 1 - 0.9 delta quantile of the error's norm: Satterthwaite's gamma, by Wilson
      // and Hilferty.
      const double trace2 =
          covariance_trace2<T, D>(p, list, g, top, output, drawn, cov_rows, scratch);
      const double spread = trace_r > 0 ? 2 * trace2 / (9 * trace_r * trace_r) : 0;
      const double q = fmax(1 - spread + p.upper * sqrt(spread), 0.0);
      c = sqrt(q * q * q);
    }
    r = c * vector + p.rest * scalar;
  }
  if (tid == 0) {
    if (verdict == kSample && r != r) verdict = kGoDense;
    p.verdicts[(int64_t)list * group + g] = verdict;
    p.budgets[(int64_t)list * group + g] = verdict == kSample ? without_replacement(r, n) : 0.0;
  }
}

__global__ void budget_settle_kernel(const BudgetParams p) {
  const int list = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_predecessor();
  launch_dependents();
  if (list >= p.rows * p.kv_heads || p.state[list] != kActive) return;
  const int group = p.q_heads / p.kv_heads;
  const WorkList w = p.fixed[list];
  const double limit = sample_limit(p, w.len, fixed_keys(w, p.block_ids));
  const uint32_t want = p.wants[list], residual = p.residual[list];
  Verdict verdict = kSample;
  uint32_t most = want;
  for (int g = 0; g < group && verdict == kSample; ++g) {
    verdict = static_cast<Verdict>(p.verdicts[(int64_t)list * group + g]);
    const double b = p.budgets[(int64_t)list * group + g];
    if (verdict == kSample && b >= limit) verdict = kGoDense;
    if (verdict == kSample) most = max(most, min((uint32_t)b, residual));
  }
  if (verdict == kNoisy && !p.last_round && 4.0 * want < limit && 4 * want <= (uint32_t)p.capacity) {
    p.wants[list] = 4 * want;
    return;
  }
  if (verdict != kSample || most >= limit || most > (uint32_t)p.capacity) {
    go_dense(p, list);
    return;
  }
  for (int g = 0; g < group; ++g) {
    const int64_t at = (int64_t)list * group + g;
    const uint32_t count = min(max((uint32_t)p.budgets[at], want), residual);
    p.head_counts[at] = count;
    p.head_ln_weight[at] = (float)log((double)residual / count);
    p.base_lse[at] = p.fixed_lse[at];
  }
  WorkList s{};
  s.len = w.len;
  s.sample_first = list * p.capacity;
  s.sample_count = most;
  p.sampled[list] = s;
  p.wants[list] = most;
  p.state[list] = kSampled;
}

}  // namespace taper
