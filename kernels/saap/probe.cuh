// Whole clusters by how likely they are, as many as a limit on their tokens allows: the exact counterpart of a
// choice that may not take what it likes. A list has a cluster of thread blocks, each with a share of the tokens between the
// list's two ranges: they count the clusters' tokens, if there could be too many, find which clusters are taken, each for
// itself, and write the tokens of those, ascending. What runs once runs at the rate at which its code comes: loops stay loops.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/scan.cuh"
#include "../common/warp.cuh"
#include "../common/worklist.cuh"
#include "../select/cluster.cuh"

namespace taper {

using ProbeParams = TaperProbeParams;

constexpr int kProbeThreads = 512, kProbeWarps = kProbeThreads / 32, kProbeMost = 4096, kProbeSmem = 220 * 1024;
constexpr int kProbeShare = 8192, kProbeTeam = 8;  // tokens a thread block, where they are few; most blocks of a list
constexpr uint32_t kProbeRun = 8;                  // neighbouring tokens, whose clusters are one load
constexpr int kProbeHeads = 4;                     // whose softmax is computed side by side
constexpr int kProbeBinBits = 10, kProbeBins = 1 << kProbeBinBits, kProbeFew = 32;
constexpr int kProbeIds = 65536;     // what a token's cluster can be, of which some may be none
constexpr uint32_t kProbeAhead = 8;  // runs of a thread that are asked for together, a line of memory

struct ProbeShared {
  alignas(16) uint32_t held[kProbeBins];  // weights of the keys in bins
  uint64_t few[kProbeFew];                // keys of one bin, and their weights
  uint32_t few_held[kProbeFew], few_count;
  uint32_t low[kProbeWarps], high[kProbeWarps];  // bits of masses
  alignas(16) uint32_t found[kProbeTeam][kProbeWarps];        // tokens taken by each warp of each block
  float top[2][kProbeHeads][kProbeWarps], sum[2][kProbeHeads][kProbeWarps];  // logits and exponentials, by turns
  uint32_t size[kProbeMost];                                // the share's tokens of each cluster
  uint32_t taken[kProbeIds / 32];                           // a bit for each
  alignas(16) uint4 ids[kProbeWarps][32][kProbeAhead + 1];  // clusters of some of each thread's runs, apart by other banks
  // Behind it: of each run of the share which tokens are taken, a bit each.
};

// What each head's exponentials by the warp's own largest logit are to be multiplied by. The warps meet once, in `tops` and
// `sums`, so that equal logits of two warps may differ in the last place of their masses, always alike.
__device__ __forceinline__ void over_warps(const float (&top)[kProbeHeads], const float (&sum)[kProbeHeads],
                                           float (&tops)[kProbeHeads][kProbeWarps], float (&sums)[kProbeHeads][kProbeWarps],
                                           float (&factor)[kProbeHeads]) {
  static_assert(kProbeHeads == 4 && kProbeWarps == 16);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int g = 0; g < kProbeHeads; ++g)
    if (lane == g) tops[g][warp] = top[g], sums[g][warp] = sum[g];
  __syncthreads();
  float own[2];  // of a warp in the first two heads, and in the others
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float t = (&tops[2 * i][0])[lane];
    float most = t;
#pragma unroll
    for (int d = 1; d < kProbeWarps; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    own[i] = t == -INFINITY ? 0.f : exp2_fast((t - most) * kLog2e);
    float all = own[i] * (&sums[2 * i][0])[lane];
#pragma unroll
    for (int d = 1; d < kProbeWarps; d *= 2) all += __shfl_xor_sync(~0u, all, d);
    own[i] = __fdividef(own[i], all);
  }
#pragma unroll
  for (int g = 0; g < kProbeHeads; ++g) factor[g] = __shfl_sync(~0u, own[g / 2], kProbeWarps * (g % 2) + warp);
}

__device__ __forceinline__ void clear_bins(ProbeShared& sh) {
#pragma unroll
  for (int i = 0; i < kProbeBins / kProbeThreads; ++i) sh.held[threadIdx.x + i * kProbeThreads] = 0;
  if (threadIdx.x == 0) sh.few_count = 0;
}

