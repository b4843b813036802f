// What sparse methods keep beside the cache, brought up to date after an append: bounds
// of pages, label channels, norms of values, binary codes.
//
// What is kept of a page is rebuilt from all visible rows of every page that the append touched,
// so the same call also repairs it after a truncation.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

using AppendSpan = TaperAppendSpan;
using AppendParams = TaperAppendParams;
using CodeParams = TaperCodeParams;

// A thread block a cache block and head.
template <class T, int D>
__global__ void __launch_bounds__(128) append_kernel(const AppendParams p) {
  constexpr int kPieces = D / 8;
  __shared__ __align__(16) T k[kBlock * D];
  wait_for_predecessor();
  launch_dependents();
  const AppendSpan span = p.spans[blockIdx.z];
  const uint32_t b = span.begin / kBlock + blockIdx.x;
  if (span.end <= span.begin || b * kBlock >= span.end) return;
  const int tid = threadIdx.x, kv_head = blockIdx.y;
  const uint32_t rows = min(span.end - b * kBlock, (uint32_t)kBlock);
  const uint64_t at =
      (uint64_t)p.block_table[(uint64_t)span.table * p.table_stride + b] * p.kv_heads + kv_head;
  // All rows that something is made of are on their way at once.
  const uint32_t from = span.begin > b * kBlock ? span.begin - b * kBlock : 0;
  const uint32_t first = p.pages || p.norms ? from / p.page * p.page : from;
  const uint4* cached = reinterpret_cast<const uint4*>(static_cast<const T*>(p.k) + at * kBlock * D);
#pragma unroll 8
  for (uint32_t i = first * kPieces + tid; i < rows * kPieces; i += 128) cp_async16(smem_u32(k) + 16 * i, cached + i);
  cp_async_wait_all();
  __syncthreads();
  if (p.pages) {
    // Of every page with a new row, from its first row on; NaN once is NaN from then on.
    const uint32_t page = p.page;
    T* bounds = static_cast<T*>(p.pages) + at * (kBlock / page) * 2 * D;
    for (uint32_t i = from / page; i * page < rows; ++i)
      for (int e = tid; e < D; e += 128) {
        const uint32_t end = min((i + 1) * page, rows);
        T lo = k[i * page * D + e], hi = lo;
#pragma unroll 8
        for (uint32_t r = i * page + 1; r < end; ++r) {
          const T x = k[r * D + e];
          const float y = to_float(x);
          if (y < to_float(lo) || y != y) lo = x;
          if (y > to_float(hi) || y != y) hi = x;
        }
        bounds[(2 * i) * D + e] = lo;
        bounds[(2 * i + 1) * D + e] = hi;
      }
  }
  if (p.norms) {
    // As the bounds: of every page with a new row.
    __shared__ float norm_of[kBlock];
    const uint32_t page = p.page;
    for (uint32_t r = first + tid / 32; r < rows; r += 4) {
      double square = 0.;
      for (int e = tid % 32; e < D; e += 32) {
        const double x = to_float(k[r * D + e]);
        square += x * x;
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(~0u, square, d);
      // Up, so that it stays a bound.
      if (tid % 32 == 0) norm_of[r] = nextafterf((float)sqrt(square), INFINITY);
    }
    __syncthreads();
    for (uint32_t i = first / page + tid; i * page < rows; i += 128) {
      float most = norm_of[i * page];
      for (uint32_t r = i * page + 1; r < min((i + 1) * page, rows); ++r)
        if (norm_of[r] > most || norm_of[r] != norm_of[r]) most = norm_of[r];
      p.norms[at * (kBlock / page) + i] = most;
    }
  }
  if (p.labels) {
    for (uint32_t i = from * p.width + tid; i < rows * p.width; i += 128) {
      const uint32_t channel = p.channels[kv_head * p.width + i % p.width];
      static_cast<T*>(p.labels)[at * kBlock * p.width + i] = k[(i / p.width) * D + channel];
    }
  }
}

// Four lanes a word, eight elements each.
template <class T>
__global__ void __launch_bounds__(256) code_kernel(const CodeParams p) {
  wait_for_predecessor();
  launch_dependents();
  const int quad = threadIdx.x & 3;
  const int64_t i = (int64_t)blockIdx.x * 64 + threadIdx.x / 4;
  const bool live = i < (int64_t)p.tokens * p.heads * p.words;
  uint32_t word = 0;
  if (live) {
    const uint4 raw = static_cast<const uint4*>(p.x)[i * 4 + quad];
    const T* x = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int j = 0; j < 8; ++j) word |= (uint32_t)(to_float(x[j]) >= 0.f) << (8 * quad + j);
  }
  word |= __shfl_xor_sync(~0u, word, 1);
  word |= __shfl_xor_sync(~0u, word, 2);
  if (!live || quad) return;
  if (!p.positions) {
    p.codes[i] = word;
    return;
  }
  const int w = (int)(i % p.words), head = (int)(i / p.words % p.heads);
  const int64_t token = i / p.words / p.heads;
  const int group = p.heads / p.kv_heads;
  const uint32_t pos = p.positions[token];
  const uint64_t block =
      p.block_table[(uint64_t)p.token_table[token] * p.table_stride + pos / kBlock];
  p.codes[((block * p.kv_heads + head / group) * kBlock + pos % kBlock) * group * p.words +
          (head % group) * p.words + w] = word;
}

}  // namespace taper
