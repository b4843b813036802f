// The steps between matrix products and attention, each in one pass over its data:
// rotation of queries and keys with the append to the paged cache, root-mean-square
// normalisation, and the gated activation.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using RopeParams = TaperRopeParams;
using AnglesParams = TaperAnglesParams;
using WordsParams = TaperWordsParams;
using WriteParams = TaperWriteParams;
using NormParams = TaperNormParams;
using SiluParams = TaperSiluParams;

template <class T>
struct Eight {
  float x[8];
  __device__ __forceinline__ explicit Eight(uint4 raw) {
    const T* t = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(t[i]);
  }
  __device__ __forceinline__ Eight() {}
  __device__ __forceinline__ uint4 pack() const {
    return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                      pack2<T>(x[6], x[7]));
  }
};

// The same eight elements as another type.
template <class T, class In>
__device__ __forceinline__ uint4 as(const Eight<In>& from) {
  Eight<T> to;
#pragma unroll
  for (int i = 0; i < 8; ++i) to.x[i] = from.x[i];
  return to.pack();
}

// A thread takes two pieces of eight elements that rotate into one another: the same place in both halves of a head.
template <class In, class T, int D>
__global__ void __launch_bounds__(256) rope_kernel(const RopeParams p) {
  constexpr int kPairs = D / 16;  // pairs of pieces a head
  // No kernel reads, before it waits, what this one's predecessors write.
  launch_dependents();
  wait_for_predecessor();
  const int heads = p.q_heads + 2 * p.kv_heads;
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64_t)p.tokens * heads * kPairs) return;
  const int pair = (int)(i % kPairs), head = (int)(i / kPairs % heads);
  const int64_t token = i / kPairs / heads;
  const int lo = pair, hi = pair + kPairs;
  const uint4* src = reinterpret_cast<const uint4*>(static_cast<const In*>(p.qkv) + (token * heads + head) * D);
  const Eight<In> a(src[lo]), b(src[hi]);
  auto cache_row = [&](void* base, int kv_head) {
    const uint32_t slot = p.slots[token];
    return reinterpret_cast<uint4*>(
        static_cast<T*>(base) + (((uint64_t)(slot / kBlock) * p.kv_heads + kv_head) * kBlock + slot % kBlock) * D);
  };
  if (head >= p.q_heads + p.kv_heads) {
    uint4* to = cache_row(p.v, head - p.q_heads - p.kv_heads);
    to[lo] = as<T>(a);
    to[hi] = as<T>(b);
    return;
  }
  // Eight angles: of pairs 8 * pair .. 8 * pair + 7.
  const float* angle = p.angles + token * D + 8 * pair;
  float c[8], s[8];
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    *reinterpret_cast<float4*>(c + j) = *reinterpret_cast<const float4*>(angle + j);
    *reinterpret_cast<float4*>(s + j) = *reinterpret_cast<const float4*>(angle + D / 2 + j);
  }
  Eight<T> x, y;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    x.x[j] = a.x[j] * c[j] - b.x[j] * s[j];
    y.x[j] = b.x[j] * c[j] + a.x[j] * s[j];
  }
  uint4* to = head < p.q_heads ? reinterpret_cast<uint4*>(static_cast<T*>(p.q) + (token * p.q_heads + head) * D)
                               : cache_row(p.k, head - p.q_heads);
  to[lo] = x.pack();
  to[hi] = y.pack();
  if (p.kept && head < p.q_heads && p.kept[token]) {
    uint4* also = reinterpret_cast<uint4*>(reinterpret_cast<T*>(p.kept[token]) + ((int64_t)p.layer * p.q_heads + head) * D);
    also[lo] = x.pack();
    also[hi] = y.pack();
  }
}

// A thread takes one pair of a row.
static __global__ void __launch_bounds__(256) angles_kernel(const __grid_constant__ AnglesParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64_t)p.rows * p.half) return;
  const int64_t row = i / p.half;
  const int pair = (int)(i % p.half);
  float s, c;
  const uint32_t position = p.positions ? p.positions[row] : p.few[row];
  sincosf(__fmul_rn((float)position, p.frequencies[pair]), &s, &c);
  float* to = p.angles + row * 2 * p.half + pair;
  to[0] = c * p.factor;
  to[p.half] = s * p.factor;
}

// A thread copies four words; the last thread block writes what came with the launch. A product that began beside these few
// blocks would have its own crowded on other multiprocessors.
static __global__ void __launch_bounds__(256) words_kernel(const __grid_constant__ WordsParams p) {
  static_assert(sizeof(p.words) == 4 * TAPER_WORDS && sizeof(p.runs) == sizeof(TaperWordRun) * TAPER_WORD_RUNS &&
                sizeof(p.copies) == sizeof(TaperWordCopy) * TAPER_WORD_COPIES);
  wait_for_predecessor();
  if (blockIdx.x == gridDim.x - 1) {
    for (int r = 0; r < p.run_count; ++r)
      for (int i = threadIdx.x; i < p.runs[r].count; i += 256) p.runs[r].to[i] = p.words[p.runs[r].first + i];
    return;
  }
  int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  for (int c = 0; c < p.copy_count; ++c) {
    const int64_t fours = p.copies[c].count / 4;
    if (i < fours) {
      reinterpret_cast<uint4*>(p.copies[c].to)[i] = reinterpret_cast<const uint4*>(p.copies[c].from)[i];
      return;
    }
    i -= fours;
  }
}