// A cluster's place among all: by its mass, whose bits order as numbers do that are not negative, of equals the first. 0 is none.
__device__ __forceinline__ uint64_t probe_key(float mass, uint32_t cluster) {
  return (uint64_t)__float_as_uint(mass) << 13 | (kProbeMost - cluster);
}

// Below all keys, and how many bits there are from it to the largest one.
template <int N>
__device__ __forceinline__ uint64_t spread_of(const uint64_t (&keys)[N], ProbeShared& sh, int& bits) {
  const int lane = threadIdx.x & 31;
  uint32_t low = ~0u, high = 0;
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (keys[j] != 0) low = min(low, (uint32_t)(keys[j] >> 13)), high = max(high, (uint32_t)(keys[j] >> 13));
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (lane == 0) sh.low[threadIdx.x >> 5] = low, sh.high[threadIdx.x >> 5] = high;
  __syncthreads();
  low = __reduce_min_sync(~0u, sh.low[lane % kProbeWarps]), high = __reduce_max_sync(~0u, sh.high[lane % kProbeWarps]);
  bits = 64 - __clzll((uint64_t)(high - low) << 13 | kProbeMost);
  return (uint64_t)low << 13;
}

// Keys, of which no two are equal and 0 is none, are taken from the largest on, as long as their weights come to no more than
// `limit`: the first one that is not, 0 if all are. By bins, which are empty before it, from `base` on to the power of two that
// `bits` say, then by those within one, until its keys are few.
template <int N>
__device__ __forceinline__ uint64_t first_left(const uint64_t (&keys)[N], const uint32_t (&weights)[N], uint32_t limit,
                                               uint64_t base, int bits, ProbeShared& sh) {
  const int lane = threadIdx.x & 31;
  uint32_t in = 0, size;
#pragma unroll
  for (int j = 0; j < N; ++j) in |= (uint32_t)(keys[j] != 0) << j;
#pragma unroll 1
  for (int shift = max(bits - kProbeBinBits, 0);; shift = max(shift - kProbeBinBits, 0)) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (in >> j & 1) atomicAdd(&sh.held[(keys[j] - base) >> shift], weights[j]);
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
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if ((keys[j] - base) >> shift != bin) in &= ~(1u << j);
      if (in >> j & 1) {
        const uint32_t to = atomicAdd(&sh.few_count, 1u);
        if (to < kProbeFew) sh.few[to] = keys[j], sh.few_held[to] = weights[j];
      }
    }
    __syncthreads();
    size = sh.few_count;
    if (size <= kProbeFew) break;
    base += (uint64_t)bin << shift;
    __syncthreads();
    clear_bins(sh);
    __syncthreads();
  }
  const uint64_t mine = lane < size ? sh.few[lane] : 0;
  uint32_t over = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < size; ++i) over += sh.few[i] > mine ? sh.few_held[i] : 0;
  const bool passes = lane < size && over <= limit && over + sh.few_held[lane] > limit;
  return __shfl_sync(~0u, mine, __ffs(__ballot_sync(~0u, passes)) - 1);
}

