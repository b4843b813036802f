// Whole clusters by how likely they are, as many as a limit on their tokens allows: the exact counterpart of a
// choice that may not take what it likes. A list has a cluster of thread blocks, each with a share of the tokens between the
// list's two ranges: they count the clusters' tokens, if there could be too many, find which clusters are taken, each for
// itself, and write the tokens of those, ascending.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/scan.cuh"
#include "../common/worklist.cuh"
#include "../select/cluster.cuh"

namespace taper {

using ProbeParams = TaperProbeParams;

constexpr int kProbeThreads = 512, kProbeWarps = kProbeThreads / 32, kProbeMost = 4096, kProbeSmem = 220 * 1024;
constexpr int kProbeShare = 8192, kProbeTeam = 8;  // tokens a thread block, where they are few; most blocks of a list
constexpr uint32_t kProbeRun = 8;                  // neighbouring tokens, whose clusters are one load
constexpr int kProbeHeads = 4;                     // whose softmax is computed side by side
constexpr int kProbeBins = 1024, kProbeFew = 32;

struct ProbeShared {
  alignas(16) uint32_t held[kProbeBins], keys[kProbeBins];  // of keys in bins, their weights, and how many
  uint64_t few[kProbeFew];                                  // keys of one bin, and their weights
  uint32_t few_held[kProbeFew], few_count;
  alignas(16) uint32_t found[kProbeTeam][kProbeWarps];  // tokens taken by each warp of each block
  float warps[2][2][kProbeHeads][kProbeWarps];          // largest logits, sums of exponentials; in turns
  uint32_t size[kProbeMost];                            // the share's tokens of each cluster
  uint8_t taken[kProbeMost];
  // Behind it: of each run of the share which tokens are taken, a bit each.
};

// Four numbers over the thread block; all threads get the results. The warps' own meet in `warps`.
template <class F>
__device__ __forceinline__ void over_block(float (&x)[kProbeHeads], float (&warps)[kProbeHeads][kProbeWarps], F f) {
  static_assert(kProbeHeads * kProbeWarps == 64);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < kProbeHeads; ++i) x[i] = f(x[i], __shfl_xor_sync(~0u, x[i], d));
#pragma unroll
  for (int i = 0; i < kProbeHeads; ++i)
    if (lane == 0) warps[i][warp] = x[i];
  __syncthreads();
  float two[2] = {warps[0][lane], warps[2][lane]};  // of the first two heads, and the others
#pragma unroll
  for (int d = 1; d < kProbeWarps; d *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) two[i] = f(two[i], __shfl_xor_sync(~0u, two[i], d));
#pragma unroll
  for (int i = 0; i < kProbeHeads; ++i) x[i] = __shfl_sync(~0u, two[i / 2], kProbeWarps * (i % 2));
}

// Bins of sixteen to a power of two, for masses from 2^-59 to 32; what is beyond falls on the first or last.
__device__ __forceinline__ uint32_t probe_bin(uint64_t key) {
  const int bin = (int)(key >> 51) - ((127 + 5 - kProbeBins / 16) << 4);
  return min(max(bin, 0), kProbeBins - 1);
}