// A thread takes eight elements of a row.
template <class T, class In>
__global__ void __launch_bounds__(256) write_kernel(const WriteParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int pieces = p.head_dim / 8;
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64_t)p.tokens * p.kv_heads * pieces) return;
  const int piece = (int)(i % pieces), head = (int)(i / pieces % p.kv_heads);
  const uint32_t slot = p.slots[i / pieces / p.kv_heads];
  const int64_t row = ((int64_t)(slot / kBlock) * p.kv_heads + head) * kBlock + slot % kBlock;
  uint4 raw;
  if constexpr (sizeof(In) == 4) {
    const float4* from = static_cast<const float4*>(p.rows) + 2 * i;
    Eight<T> x;
    *reinterpret_cast<float4*>(x.x) = from[0];
    *reinterpret_cast<float4*>(x.x + 4) = from[1];
    raw = x.pack();
  } else {
    raw = static_cast<const uint4*>(p.rows)[i];
  }
  static_cast<uint4*>(p.pool)[row * pieces + piece] = raw;
}

// Rows in f32 by a weight in f32, or, without one, rounded as they are: a thread block walks rows, keeps the weights and has the
// next row on its way. Rows too wide to be kept are read twice.
template <class T, int HELD>
__global__ void __launch_bounds__(512, 2) norm_kernel(const NormParams p) {
  constexpr int kHeld = HELD;  // pieces of eight elements that a thread keeps
  __shared__ float sums[2][16];
  const int tid = threadIdx.x, pieces = p.width / 8;
  const bool scaled = p.weight != nullptr, kept = pieces <= kHeld * 512;
  float g[kHeld][8], x[kHeld][8];
  auto eight = [](const float* from, int64_t at, float (&to)[8]) {
    *reinterpret_cast<float4*>(to) = reinterpret_cast<const float4*>(from)[2 * at];
    *reinterpret_cast<float4*>(to + 4) = reinterpret_cast<const float4*>(from)[2 * at + 1];
  };
  auto load = [&](int row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (tid + i * 512 < pieces && row < p.rows) eight(p.x, (int64_t)row * pieces + tid + i * 512, x[i]);
  };
  if (scaled)
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (tid + i * 512 < pieces) eight(p.weight, tid + i * 512, g[i]);  // The predecessor writes no weights.
  wait_for_predecessor();
  launch_dependents();
  load(blockIdx.x);
  for (int row = blockIdx.x, turn = 0; row < p.rows; row += gridDim.x, turn ^= 1) {
    const int64_t first = (int64_t)row * pieces;
    float own[kHeld][8], sum = 0.f, inv = 1.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) own[i][j] = x[i][j];
    load(row + gridDim.x);
    if (scaled) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (tid + i * 512 < pieces)
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += own[i][j] * own[i][j];
      if (!kept)
        for (int at = tid + kHeld * 512; at < pieces; at += 512) {
          float y[8];
          eight(p.x, first + at, y);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += y[j] * y[j];
        }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if ((tid & 31) == 0) sums[turn][tid / 32] = sum;
      __syncthreads();
      sum = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) sum += sums[turn][i];
      inv = rsqrtf(sum / p.width + p.epsilon);
    }
    auto put = [&](int at, const float (&y)[8], const float (&by)[8]) {
      Eight<T> out;
#pragma unroll
      for (int j = 0; j < 8; ++j) out.x[j] = scaled ? y[j] * inv * by[j] : y[j];
      static_cast<uint4*>(p.out)[first + at] = out.pack();
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (tid + i * 512 < pieces) put(tid + i * 512, own[i], g[i]);
    if (!kept)
      for (int at = tid + kHeld * 512; at < pieces; at += 512) {
        float y[8], by[8] = {};
        eight(p.x, first + at, y);
        if (scaled) eight(p.weight, at, by);
        put(at, y, by);
      }
  }
}

template <class T>
__global__ void __launch_bounds__(256) silu_kernel(const SiluParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int64_t pieces = p.width / 8;
  const uint4* in = static_cast<const uint4*>(p.gate_up);
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= p.rows * pieces) return;
  const int64_t row = i / pieces, at = i % pieces;
  Eight<T> gate(in[row * 2 * pieces + at]);
  const Eight<T> up(in[(row * 2 + 1) * pieces + at]);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    gate.x[j] = gate.x[j] / (1.f + exp2_fast(-gate.x[j] * kLog2e)) * up.x[j];
  static_cast<uint4*>(p.out)[i] = gate.pack();
}

}  // namespace taper
