// Whole clusters by how likely they are, as many as a limit on their tokens allows: the exact counterpart of a
// choice that may not take what it likes. A list has a cluster of thread blocks, each with a share of the tokens between the
// list's two ranges: they count the clusters' tokens, if there could be too many, find which clusters are taken, each for
// itself, and write the tokens of those, ascending.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/worklist.cuh"
#include "../select/cluster.cuh"

namespace taper {

using ProbeParams = TaperProbeParams;

constexpr int kProbeThreads = 1024, kProbeMost = 4096, kProbeSmem = 220 * 1024;
constexpr int kProbeShare = 8192, kProbeTeam = 8;  // tokens a thread block, where they are few; most blocks of a list
constexpr uint32_t kProbeRun = 8;                  // neighbouring tokens, whose clusters are one load

struct ProbeShared {
  uint64_t next;              // the largest key of those that do not fit
  uint32_t size[kProbeMost];  // the share's tokens of each cluster
  uint8_t taken[kProbeMost];
  uint32_t scratch[33], found;
  uint32_t held[256], keys[256], digit, left;
  bool alone;
  float warps[4][32];
  // Behind it: of each run of the share which tokens are taken, a bit each.
};

// N numbers over the thread block; all threads get the results.
template <int N, class F>
__device__ __forceinline__ void block_reduce(float (&x)[N], float (&warps)[N][32], F f) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = f(x[i], __shfl_xor_sync(~0u, x[i], d));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i)
    if ((threadIdx.x & 31) == 0) warps[i][threadIdx.x >> 5] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = warps[i][threadIdx.x & 31];
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = f(x[i], __shfl_xor_sync(~0u, x[i], d));
}

// Keys, of which no two are equal and 0 is none, are taken from the largest on, as long as their weights come to no more than
// `limit`: taken are those above what this returns. By bytes from the top.
template <int N>
__device__ __forceinline__ uint64_t last_left(const uint64_t (&keys)[N], const uint32_t (&weights)[N], uint32_t limit,
                                              ProbeShared& sh) {
  uint64_t last = 0;
#pragma unroll 1
  for (int shift = 56;; shift -= 8) {
    if (threadIdx.x < 256) sh.held[threadIdx.x] = sh.keys[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 0) sh.digit = 256;
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (keys[j] != 0 && (shift == 56 || (keys[j] ^ last) >> (shift + 8) == 0)) {
        atomicAdd(&sh.held[keys[j] >> shift & 255], weights[j]);
        atomicAdd(&sh.keys[keys[j] >> shift & 255], 1u);
      }
    __syncthreads();
    if (threadIdx.x < 32) {
      // Eight bins a lane, the largest first.
      const int top = 255 - 8 * threadIdx.x;
      uint32_t mine = 0;
      for (int i = 0; i < 8; ++i) mine += sh.held[top - i];
      uint32_t sum = mine;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t o = __shfl_up_sync(~0u, sum, d);
        if (threadIdx.x >= d) sum += o;
      }
      uint32_t before = sum - mine;
      if (before <= limit && sum > limit)
        for (int i = 0; i < 8; ++i) {
          const uint32_t held = sh.held[top - i];
          if (before + held > limit) {
            sh.digit = top - i;
            sh.alone = sh.keys[top - i] == 1;
            sh.left = limit - before;
            break;
          }
          before += held;
        }
    }
    __syncthreads();
    if (sh.digit == 256) return 0;  // At the first byte: they all fit.
    last |= (uint64_t)sh.digit << shift;
    limit = sh.left;
    // Where nothing more fits, what is left of the bin weighs something or does not matter.
    if (sh.alone || limit == 0 || shift == 0) return last | ((1ull << shift) - 1);
  }
}

__global__ void __launch_bounds__(kProbeThreads) probe_kernel(const ProbeParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  ProbeShared& sh = *reinterpret_cast<ProbeShared*>(raw);
  constexpr int kOwn = kProbeMost / kProbeThreads;
  uint8_t* masks = raw + sizeof(ProbeShared);
  const uint32_t team = cluster_size(), rank = cluster_rank();
  const uint32_t tid = threadIdx.x, list = blockIdx.x / team, clusters = p.clusters;
  const uint32_t row = list / p.kv_heads, kv_head = list % p.kv_heads, group = p.q_heads / p.kv_heads;
  for (uint32_t c = tid; c < clusters; c += kProbeThreads) sh.size[c] = 0;
  wait_for_predecessor();
  launch_dependents();
  WorkList& w = p.work[list];
  const uint32_t from = w.end[0], to = w.begin[1];
  if (from >= to) {
    if (tid == 0 && rank == 0) w.token_first = w.token_count = 0;
    return;
  }
  const uint32_t* table = p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride;
  // Runs of the share.
  const uint32_t first_run = from / kProbeRun, runs = (to + kProbeRun - 1) / kProbeRun - first_run;
  const uint32_t each = (runs + team - 1) / team, begin = first_run + min(rank * each, runs);
  const uint32_t count = first_run + min((rank + 1) * each, runs) - begin;
  // f(run of the share, clusters of its tokens, which of them lie between the ranges): several loads at a time.
  auto for_runs = [&](auto f) {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (uint32_t i = tid; i < count; i += kAhead * kProbeThreads) {
      uint4 ids[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t at = i + j * kProbeThreads, t = (begin + min(at, count - 1)) * kProbeRun;
        ids[j] = *reinterpret_cast<const uint4*>(
            p.ids + ((uint64_t)table[t / kBlock] * p.kv_heads + kv_head) * kBlock + t % kBlock);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t at = i + j * kProbeThreads, t = (begin + at) * kProbeRun;
        if (at >= count) break;
        uint32_t within = 0xff;
        if (t < from) within &= 0xffu << (from - t);
        if (t + kProbeRun > to) within &= 0xffu >> (t + kProbeRun - to);
        const uint32_t words[4] = {ids[j].x, ids[j].y, ids[j].z, ids[j].w};
        uint32_t c[kProbeRun];
#pragma unroll
        for (int k = 0; k < (int)kProbeRun; ++k) {
          c[k] = k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xffff;
          if (c[k] >= clusters) within &= ~(1u << k);
        }
        f(at, c, within);
      }
    }
  };
  const uint32_t limit = p.limits[list];
  const bool counts = limit < to - from;
  uint32_t ones[kOwn], held[kOwn] = {};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) ones[j] = 1;
  if (tid == 0) sh.next = 0;
  __syncthreads();
  if (counts) {
    for_runs([&](uint32_t, const uint32_t(&c)[kProbeRun], uint32_t within) {
#pragma unroll
      for (int k = 0; k < (int)kProbeRun; ++k)
        if (within >> k & 1) atomicAdd(&sh.size[c[k]], 1u);
    });
    __syncthreads();
    cluster_release();
    cluster_wait();
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      if (tid + j * kProbeThreads < clusters)
        for (uint32_t r = 0; r < team; ++r) held[j] += read_in_block(sh.size[tid + j * kProbeThreads], r);
  }

  // The group's probability of each cluster, some heads at a time.
  constexpr int kHeads = 4;
  float mass[kOwn] = {};
