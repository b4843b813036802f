// What a few rows of queries or keys go through before they are compared with something learned: the rotary embedding
// taken off, layers of a perceptron for each head, products with a head's centroids, some of their channels. All but the
// channels in fp32, as on the CPU, but that weights may be kept in bf16. A row's results do not depend on the rows beside it.
#pragma once

#include "../common/eight.cuh"
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

// Input i of the row of x that begins at element `from`, as fp32 and, where there are `cos` and `sin`, turned back.
__device__ __forceinline__ float input_of(const ProjectParams& p, uint32_t from, int64_t turn, int i) {
  auto at = [&](int i) {
    if (p.x_f32) return static_cast<const float*>(p.x)[from + i];
    const uint16_t bits = static_cast<const uint16_t*>(p.x)[from + i];
    return p.dtype == kBf16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__ushort_as_half(bits));
  };
  if (p.cos == nullptr) return at(i);
  const int half = p.inputs / 2;
  const bool second = i >= half;
  const int other = second ? i - half : i + half, angle = second ? other : i;
  const float sin = p.sin[turn + angle];
  return turned_back(at(i), at(other), p.cos[turn + angle], second ? -sin : sin);
}

// The n-th of a map's rows: where it begins in x, where in the turns, and where in the output.
struct ProjectRow {
  uint32_t from;
  int64_t turn, to;
  __device__ __forceinline__ ProjectRow(const ProjectParams& p, int map, int n) {
    const int per = p.heads / p.maps, row = n / per, head = map * per + n % per;
    from = (uint32_t)(row * p.x_heads + head / (p.heads / p.x_heads)) * p.inputs;
    turn = (int64_t)row * (p.inputs / 2);
    to = ((int64_t)row * p.heads + head) * p.outputs;
  }
};
__device__ __forceinline__ void put_out(const ProjectParams& p, int64_t at, float sum, float bias) {
  const float y = activated(fmaf(sum, p.scale, bias), p.activation);
  if (p.bf16)
    static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16(y);
  else
    static_cast<float*>(p.out)[at] = y;
}

// A row to shared memory by a warp.
__device__ __forceinline__ void stage_row(const ProjectParams& p, const ProjectRow& row, float* to) {
  const int lane = threadIdx.x % 32;
  if (p.cos == nullptr && p.x_f32 && p.inputs % 4 == 0) {
    const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + row.from);
#pragma unroll 4
    for (int i = lane; i < p.inputs / 4; i += 32) reinterpret_cast<float4*>(to)[i] = x[i];
    return;
  }
#pragma unroll 4
  for (int i = lane; i < p.inputs; i += 32) to[i] = input_of(p, row.from, row.turn, i);
}

// Calls f(start, end, x) for R of a map's rows at a time, if this warp works; they are in shared memory, the first at x, p.staged
// of them at a time. All threads call it.
template <int R, class F>
__device__ __forceinline__ void for_rows(const ProjectParams& p, int map, bool works, F f) {
  extern __shared__ __align__(16) float staged[];
  const int count = p.rows * (p.heads / p.maps);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += p.staged) {
    const int end = min(begin + p.staged, count);
    __syncthreads();  // The rows before may still be read.
#pragma unroll 1
    for (int n = begin + threadIdx.x / 32; n < end; n += kProjectWarps)
      stage_row(p, ProjectRow(p, map, n), staged + (n - begin) * p.inputs);
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
  const int lane = threadIdx.x % 32, map = blockIdx.y;
  const int first = (blockIdx.x * kProjectWarps + threadIdx.x / 32) * O;
  const float* weight = static_cast<const float*>(p.weight) + (int64_t)map * p.outputs * p.inputs;
  const int64_t begin = (int64_t)first * p.inputs, end = (int64_t)p.outputs * p.inputs;
  // Weights are nobody's output: they come while the launch before goes on.
  for (int64_t i = begin + lane * 32; i < begin + O * p.inputs && i < end; i += 32 * 32)
    prefetch_l2(weight + i);
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
      if (n < count && output < p.outputs) put_out(p, ProjectRow(p, map, n).to + output, sums[i], bias[i]);
    }
  });
  if (p.fresh) wait_for_predecessor();  // Who waits for this launch has waited for that one too.
}

// The same of weights in bf16 and inputs in eights, as matrix products. What is fp32 is three parts in bf16, so that products are
// exact and only sums round. A thread block has sixty-four outputs: it asks for their weights of so many inputs before it waits,
// and they stay in shared memory. Four warps share thirty-two of them, by turns thirty-two inputs each, whose order within a
// product is one in which a lane's inputs lie side by side. Columns are rows of x.
constexpr int kParts = 3, kColumns = 8, kHeldInputs = 512, kShortOutputs = 64;
static_assert(kProjectWarps == 8);

// Elements from one line in shared memory to the next, so that lanes' loads fall on all banks.
__host__ __device__ inline int short_pitch(int inputs) {
  return ((inputs < kHeldInputs ? inputs : kHeldInputs) + 63) / 64 * 64 + 32;
}
constexpr int kSumPitch = kShortOutputs + 4, kShortSums = 4 * kColumns * kSumPitch * 4;  // bytes of warps' sums, where rows were
inline size_t short_bytes(int inputs) {
  const int rows = kParts * kColumns * short_pitch(inputs) * 2;
  return kShortOutputs * short_pitch(inputs) * 2 + (rows > kShortSums ? rows : kShortSums);
}