// Keys, of which no two are equal and 0 is none, are taken from the largest on, as long as their weights come to no more than
// `limit`: the first one that is not, 0 if all are. By bins, until those of one bin are few.
template <int N>
__device__ __forceinline__ uint64_t first_left(const uint64_t (&keys)[N], const uint32_t (&weights)[N], uint32_t limit,
                                               ProbeShared& sh) {
  const int lane = threadIdx.x & 31;
  uint32_t in = 0, size;
#pragma unroll
  for (int j = 0; j < N; ++j) in |= (uint32_t)(keys[j] != 0) << j;
#pragma unroll 1
  for (int shift = 64;;) {
    const bool masses = shift == 64;
    auto digit = [&](uint64_t key) { return masses ? probe_bin(key) : (uint32_t)(key >> shift) % kProbeBins; };
    __syncthreads();  // The bins may still be read.
    for (int i = threadIdx.x; i < kProbeBins; i += kProbeThreads) sh.held[i] = sh.keys[i] = 0;
    if (threadIdx.x == 0) sh.few_count = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (in >> j & 1) {
        atomicAdd(&sh.held[digit(keys[j])], weights[j]);
        atomicAdd(&sh.keys[digit(keys[j])], 1u);
      }
    __syncthreads();
    // Every warp on its own: 32 bins a lane from the top, then the bins of the lane where the limit is passed.
    constexpr int kLaneBins = kProbeBins / 32;
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kLaneBins / 4; ++i) {
      const int four = (i + lane) % (kLaneBins / 4);
      const uint4 x = *reinterpret_cast<const uint4*>(&sh.held[kProbeBins - kLaneBins * (lane + 1) + 4 * four]);
      mine += x.x + x.y + x.z + x.w;
    }
    const uint32_t above = warp_upto(mine) - mine;
    const uint32_t passed = __ballot_sync(~0u, above <= limit && above + mine > limit);
    if (passed == 0) return 0;
    const int owner = __ffs(passed) - 1;
    uint32_t bin = kProbeBins - 1 - kLaneBins * owner - lane;
    const uint32_t held = sh.held[bin], over = __shfl_sync(~0u, above, owner) + warp_upto(held) - held;
    const int at = __ffs(__ballot_sync(~0u, over <= limit && over + held > limit)) - 1;
    limit -= __shfl_sync(~0u, over, at);
    bin = __shfl_sync(~0u, bin, at);
    size = sh.keys[bin];
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (digit(keys[j]) != bin) in &= ~(1u << j);
    if (size <= kProbeFew) break;
    shift = max((masses && bin > 0 && bin < kProbeBins - 1 ? 51 : shift) - 10, 0);
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (in >> j & 1) {
      const uint32_t to = atomicAdd(&sh.few_count, 1u);
      sh.few[to] = keys[j];
      sh.few_held[to] = weights[j];
    }
  __syncthreads();
  const uint64_t mine = lane < size ? sh.few[lane] : 0;
  uint32_t over = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < size; ++i) over += sh.few[i] > mine ? sh.few_held[i] : 0;
  const bool passes = lane < size && over <= limit && over + sh.few_held[lane] > limit;
  return __shfl_sync(~0u, mine, __ffs(__ballot_sync(~0u, passes)) - 1);
}

// OWN: clusters of which a thread speaks.
template <int OWN>
__global__ void __launch_bounds__(kProbeThreads) probe_kernel(const ProbeParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  ProbeShared& sh = *reinterpret_cast<ProbeShared*>(raw);
  uint8_t* masks = raw + sizeof(ProbeShared);
  const uint32_t team = cluster_size(), rank = cluster_rank();
  const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, list = blockIdx.x / team, clusters = p.clusters;
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
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  // Runs of the share; `own` neighbouring ones are a thread's.
  const uint32_t first_run = from / kProbeRun, runs = (to + kProbeRun - 1) / kProbeRun - first_run;
  const uint32_t each = (runs + team - 1) / team, begin = first_run + min(rank * each, runs);
  const uint32_t count = first_run + min((rank + 1) * each, runs) - begin;
  const uint32_t own = (each + kProbeThreads - 1) / kProbeThreads;
  // The clusters of the tokens of a thread's run.
  auto load = [&](uint32_t r) {
    const uint32_t t = (begin + tid * own + r) * kProbeRun;
    if (r >= own || tid * own + r >= count) return make_uint4(~0u, ~0u, ~0u, ~0u);
    return *reinterpret_cast<const uint4*>(p.ids + ((uint64_t)table[t / kBlock] * p.kv_heads + kv_head) * kBlock + t % kBlock);
  };
  constexpr int kAhead = 4;
  uint4 first[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) first[j] = load(j);
  // f(a thread's run, clusters of its tokens, which of them lie between the ranges): several loads at a time.
  auto for_runs = [&](auto f) {
#pragma unroll 1
    for (uint32_t r = 0; r < own; r += kAhead) {
      uint4 ids[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) ids[j] = r == 0 ? first[j] : load(r + j);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t t = (begin + tid * own + r + j) * kProbeRun;
        if (r + j >= own || tid * own + r + j >= count) break;
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
        f(r + j, c, within);
      }
    }
  };
  const uint32_t limit = p.limits[list];
  const bool counts = limit < to - from;

  // The group's probability of each cluster, some heads at a time.
  float mass[OWN] = {};
