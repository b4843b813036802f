// What a few rows of queries or keys go through before they are compared with something learned: the rotary embedding
// taken off, layers of a perceptron for each head, products with a head's centroids, some of their channels. All but the
// channels in fp32, as on the CPU, but that weights may be kept in bf16. A row's results do not depend on the rows beside it.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "sums.cuh"

namespace taper {

using RowsParams = TaperRowsParams;
using ProjectParams = TaperProjectParams;
using ChannelsParams = TaperChannelsParams;

constexpr int kProjectWarps = 8, kStagedBytes = 32 * 1024;

// What an element was before the rotary embedding; `sin` is the negative of it for one of the second half.
__device__ __forceinline__ float turned_back(float x, float other, float cos, float sin) { return fmaf(other, sin, x * cos); }

// A thread takes two elements that rotate into one another.
template <class T>
__global__ void __launch_bounds__(256) rows_kernel(const RowsParams p) {
  const int half = p.width / 2;
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  launch_dependents();
  wait_for_predecessor();
  if (i >= (int64_t)p.tokens * p.heads * half) return;
  const int at = (int)(i % half), head = (int)(i / half % p.heads);
  const int64_t token = i / half / p.heads;
  int64_t row = token * p.heads + head;
  bool none = false;
  if (p.slots) {
    const uint32_t slot = p.slots[token];
    none = slot == UINT32_MAX;
    row = ((int64_t)(slot / kBlock) * p.heads + head) * kBlock + slot % kBlock;
  }
  const T* from = static_cast<const T*>(p.x) + row * p.width;
  float a = 0.f, b = 0.f;
  if (none) {
  } else if constexpr (std::is_same_v<T, float>) {
    a = from[at];
    b = from[at + half];
  } else {
    a = to_float(from[at]);
    b = to_float(from[at + half]);
  }
  if (p.cos) {
    const float cos = p.cos[token * half + at], sin = p.sin[token * half + at], before = a;
    a = turned_back(a, b, cos, sin);
    b = turned_back(b, before, cos, -sin);
  }
  float* to = p.out + (token * p.heads + head) * p.width;
  to[at] = a;
  to[at + half] = b;
}

__device__ __forceinline__ float activated(float x, int which) {
  if (which == TAPER_RELU) return fmaxf(x, 0.0f);
  return which == TAPER_SILU ? x / (1.0f + expf(-x)) : x;
}

// The row of x from element `from` on to shared memory by a warp, as fp32 and, where there are `cos` and `sin`, turned back.
__device__ __forceinline__ void stage_row(const ProjectParams& p, uint32_t from, int64_t turn, float* to) {
  auto at = [&](int i) {
    if (p.x_f32) return static_cast<const float*>(p.x)[from + i];
    const uint16_t bits = static_cast<const uint16_t*>(p.x)[from + i];
    return p.dtype == kBf16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__ushort_as_half(bits));
  };
  const int lane = threadIdx.x % 32, half = p.inputs / 2;
  if (p.cos == nullptr && p.x_f32 && p.inputs % 4 == 0) {
    const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + from);
#pragma unroll 4
    for (int i = lane; i < p.inputs / 4; i += 32) reinterpret_cast<float4*>(to)[i] = x[i];
    return;
  }
  if (p.cos == nullptr) {
#pragma unroll 4
    for (int i = lane; i < p.inputs; i += 32) to[i] = at(i);
    return;
  }
#pragma unroll 2
  for (int i = lane; i < half; i += 32) {
    const float a = at(i), b = at(i + half), cos = p.cos[turn + i], sin = p.sin[turn + i];
    to[i] = turned_back(a, b, cos, sin);
    to[i + half] = turned_back(b, a, cos, -sin);
  }
}

