// Pages of one list: which of their tokens are read, and their order by weight. All of it by one thread
// block of kPromoteThreads.
#pragma once

#include "../common/scan.cuh"
#include "certain.cuh"

namespace taper {

constexpr int kPromoteThreads = 1024, kPromoteWarps = kPromoteThreads / 32;

// Bits of word i that a range of tokens covers.
__device__ __forceinline__ uint32_t range_bits(uint32_t begin, uint32_t end, uint32_t i) {
  const uint32_t lo = max(begin, 32 * i), hi = min(end, 32 * i + 32);
  if (hi <= lo) return 0;
  const uint32_t n = hi - lo;
  return (n == 32 ? ~0u : (1u << n) - 1) << (lo - 32 * i);
}

// A bit for each visible token: those that are read. Words lie in device memory; they are changed by
// atomics, and read after a barrier.
struct ReadBits {
  uint32_t* words;
  uint32_t len;

  __device__ __forceinline__ uint32_t count() const { return (len + 31) / 32; }
  __device__ __forceinline__ void mark(uint32_t i, uint32_t bits) const {
    if (i < count()) atomicOr(&words[i], bits & range_bits(0, len, i));
  }
  __device__ __forceinline__ void mark(uint32_t token) const { mark(token / 32, 1u << (token % 32)); }
  // All that a list names. Ends with a barrier.
  __device__ __forceinline__ void start(const CertainParams& p, const WorkList& w) const {
    for (uint32_t i = threadIdx.x; i < count(); i += kPromoteThreads)
      words[i] = (range_bits(w.begin[0], w.end[0], i) | range_bits(w.begin[1], w.end[1], i)) & range_bits(0, len, i);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < w.block_count * 2; i += kPromoteThreads)
      mark(p.block_ids[(uint64_t)w.block_first + i / 2] * 2 + i % 2, ~0u);
    for (uint32_t i = threadIdx.x; i < w.token_count; i += kPromoteThreads)
      mark(token_at(p.token_ids, p.token_shift, (uint64_t)w.token_first + i));
    __syncthreads();
  }
  // Tokens of a page of `size` that are not read.
  __device__ __forceinline__ uint32_t unread(uint32_t page, uint32_t size) const {
    const uint32_t begin = page * size, end = min(begin + size, len);
    uint32_t n = 0;
    for (uint32_t i = begin / 32; i * 32 < end; ++i) n += __popc(~words[i] & range_bits(begin, end, i));
    return n;
  }
  __device__ __forceinline__ void mark_page(uint32_t page, uint32_t size) const {
    const uint32_t begin = page * size, end = min(begin + size, len);
    for (uint32_t i = begin / 32; i * 32 < end; ++i) mark(i, range_bits(begin, end, i));
  }
};

constexpr int kDigits = 256;

struct SortShared {
  // How many elements of each digit a warp's part has, then where they go; a word apart, so that neither
  // a warp's digits nor a digit's warps share a bank.
  uint32_t counts[kPromoteWarps][kDigits + 1];
  uint32_t scan[33];
};

// Puts n elements in ascending order of their upper 32 bits; equal ones stay as they were. Four passes from
// `from` to `to` and back, of eight bits each; a warp has a part of the elements and passes over it in order.
__device__ __forceinline__ void sort_pages(uint64_t* from, uint64_t* to, uint32_t n, SortShared& sh) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t part = (n + kPromoteThreads - 1) / kPromoteThreads * 32;
  const uint32_t begin = min(warp * part, n), end = min(begin + part, n);
  uint32_t* own = sh.counts[warp];
#pragma unroll 1
  for (int shift = 32; shift < 64; shift += 8) {
    for (int d = lane; d < kDigits; d += 32) own[d] = 0;
    __syncwarp();
    // Lanes of one digit, and whether this one is the first of them.
    auto peers = [&](uint32_t digit, bool& leads) {
      const uint32_t same = __match_any_sync(~0u, digit);
      leads = digit < kDigits && lane == (uint32_t)__ffs(same) - 1;
      return same;
    };
    bool leads;
    for (uint32_t at = begin; at < end; at += 32) {
      const bool in = at + lane < end;
      const uint32_t digit = in ? (uint32_t)(from[at + lane] >> shift) & (kDigits - 1) : kDigits;
      const uint32_t same = peers(digit, leads);
      if (leads) own[digit] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    // Digit by digit, and of each the warps in their order: eight places a thread.
    constexpr int kEach = kDigits * kPromoteWarps / kPromoteThreads;
    uint32_t count[kEach], sum = 0, total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t place = threadIdx.x * kEach + i;
      count[i] = sh.counts[place % kPromoteWarps][place / kPromoteWarps];
      sum += count[i];
    }
    uint32_t first = block_exclusive_sum(sum, sh.scan, total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t place = threadIdx.x * kEach + i;
      sh.counts[place % kPromoteWarps][place / kPromoteWarps] = first;
      first += count[i];
    }
    __syncthreads();
    for (uint32_t at = begin; at < end; at += 32) {
      const bool in = at + lane < end;
      const uint64_t x = in ? from[at + lane] : 0;
      const uint32_t digit = in ? (uint32_t)(x >> shift) & (kDigits - 1) : kDigits;
      const uint32_t same = peers(digit, leads);
      if (in) to[own[digit] + __popc(same & ((1u << lane) - 1))] = x;
      __syncwarp();
      if (leads) own[digit] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    uint64_t* last = from;
    from = to;
    to = last;
  }
}

}  // namespace taper