// OWN: clusters of which a thread speaks.
template <int OWN>
__global__ void __launch_bounds__(kProbeThreads, 1) probe_kernel(const ProbeParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  ProbeShared& sh = *reinterpret_cast<ProbeShared*>(raw);
  uint8_t* masks = raw + sizeof(ProbeShared);
  const uint32_t team = cluster_size(), rank = cluster_rank();
  const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, list = blockIdx.x / team, clusters = p.clusters;
  const uint32_t row = list / p.kv_heads, kv_head = list % p.kv_heads, group = p.q_heads / p.kv_heads;
  clear_bins(sh);
#pragma unroll 1
  for (uint32_t c = tid; c < clusters; c += kProbeThreads) sh.size[c] = 0;
#pragma unroll 1
  for (int i = tid; i < kProbeIds / 32; i += kProbeThreads) sh.taken[i] = 0;
  const WorkList& given = p.lists[list];
  const uint32_t from = given.end[0], to = given.begin[1], limit = p.limits[list];
  wait_for_predecessor();
  launch_dependents();
  // What the list is told of its tokens.
  auto tell = [&](uint32_t count) {
    if (rank > 0 || tid >= 16) return;
    uint32_t word = reinterpret_cast<const uint32_t*>(&given)[tid];
    if (tid == offsetof(WorkList, token_first) / 4) word = list * p.capacity;
    if (tid == offsetof(WorkList, token_count) / 4) word = count;
    reinterpret_cast<uint32_t*>(p.work + list)[tid] = word;
  };
  if (from >= to) return tell(0);
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  // Runs of the share; `own` neighbouring ones are a thread's.
  const uint32_t first_run = from / kProbeRun, runs = (to + kProbeRun - 1) / kProbeRun - first_run;
  const uint32_t each = (runs + team - 1) / team, begin = first_run + min(rank * each, runs);
  const uint32_t count = first_run + min((rank + 1) * each, runs) - begin;
  const uint32_t own = (each + kProbeThreads - 1) / kProbeThreads;
  const uint32_t mine = tid * own, end = min(mine + own, count);
  // Has the clusters of all threads' runs from the `round`-th on copied to shared memory, a thread's by eight lanes together. They
  // lie in two blocks at most.
  static_assert(kProbeAhead == 8 && kProbeAhead * kProbeRun <= kBlock);
  uint32_t asked = ~0u;
  auto ask = [&](uint32_t round) {
    constexpr uint32_t kRuns = kBlock / kProbeRun;
    asked = round;
    const uint32_t first = mine + round, stop = min(first + kProbeAhead, end);
    uint32_t blocks[2] = {};
    if (first < stop) blocks[0] = table[(begin + first) / kRuns], blocks[1] = table[(begin + stop - 1) / kRuns];
#pragma unroll 2
    for (uint32_t i = 0; i < 32; i += 4) {
      const uint32_t of = i + lane / 8, run = __shfl_sync(~0u, first, of) + lane % 8, until = __shfl_sync(~0u, stop, of);
      const uint32_t one = __shfl_sync(~0u, blocks[0], of), other = __shfl_sync(~0u, blocks[1], of);
      const uint32_t at = begin + run, block = at / kRuns == (at - lane % 8) / kRuns ? one : other;
      if (run < until)
        cp_async16(smem_u32(&sh.ids[warp][of][lane % 8]),
                   p.ids + (uint64_t)((block * p.kv_heads + kv_head) * kRuns + at % kRuns) * kProbeRun);
    }
  };
  // f(a run, clusters of its tokens, which of them lie between the ranges).
  auto for_runs = [&](auto f) {
#pragma unroll 1
    for (uint32_t round = 0; round < own; round += kProbeAhead) {
      __syncwarp();  // What was there has been read.
      if (round != asked) ask(round);
      cp_async_wait_all();
      __syncwarp();
      const uint32_t first = mine + round, stop = min(first + kProbeAhead, end);
#pragma unroll 1
      for (uint32_t r = first; r < stop; ++r) {
        const uint4 ids = sh.ids[warp][lane][r - first];
        const uint32_t t = (begin + r) * kProbeRun, words[4] = {ids.x, ids.y, ids.z, ids.w};
        uint32_t c[kProbeRun];
#pragma unroll
        for (int k = 0; k < (int)kProbeRun; ++k) c[k] = k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xffff;
        uint32_t within = 0xff;
        if (t < from) within &= 0xffu << (from - t);
        if (t + kProbeRun > to) within &= 0xffu >> (t + kProbeRun - to);
        f(r, c, within);
      }
    }
  };
  const bool counts = limit < to - from;

  // The group's probability of each cluster, some heads at a time.
  float mass[OWN] = {};
#pragma unroll 1
  for (uint32_t g0 = 0, turn = 0; g0 < group; g0 += kProbeHeads, turn ^= 1) {
    const float* logits = p.logits + ((uint64_t)row * p.q_heads + kv_head * group + g0) * clusters;
    float x[kProbeHeads][OWN], top[kProbeHeads], sum[kProbeHeads], factor[kProbeHeads];
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const uint32_t c = tid + j * kProbeThreads;
        x[g][j] = g0 + g < group && c < clusters ? logits[(uint64_t)g * clusters + c] : -INFINITY;
      }
    if (g0 == 0) ask(0);  // On their way while probabilities are made.
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g) {
      top[g] = x[g][0];
#pragma unroll
      for (int j = 1; j < OWN; ++j) top[g] = fmaxf(top[g], x[g][j]);
      top[g] = warp_max(top[g]);
      const float base = top[g] == -INFINITY ? 0.f : top[g];
      sum[g] = 0.f;
#pragma unroll
      for (int j = 0; j < OWN; ++j) sum[g] += x[g][j] = exp2_fast((x[g][j] - base) * kLog2e);
      sum[g] = warp_sum(sum[g]);
    }
    over_warps(top, sum, sh.top[turn], sh.sum[turn], factor);