// Calls f(start, end, x) for R of a map's rows at a time, if this warp works; they are in shared memory, the first at x, p.staged
// of them at a time. All threads call it.
template <int R, class F>
__device__ __forceinline__ void for_rows(const ProjectParams& p, int map, bool works, F f) {
  extern __shared__ __align__(16) float staged[];
  const int per = p.heads / p.maps, shared = p.heads / p.x_heads, count = p.rows * per;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += p.staged) {
    const int end = min(begin + p.staged, count);
    __syncthreads();  // The rows before may still be read.
#pragma unroll 1
    for (int n = begin + threadIdx.x / 32; n < end; n += kProjectWarps) {
      const int row = n / per, head = (map * per + n % per) / shared;
      stage_row(p, (uint32_t)(row * p.x_heads + head) * p.inputs, (int64_t)row * (p.inputs / 2), staged + (n - begin) * p.inputs);
    }
    __syncthreads();
#pragma unroll 1
    for (int start = begin; start < end && works; start += R) f(start, end, staged + (start - begin) * p.inputs);
  }
}

// A warp takes O outputs of one map for all of its heads' rows, R at a time, its lanes an input in 32 each. Sums do
// not depend on either.
template <int R, int O>
__global__ void __launch_bounds__(kProjectWarps * 32) project_kernel(const ProjectParams p) {
  constexpr int kSums = O * R, kLane = kSums > 32 ? kSums / 32 : 1, kLanes = kSums / kLane;
  const int lane = threadIdx.x % 32, map = blockIdx.y, per = p.heads / p.maps;
  const int first = (blockIdx.x * kProjectWarps + threadIdx.x / 32) * O;
  const float* weight = static_cast<const float*>(p.weight) + (int64_t)map * p.outputs * p.inputs;
  const int64_t begin = (int64_t)first * p.inputs, end = (int64_t)p.outputs * p.inputs;
  // Weights are nobody's output: they come while the launch before goes on.
  for (int64_t i = begin + lane * 32; i < begin + O * p.inputs && i < end; i += 32 * 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + i));
  // This lane's sums: of outputs of a row side by side.
  const int own = lane / (32 / kLanes) * kLane;
  float bias[kLane];
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const int output = first + (own + i) % O;
    bias[i] = p.bias && output < p.outputs ? p.bias[map * p.outputs + output] : 0.0f;
  }
  launch_dependents();
  if (!p.fresh) wait_for_predecessor();
  const float* w[O];
#pragma unroll
  for (int o = 0; o < O; ++o) w[o] = weight + (int64_t)min(first + o, p.outputs - 1) * p.inputs;
  for_rows<R>(p, map, first < p.outputs, [&](int start, int count, const float* x) {
    int at[R];
#pragma unroll
    for (int r = 0; r < R; ++r) at[r] = min(r, count - 1 - start) * p.inputs;
    float sums[kSums] = {};
    // Weights come from further away than rows: the next ones are asked for before these are used.
    float weights[O], next[O];
    auto ask = [&](int i, float(&to)[O]) {
#pragma unroll
      for (int o = 0; o < O; ++o) to[o] = i < p.inputs ? w[o][i] : 0.0f;
    };
    ask(lane, next);
#pragma unroll(O * R > 64 ? 1 : 4)
    for (int i = lane; i < p.inputs; i += 32) {
#pragma unroll
      for (int o = 0; o < O; ++o) weights[o] = next[o];
      ask(i + 32, next);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float of = x[at[r] + i];
#pragma unroll
        for (int o = 0; o < O; ++o) sums[r * O + o] = fmaf(weights[o], of, sums[r * O + o]);
      }
    }
    warp_sums(sums);
    if (lane % (32 / kLanes) > 0) return;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int n = start + (own + i) / O, output = first + (own + i) % O;
      if (n >= count || output >= p.outputs) continue;
      const float y = activated(fmaf(sums[i], p.scale, bias[i]), p.activation);
      const int64_t at = ((int64_t)(n / per) * p.heads + map * per + n % per) * p.outputs + output;
      if (p.bf16)
        static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16(y);
      else
        static_cast<float*>(p.out)[at] = y;
    }
  });
  if (p.fresh) wait_for_predecessor();  // Who waits for this launch has waited for that one too.
}