// The next part of two numbers, which it is taken off.
__device__ __forceinline__ uint32_t next_part(float& x, float& y) {
  const uint32_t pair = pack2<__nv_bfloat16>(x, y);
  x -= __uint_as_float(pair << 16);
  y -= __uint_as_float(pair & 0xFFFF0000u);
  return pair;
}
// Inputs of a row from `from` on to shared memory by two warps, zeros from the last on: `width` in all, a multiple of eight. The
// parts lie `part` elements from one another.
__device__ __forceinline__ void stage_parts(const ProjectParams& p, const ProjectRow& row, int from, int width, uint16_t* to,
                                            int part) {
  const int lane = threadIdx.x % 64;
  if (p.x_f32 && p.cos == nullptr) {
    for (int at = 8 * lane; at < width; at += 8 * 64) {
      float x[8] = {};
      if (from + at < p.inputs) load8(static_cast<const float*>(p.x) + row.from + from + at, x);
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        uint4 words;
#pragma unroll
        for (int j = 0; j < 4; ++j) (&words.x)[j] = next_part(x[2 * j], x[2 * j + 1]);
        *reinterpret_cast<uint4*>(to + k * part + at) = words;
      }
    }
    return;
  }
#pragma unroll 2
  for (int at = lane; at < width; at += 64) {
    float x = from + at < p.inputs ? input_of(p, row.from, row.turn, from + at) : 0.0f, none = 0.0f;
#pragma unroll
    for (int k = 0; k < kParts; ++k) to[k * part + at] = (uint16_t)next_part(x, none);
  }
}

__global__ void __launch_bounds__(kProjectWarps * 32, 3) project_short_kernel(const ProjectParams p) {
  launch_dependents();
  extern __shared__ __align__(16) uint16_t weights[];  // [kShortOutputs][pitch], and behind them rows [kParts][kColumns][pitch]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = warp % 4, tile = warp / 4, map = blockIdx.y;
  const int first = blockIdx.x * kShortOutputs, count = p.rows * (p.heads / p.maps), pitch = short_pitch(p.inputs);
  uint16_t* rows = weights + kShortOutputs * pitch;
  const uint16_t* weight = static_cast<const uint16_t*>(p.weight) + (int64_t)map * p.outputs * p.inputs;
  auto hold = [&](int from, int width) {
#pragma unroll 1
    for (int line = warp; line < kShortOutputs; line += kProjectWarps)
#pragma unroll 2
      for (int at = 8 * lane; at < width; at += 256)  // Beyond the last input rows are 0.
        cp_async16(smem_u32(weights + line * pitch + at),
                   weight + (int64_t)min(first + line, p.outputs - 1) * p.inputs + min(from + at, p.inputs - 8));
  };
  const int output = first + threadIdx.x % kShortOutputs;
  const float bias = p.bias && output < p.outputs ? p.bias[map * p.outputs + output] : 0.0f;
  bool waits = true;
#pragma unroll 1
  for (int start = 0; start < count; start += kColumns) {
    float sums[2][2][4] = {};  // of two tiles: the first parts', and the others', which are small
#pragma unroll 1
    for (int from = 0; from < p.inputs; from += kHeldInputs) {
      const int width = min(kHeldInputs, (p.inputs - from + 31) / 32 * 32);
      __syncthreads();  // What lies there may still be read.
      if (waits || p.inputs > kHeldInputs) hold(from, width);
      if (waits && !p.fresh) wait_for_predecessor();
      waits = false;
#pragma unroll 1
      for (int line = warp / 2; line < min(kColumns, count - start); line += kProjectWarps / 2)
        stage_parts(p, ProjectRow(p, map, start + line), from, width, rows + line * pitch, kColumns * pitch);
      cp_async_wait_all();
      __syncthreads();
#pragma unroll 1
      for (int i = 32 * quarter; i < width; i += 128) {
        const uint16_t* at = weights + (tile * 32 + lane / 4) * pitch + i + 8 * (lane % 4);
        uint4 w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = *reinterpret_cast<const uint4*>(at + 8 * j * pitch);
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          const uint4 x = *reinterpret_cast<const uint4*>(rows + (k * kColumns + lane / 4) * pitch + i + 8 * (lane % 4));
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const uint4 upper = w[2 * t], lower = w[2 * t + 1];
            mma_16x8x16<__nv_bfloat16>(sums[t][k > 0], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
            mma_16x8x16<__nv_bfloat16>(sums[t][k > 0], upper.z, lower.z, upper.w, lower.w, x.z, x.w);
          }
        }
      }
    }
    float* quarters = reinterpret_cast<float*>(rows);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        quarters[(quarter * kColumns + lane % 4 * 2 + i % 2) * kSumPitch + tile * 32 + t * 16 + i / 2 * 8 + lane / 4] =
            sums[t][0][i] + sums[t][1][i];
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x / kShortOutputs; n < min(kColumns, count - start); n += kProjectWarps * 32 / kShortOutputs) {
      float sum = 0.0f;
#pragma unroll
      for (int q = 0; q < 4; ++q) sum += quarters[(q * kColumns + n) * kSumPitch + threadIdx.x % kShortOutputs];
      if (output < p.outputs) put_out(p, ProjectRow(p, map, start + n).to + output, sum, bias);
    }
  }
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