#pragma unroll 1
  for (uint32_t g0 = 0, turn = 0; g0 < group; g0 += kProbeHeads, turn ^= 1) {
    const float* logits = p.logits + ((uint64_t)row * p.q_heads + kv_head * group + g0) * clusters;
    float x[kProbeHeads][OWN], top[kProbeHeads], sum[kProbeHeads];
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const uint32_t c = tid + j * kProbeThreads;
        x[g][j] = g0 + g < group && c < clusters ? logits[(uint64_t)g * clusters + c] : -INFINITY;
      }
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g) {
      top[g] = x[g][0];
#pragma unroll
      for (int j = 1; j < OWN; ++j) top[g] = fmaxf(top[g], x[g][j]);
    }
    over_block(top, sh.warps[0][turn], [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g) {
      sum[g] = 0.f;
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        x[g][j] = g0 + g < group && tid + j * kProbeThreads < clusters ? expf(x[g][j] - top[g]) : 0.f;
        sum[g] += x[g][j];
      }
    }
    over_block(sum, sh.warps[1][turn], [](float a, float b) { return a + b; });
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g)
#pragma unroll
      for (int j = 0; j < OWN; ++j)
        if (g0 + g < group) mass[j] += x[g][j] / sum[g];
  }
  // The bits of what is not negative order as the numbers do.
  uint64_t key[OWN];
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const uint32_t c = tid + j * kProbeThreads;
    key[j] = c < clusters ? (uint64_t)__float_as_uint(mass[j]) << 32 | (~c) : 0;
  }

  uint32_t held[OWN] = {};
  if (counts) {
    // All have cleared their counts: they have met over the logits.
    for_runs([&](uint32_t, const uint32_t(&c)[kProbeRun], uint32_t within) {
#pragma unroll
      for (int k = 0; k < (int)kProbeRun; ++k)
        if (within >> k & 1) atomicAdd(&sh.size[c[k]], 1u);
    });
    cluster_release();
    cluster_wait();
#pragma unroll
    for (int j = 0; j < OWN; ++j)
      if (tid + j * kProbeThreads < clusters)
#pragma unroll
        for (uint32_t r = 0; r < kProbeTeam; ++r)
          if (r < team) held[j] += read_in_block(sh.size[tid + j * kProbeThreads], r);
  }
  cluster_release();  // Waited for before others are written to: all have begun then.
  uint64_t last = 0;  // taken are those above it
  if ((uint32_t)p.most < clusters) {
    uint32_t ones[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) ones[j] = 1;
    last = first_left(key, ones, p.most, sh);
  }
  if (counts && p.at_least && limit == 0) {
    last = ~0ull;
  } else if (counts) {
    // At least so many: the first one too with which it is more than one less.
    const uint64_t left = first_left(key, held, limit - p.at_least, sh);
    last = max(last, left > 0 ? left - p.at_least : 0);
  }
#pragma unroll
  for (int j = 0; j < OWN; ++j)
    if (key[j] != 0) sh.taken[tid + j * kProbeThreads] = key[j] > last;
  __syncthreads();

  uint32_t mine = 0;
  for_runs([&](uint32_t r, const uint32_t(&c)[kProbeRun], uint32_t within) {
    uint32_t taken = 0;
#pragma unroll
    for (int k = 0; k < (int)kProbeRun; ++k)
      if (within >> k & 1) taken |= (uint32_t)sh.taken[c[k]] << k;
    masks[r * kProbeThreads + tid] = taken;
    mine += __popc(taken);
  });
  // What each warp has found goes to all blocks of the list, so that everyone knows where its own begins.
  uint32_t at = warp_upto(mine);
  const uint32_t found = __shfl_sync(~0u, at, 31);
  at -= mine;
  cluster_wait();
  if (lane < team) write_in_block(sh.found[rank][warp], lane, found);
  cluster_release();
  cluster_wait();
  constexpr uint32_t kLanes = kProbeWarps / 4;  // of a block's warps, four a lane
  static_assert(kProbeTeam * kLanes == 32);
  const uint32_t of = lane / kLanes, four = lane % kLanes * 4;
  uint4 n = *reinterpret_cast<const uint4*>(&sh.found[of][four]);
  if (of >= team) n = make_uint4(0, 0, 0, 0);
  const uint32_t all = __reduce_add_sync(~0u, n.x + n.y + n.z + n.w);
  auto earlier = [&](uint32_t w, uint32_t n) { return of < rank || (of == rank && w < warp) ? n : 0; };
  at += __reduce_add_sync(~0u, earlier(four, n.x) + earlier(four + 1, n.y) + earlier(four + 2, n.z) + earlier(four + 3, n.w));
  uint32_t* ids = p.token_ids + (uint64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t r = 0; r < own && tid * own + r < count; ++r)
    for (uint32_t taken = masks[r * kProbeThreads + tid]; taken; taken &= taken - 1, ++at)
      if (at < (uint32_t)p.capacity) ids[at] = (begin + tid * own + r) * kProbeRun + __ffs(taken) - 1;
  if (tid == 0 && rank == 0) {
    w.token_first = list * p.capacity;
    w.token_count = min(all, (uint32_t)p.capacity);
  }
}

}  // namespace taper