#pragma unroll 1
  for (uint32_t g0 = 0; g0 < group; g0 += kHeads) {
    const float* logits = p.logits + ((uint64_t)row * p.q_heads + kv_head * group + g0) * clusters;
    float x[kHeads][kOwn], top[kHeads], sum[kHeads];
#pragma unroll
    for (int g = 0; g < kHeads; ++g)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const uint32_t c = tid + j * kProbeThreads;
        x[g][j] = g0 + g < group && c < clusters ? logits[(uint64_t)g * clusters + c] : -INFINITY;
      }
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      top[g] = x[g][0];
#pragma unroll
      for (int j = 1; j < kOwn; ++j) top[g] = fmaxf(top[g], x[g][j]);
    }
    block_reduce(top, sh.warps, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      sum[g] = 0.f;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        x[g][j] = g0 + g < group && tid + j * kProbeThreads < clusters ? expf(x[g][j] - top[g]) : 0.f;
        sum[g] += x[g][j];
      }
    }
    block_reduce(sum, sh.warps, [](float a, float b) { return a + b; });
#pragma unroll
    for (int g = 0; g < kHeads; ++g)
#pragma unroll
      for (int j = 0; j < kOwn; ++j)
        if (g0 + g < group) mass[j] += x[g][j] / sum[g];
  }
  // The bits of what is not negative order as the numbers do.
  uint64_t key[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const uint32_t c = tid + j * kProbeThreads;
    key[j] = c < clusters ? (uint64_t)__float_as_uint(mass[j]) << 32 | (~c) : 0;
  }
  uint64_t last = (uint32_t)p.most < clusters ? last_left(key, ones, p.most, sh) : 0;
  if (counts && p.at_least && limit == 0) {
    last = ~0ull;
  } else if (counts) {
    uint64_t left = last_left(key, held, p.at_least ? limit - 1 : limit, sh);
    if (p.at_least && left > 0) {
      // The next one that holds anything.
      uint64_t next = 0;
#pragma unroll
      for (int j = 0; j < kOwn; ++j)
        if (key[j] <= left && held[j] > 0) next = max(next, key[j]);
      atomicMax(reinterpret_cast<unsigned long long*>(&sh.next), (unsigned long long)next);
      __syncthreads();
      left = sh.next - 1;
    }
    last = max(last, left);
  }
#pragma unroll
  for (int j = 0; j < kOwn; ++j)
    if (key[j] != 0) sh.taken[tid + j * kProbeThreads] = key[j] > last;
  __syncthreads();

  uint32_t mine = 0, found;
  for_runs([&](uint32_t at, const uint32_t(&c)[kProbeRun], uint32_t within) {
    uint32_t taken = 0;
#pragma unroll
    for (int k = 0; k < (int)kProbeRun; ++k)
      if (within >> k & 1) taken |= (uint32_t)sh.taken[c[k]] << k;
    masks[at] = taken;
    mine += __popc(taken);
  });
  block_exclusive_sum(mine, sh.scratch, found);
  if (tid == 0) sh.found = found;
  __syncthreads();
  cluster_release();
  cluster_wait();
  uint32_t put = 0, all = 0;
  for (uint32_t r = 0; r < team; ++r) {
    const uint32_t of = read_in_block(sh.found, r);
    put += r < rank ? of : 0;
    all += of;
  }
  // No block leaves while others may read what it found.
  cluster_release();
  uint32_t* ids = p.token_ids + (uint64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t i = 0; i < count; i += kProbeThreads) {
    uint32_t taken = i + tid < count ? masks[i + tid] : 0, total;
    uint32_t at = put + block_exclusive_sum(__popc(taken), sh.scratch, total);
    put += total;
    for (; taken; taken &= taken - 1, ++at)
      if (at < (uint32_t)p.capacity) ids[at] = (begin + i + tid) * kProbeRun + __ffs(taken) - 1;
  }
  if (tid == 0 && rank == 0) {
    w.token_first = list * p.capacity;
    w.token_count = min(all, (uint32_t)p.capacity);
  }
  __syncwarp();
  cluster_wait();
}

}  // namespace taper