#pragma unroll
    for (int g = 0; g < kProbeHeads; ++g)
#pragma unroll
      for (int j = 0; j < OWN; ++j) mass[j] += g0 + g < group ? x[g][j] * factor[g] : 0.f;
  }
  uint64_t key[OWN];
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const uint32_t c = tid + j * kProbeThreads;
    key[j] = c < clusters ? probe_key(mass[j], c) : 0;
  }

  uint32_t held[OWN] = {};
  if (counts) {
    // All have cleared their counts: they have met over the logits.
    for_runs([&](uint32_t, const uint32_t(&c)[kProbeRun], uint32_t within) {
#pragma unroll
      for (int k = 0; k < (int)kProbeRun; ++k)
        if (c[k] >= clusters) within &= ~(1u << k);
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
    cluster_release();
  } else {
    cluster_arrive();
  }
  // Waited for before others are written to: all have begun then, and have read what they count.
  int bits;
  const uint64_t base = spread_of(key, sh, bits);
  // Taken are those above it: by how many there are, then by their tokens.
  uint64_t last = counts && p.at_least && limit == 0 ? ~0ull : 0;
#pragma unroll 1
  for (bool tokens = (uint32_t)p.most >= clusters, again = false; last != ~0ull && (!tokens || counts); tokens = true) {
    if (again) {
      __syncthreads();
      clear_bins(sh);
      __syncthreads();
    }
    uint32_t weights[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) weights[j] = tokens ? held[j] : 1;
    // At least so many tokens: the first cluster too with which they are more than one less.
    const uint32_t least = tokens ? p.at_least : 0;
    const uint64_t left = first_left(key, weights, tokens ? limit - least : (uint32_t)p.most, base, bits, sh);
    last = max(last, left > 0 ? left - least : 0);
    again = true;
    if (tokens) break;
  }
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const uint32_t taken = __ballot_sync(~0u, key[j] != 0 && key[j] > last);
    if (lane == 0) sh.taken[j * kProbeWarps + warp] = taken;
  }
  __syncthreads();

  uint32_t taken_here = 0;
  for_runs([&](uint32_t r, const uint32_t(&c)[kProbeRun], uint32_t within) {
    uint32_t taken = 0;
#pragma unroll
    for (int k = 0; k < (int)kProbeRun; ++k) {
      const uint32_t word = sh.taken[c[k] / 32];
      taken |= (__funnelshift_r(word, word, c[k]) & 1) << k;
    }
    taken &= within;
    masks[(r - mine) * kProbeThreads + tid] = taken;
    taken_here += __popc(taken);
  });
  // What each warp has found goes to all blocks of the list, so that everyone knows where its own begins.
  uint32_t at = warp_upto(taken_here);
  const uint32_t found = __shfl_sync(~0u, at, 31);
  at -= taken_here;
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
  for (uint32_t r = mine; r < end; ++r)
#pragma unroll 1
    for (uint32_t taken = masks[(r - mine) * kProbeThreads + tid]; taken; taken &= taken - 1, ++at)
      if (at < (uint32_t)p.capacity) ids[at] = (begin + r) * kProbeRun + __ffs(taken) - 1;
  tell(min(all, (uint32_t)p.capacity));
}

}  // namespace taper
