// Scores of query rows against binary codes of the keys.
//
// A code is `words` 32-bit words; the score of a pair of codes is their bits that agree
// less those that differ, bits - 2 popcount(xor), and the group's the sum of its heads'. Codes lie beside the cache as
// [blocks, kv_heads, 64, width]: with a code for each query head of the group
// (HashAttention) width is group * words, else one code serves the group and width is
// words. A thread takes four tokens, whose loads are in flight together.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using HashScoreParams = TaperHashScoreParams;

constexpr int kHashThreads = 256, kHashTokens = 4;  // tokens a thread
constexpr int kHashWordsMost = 64;                  // words of all codes of a token

// G: heads of the group, each with a word of its own; 0: any shape, word by word.
template <int G>
__global__ void __launch_bounds__(kHashThreads) hash_score_kernel(const HashScoreParams p) {
  __shared__ uint32_t q[16 * kHashWordsMost];
  const int group = p.q_heads / p.kv_heads, row = blockIdx.z, kv_head = blockIdx.y;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t len = p.lens[row];
  const uint32_t first = blockIdx.x * kHashThreads * kHashTokens + threadIdx.x;
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  const int width = p.per_head ? group * p.words : p.words;
  for (int i = threadIdx.x; i < group * p.words; i += kHashThreads)
    q[i] = p.q[((int64_t)row * p.q_heads + kv_head * group) * p.words + i];
  const uint32_t* code[kHashTokens];
#pragma unroll
  for (int t = 0; t < kHashTokens; ++t) {
    const uint32_t e = first + t * kHashThreads;
    code[t] = e < len ? p.codes + (((uint64_t)table[e / kBlock] * p.kv_heads + kv_head) * kBlock +
                                   e % kBlock) *
                                      width
                      : nullptr;
  }
  uint4 x[kHashTokens][G > 0 ? G / 4 : 1];
  if constexpr (G > 0) {
#pragma unroll
    for (int t = 0; t < kHashTokens; ++t)
#pragma unroll
      for (int i = 0; i < G / 4; ++i)
        x[t][i] = code[t] ? reinterpret_cast<const uint4*>(code[t])[i] : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const int bits = 32 * p.words * group;
#pragma unroll
  for (int t = 0; t < kHashTokens; ++t) {
    if (!code[t]) continue;
    const uint32_t e = first + t * kHashThreads;
    int differ = 0;  // over all heads
    if constexpr (G > 0) {
#pragma unroll
      for (int h = 0; h < G; ++h) differ += __popc(reinterpret_cast<const uint32_t*>(&x[t][0])[h] ^ q[h]);
    } else {
#pragma unroll 1
      for (int h = 0; h < group; ++h)
        for (int i = 0; i < p.words; ++i)
          differ += __popc(code[t][p.per_head ? h * p.words + i : i] ^ q[h * p.words + i]);
    }
    p.out[((int64_t)row * p.kv_heads + kv_head) * p.stride + e] = (float)(bits - 2 * differ);
  }
}

}  // namespace taper