constexpr int kHeldInputs = 512;  // whose weights in bf16 a warp holds

// The same of weights in bf16 and inputs in eights: a warp has eight outputs, a lane eight inputs in 256 each, and holds
// its weights before it waits.
__global__ void __launch_bounds__(kProjectWarps * 32, 2) project_short_kernel(const ProjectParams p) {
  constexpr int O = 8, R = 2, kHeld = kHeldInputs / 256;
  const int lane = threadIdx.x % 32, map = blockIdx.y, per = p.heads / p.maps;
  const int first = (blockIdx.x * kProjectWarps + threadIdx.x / 32) * O;
  const __nv_bfloat16* weight = static_cast<const __nv_bfloat16*>(p.weight) + (int64_t)map * p.outputs * p.inputs;
  uint4 w[kHeld][O];
  auto hold = [&](int from) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
#pragma unroll
      for (int o = 0; o < O; ++o) {
        const int i = from + 256 * h + 8 * lane;
        w[h][o] = i < p.inputs
                      ? *reinterpret_cast<const uint4*>(weight + (int64_t)min(first + o, p.outputs - 1) * p.inputs + i)
                      : make_uint4(0, 0, 0, 0);
      }
  };
  hold(0);
  // The sum of two lanes: of output lane / 2 % 8 of row lane / 16.
  const int output = first + lane / 2 % O;
  const float bias = p.bias && output < p.outputs ? p.bias[map * p.outputs + output] : 0.0f;
  launch_dependents();
  if (!p.fresh) wait_for_predecessor();
  for_rows<R>(p, map, first < p.outputs, [&](int start, int count, const float* x) {
    float sums[R * O] = {};
#pragma unroll 1
    for (int from = 0; from < p.inputs; from += kHeldInputs) {
      if (p.inputs > kHeldInputs) hold(from);
      // As fp32 they would need twice the registers.
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
#pragma unroll
        for (int o = 0; o < O; ++o)
          asm volatile("" : "+r"(w[h][o].x), "+r"(w[h][o].y), "+r"(w[h][o].z), "+r"(w[h][o].w));
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float* line = x + min(r, count - 1 - start) * p.inputs;
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
          // Beyond the inputs weights are 0, so that infinite inputs come to NaN.
          const int i = min(from + 256 * h + 8 * lane, p.inputs - 8);
          const float4 a = reinterpret_cast<const float4*>(line + i)[0], b = reinterpret_cast<const float4*>(line + i)[1];
          const float of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int o = 0; o < O; ++o) {
            const uint32_t words[4] = {w[h][o].x, w[h][o].y, w[h][o].z, w[h][o].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              sums[r * O + o] = fmaf(__uint_as_float(words[k] << 16), of[2 * k], sums[r * O + o]);
              sums[r * O + o] = fmaf(__uint_as_float(words[k] & 0xFFFF0000u), of[2 * k + 1], sums[r * O + o]);
            }
          }
        }
      }
    }
    warp_sums(sums);
    const int n = start + lane / 16;
    if (lane % 2 > 0 || n >= count || output >= p.outputs) return;
    const float y = activated(fmaf(sums[0], p.scale, bias), p.activation);
    const int64_t at = ((int64_t)(n / per) * p.heads + map * per + n % per) * p.outputs + output;
    if (p.bf16)
      static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16(y);
    else
      static_cast<float*>(p.out)[at] = y;
  });
  if (p.fresh) wait_for_predecessor();
}

__global__ void __launch_bounds__(256) channels_kernel(const ChannelsParams p) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  launch_dependents();
  wait_for_predecessor();
  if (i >= (int64_t)p.rows * p.q_heads * p.width) return;
  const int64_t head = i / p.width;
  const int kv_head = (int)(head % p.q_heads) / (p.q_heads / p.kv_heads);
  const uint32_t channel = p.channels[kv_head * p.width + i % p.width];
  static_cast<uint16_t*>(p.out)[i] = static_cast<const uint16_t*>(p.q)[head * p.head_dim + channel];
}

}  // namespace taper
