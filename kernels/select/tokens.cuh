// The tokens of each list that cost less to read than to sample around, by their quantized keys: scored and chosen in
// one launch.
//
// A team of thread blocks has a list. Each warp scores cache blocks beside one another and keeps their scores in shared
// memory, the last of them where its copies were; what does not fit goes to device memory. The team meets twice: for
// the heads' sums of exponentials, and for counts of shares, which also say how many tokens the blocks before choose.
// Words that they send each other carry their own flags.
//
// What is added up are whole numbers, so that a list's choice does not depend on who added them: on its team or batch.
#pragma once

#include <stddef.h>

#include "../common/scan.cuh"
#include "../common/team.cuh"
#include "../common/warp.cuh"
#include "../common/worklist.cuh"
#include "../score/quantized.cuh"
#include "ordered.cuh"
#include "paying.cuh"

namespace taper {

using TokensParams = TaperPickTokensParams;

constexpr int kTokenStages = 2, kTokenBinCopies = 4;
constexpr uint64_t kMassFlag = 1ull << 63;
constexpr uint32_t kBinFlag = 1u << 31;
// Registers of two tiles of heads leave room for half of the warps.
__host__ __device__ constexpr int token_warps(int heads) { return heads <= 8 ? 16 : 8; }

// A sum of powers of two: sums[i] in units of 2^(16 (top - i) - 20).
struct Mass {
  int top;
  uint64_t sums[3];
};
constexpr int kNoMass = -(1 << 28), kMassIsNone = 1 << 28;  // nothing yet; not a number

// Adds what a few tokens have, the `sum` of powers of two relative to `most`.
__device__ __forceinline__ void add(Mass& to, float most, float sum) {
  const bool none = !(most < 8388608.f && sum < INFINITY);
  const int octave = __float2int_rd(most);
  // Nothing of a lane that sees no token, wherever the others are.
  const int at = none ? kMassIsNone : sum == 0.f ? kNoMass : octave >> 4;
  uint64_t x = (uint64_t)__float2uint_rn(sum * exp2_fast(most - octave) * 1048576.f) << (octave & 15);
  if (at != to.top) {
    const int by = abs(at - to.top);
    if (at > to.top) {
      to.sums[2] = by == 1 ? to.sums[1] : by == 2 ? to.sums[0] : 0;
      to.sums[1] = by == 1 ? to.sums[0] : 0;
      to.sums[0] = 0, to.top = at;
    } else {
      to.sums[1] += by == 1 ? x : 0, to.sums[2] += by == 2 ? x : 0;
      x = 0;
    }
  }
  to.sums[0] += x;
}
// By a whole warp: the masses of lanes that are a multiple of FROM apart, added up but for what lies under the three
// parts that count then. Short loops: code that is run once is waited for.
template <int FROM>
__device__ __forceinline__ Mass merged(const Mass& own) {
  Mass all{own.top, {}};
  if constexpr (FROM == 1) {
    all.top = __reduce_max_sync(~0u, own.top);
  } else {
#pragma unroll 1
    for (int d = FROM; d < 32; d *= 2) all.top = max(all.top, __shfl_xor_sync(~0u, all.top, d));
  }
  const int down = all.top - own.top;
#pragma unroll
  for (int i = 0; i < 3; ++i)
#pragma unroll
    for (int j = 0; j <= i; ++j)
      if (down == i - j) all.sums[i] = own.sums[j];
  if constexpr (FROM == 1) {
    // By 26 bits, of which 32 lanes' sums fit into words.
    constexpr uint32_t kLow = (1u << 26) - 1;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint64_t x = all.sums[i];
      const uint32_t a = __reduce_add_sync(~0u, (uint32_t)x & kLow), b = __reduce_add_sync(~0u, (uint32_t)(x >> 26) & kLow),
                     c = __reduce_add_sync(~0u, (uint32_t)(x >> 52));
      all.sums[i] = a + ((uint64_t)b << 26) + ((uint64_t)c << 52);
    }
  } else {
#pragma unroll 1
    for (int d = FROM; d < 32; d *= 2)
#pragma unroll
      for (int i = 0; i < 3; ++i) all.sums[i] += __shfl_xor_sync(~0u, all.sums[i], d);
  }
  return all;
}
__device__ __forceinline__ float log2_of(const Mass& m) {
  const float sum = (float)m.sums[0] + (float)m.sums[1] * 0x1p-16f + (float)m.sums[2] * 0x1p-32f;
  return m.top < kMassIsNone && sum > 0.f ? 16.f * m.top - 20.f + __log2f(sum) : NAN;
}

template <int W, int G>
struct TokensShared {
  Mass masses[token_warps(G)][G];
  uint32_t bins[kPayBins][kTokenBinCopies];  // lanes that are as many apart count in one copy
  // What scores are multiplied by and what is then taken off.
  float scales[G], lse[G];
  float measured[kQuantizedMeasured][G];
  alignas(16) uint8_t steps[kQuantizedMeasured][32 * W];
  uint64_t told;  // a barrier at which the warps that measure arrive
  uint32_t own[token_warps(G)], before[kPayWarps], chosen[kPayWarps], place;
  PayShared paying;
};

// By a whole warp: a head's mass in all of the team, of which this block has `own`. `words` are those of rank 0,
// `pitch` apart.
__device__ __forceinline__ Mass exchanged(const Mass& own, uint64_t* words, uint32_t pitch, uint32_t rank,
                                          uint32_t team) {
  const int lane = threadIdx.x & 31;
  const uint64_t word = lane == 0   ? own.sums[0]
                        : lane == 1 ? own.sums[1]
                        : lane == 2 ? own.sums[2]
                                    : (uint64_t)(uint32_t)own.top;
  if (lane < 4) store_relaxed(words + rank * pitch + lane, word | kMassFlag);
  Mass theirs{kNoMass, {}};
  if (lane < team) {
    const uint64_t* from = words + lane * pitch;
    ulonglong2 a, b;
    do a = load_relaxed(from), b = load_relaxed(from + 2);
    while (!(a.x & a.y & b.x & b.y & kMassFlag));
    theirs = Mass{(int)(uint32_t)b.y, {a.x & ~kMassFlag, a.y & ~kMassFlag, b.x & ~kMassFlag}};
  }
  __syncwarp();
  return merged<1>(theirs);
}

template <class T, int W, int G>
__global__ void __launch_bounds__(token_warps(G) * 32, 1) tokens_kernel(const TokensParams p, uint32_t kept) {
  using Scorer = QuantizedScorer<T, W, G>;
  constexpr int kWarps = token_warps(G), NT = Scorer::NT, kEach = Scorer::kEach;
  // Each warp's ring, then each warp's scores of its first `kept` blocks.
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ TokensShared<W, G> sh;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = lane & 3, line = lane >> 2;
  if (p.fresh <= 0) wait_for_predecessor();
  launch_dependents();
  if (tid == 0) {
    if (p.in_order) sh.place = team_place(p.sync);
    mbar_init(smem_u32(&sh.told), 32 * kQuantizedMeasured), mbar_init_fence();
  }
#pragma unroll 1
  for (int i = tid; i < kTokenBinCopies * kPayBins; i += kWarps * 32) (&sh.bins[0][0])[i] = 0;
  __syncthreads();
  const uint32_t team = p.team, group = p.group, most_team = p.room;
  uint32_t rank = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  if (p.in_order) {
    const uint32_t list = sh.place / team;
    rank = sh.place % team, kv_head = list % p.kv_heads, row = list / p.kv_heads;
  }
  const uint32_t list = row * p.kv_heads + kv_head;
  const uint32_t len = p.lens[row], blocks = (len + kBlock - 1) / kBlock;
  const uint32_t begin = p.begins[list], end = min(p.ends[list], len), n = end > begin ? end - begin : 0;
  // What the list is told of its `k` tokens.
  auto tell = [&](uint32_t k) {
    if (rank > 0 || tid >= 16) return;
    uint32_t word = reinterpret_cast<const uint32_t*>(p.lists + list)[tid];
    if (tid == offsetof(WorkList, token_first) / 4) word = list * p.capacity;
    if (tid == offsetof(WorkList, token_count) / 4) word = k;
    reinterpret_cast<uint32_t*>(p.work + list)[tid] = word;
  };
  if (n == 0) {
    wait_for_predecessor();
    tell(0);
    return;
  }

  // Blocks from the warp's first on.
  const uint32_t at = rank * kWarps + warp, each = blocks / (team * kWarps), more = blocks - each * (team * kWarps);
  const uint32_t first = at * each + min(at, more), runs = each + (at < more);
  const uint32_t settled = p.fresh > 0 ? len - min((uint32_t)p.fresh, len) : ~0u;
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  uint8_t* const ring = rings + warp * kTokenStages * Scorer::kBytes;
  Scorer scorer{smem_u32(ring), lane, quad, line};
  // All that waits for nothing else is asked for first.
  uint32_t named = table[min(first + lane, blocks - 1)], tells = 0;
  const uint32_t telling = measured_block(warp, blocks);
  if (warp < kQuantizedMeasured) tells = table[telling];
  typename Scorer::Raw raw;
  scorer.load_queries(raw, static_cast<const T*>(p.q) + ((int64_t)row * p.q_heads + kv_head * group) * 16 * W, group);
  // Runs from this one on may be in the making.
  const uint32_t unsettled = max(settled / kBlock, first) - first;
  const uint64_t pitch = p.kv_heads * Scorer::kBytes;
  const uint8_t* const own_index = reinterpret_cast<const uint8_t*>(p.index) + kv_head * Scorer::kBytes + 16 * lane;
  auto fetch = [&](uint32_t run) {
    if (run < runs) {
      if (run > 0 && run % 32 == 0) named = table[min(first + run + lane, blocks - 1)];
      const uint32_t block = __shfl_sync(~0u, named, run % 32);
      if (run >= unsettled) wait_for_predecessor();
      scorer.fetch(run % kTokenStages, own_index + block * pitch);
    }
    cp_async_commit();
  };
  if (warp < kQuantizedMeasured) {
    if ((telling + 1) * kBlock > settled) wait_for_predecessor();
    const uint8_t* const from = own_index + tells * pitch + Scorer::kStepsAt;
    if (lane < 2 * W) cp_async16(smem_u32(sh.steps[warp]) + 16 * lane, from);
  }
#pragma unroll 1
  for (uint32_t run = 0; run < kTokenStages - 1; ++run) fetch(run);
  scorer.take(raw);
  if (warp < kQuantizedMeasured) {
    cp_async_wait<kTokenStages - 2>();
    __syncwarp();
    typename Scorer::Steps steps;
    scorer.load_steps(steps, sh.steps[warp]);
    scorer.measure(steps, sh.measured[warp]);
    mbar_arrive(smem_u32(&sh.told));
  }
  float scale[NT][kEach];
  // Products [group, 64] of a run.
  const uint32_t run_bytes = group * kBlock * 4;
  const uint32_t spare = kWarps * kTokenStages * Scorer::kBytes + warp * kept * run_bytes;
  uint32_t in_ring = runs;  // from this run on
  if (run_bytes <= Scorer::kBytes) in_ring = max(kept + kTokenStages, runs) - kTokenStages;
  auto place = [&](uint32_t run) -> float* {
    if (run >= kept && run < in_ring)
      return p.scores + ((int64_t)list * (p.stride / kBlock) + first + run) * group * kBlock;
    const uint32_t at = run < kept ? spare + run * run_bytes
                                   : (warp * kTokenStages + run % kTokenStages) * (uint32_t)Scorer::kBytes;
    return reinterpret_cast<float*>(rings + at);
  };
  Mass masses[NT][kEach];
#pragma unroll
  for (int t = 0; t < NT; ++t)
#pragma unroll
    for (int e = 0; e < kEach; ++e) masses[t][e] = Mass{kNoMass, {}};
#pragma unroll 1
  for (uint32_t run = 0; run < runs; ++run) {
    cp_async_wait<kTokenStages - 2>();
    __syncwarp();  // The whole warp's copies are there, and all have read what the next one is written over.
    fetch(run + kTokenStages - 1);
    float c[NT][4][4];
    scorer.score(c, run % kTokenStages);
    if (run == 0) {
      mbar_wait(smem_u32(&sh.told), 0);
      scorer.scales(scale, p.scale, sh.measured);
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 0; e < kEach; ++e) scale[t][e] *= kLog2e;
    }
    __syncwarp();  // All have read what scores may be written over.
    float* const to = place(run);
    // What others read until then lies where scores go, if they leave shared memory.
    if (run >= kept) wait_for_predecessor();
    scorer.hide(c, len - (first + run) * kBlock);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float v[8], top = -INFINITY, sum = 0.f;
#pragma unroll
        for (int s = 0; s < 8; ++s) v[s] = c[t][s / 2][2 * (s & 1) + e], top = fmaxf(top, v[s]);
        const uint32_t h = scorer.head(t, e);
        if (h < group) {
          float4* const lines = reinterpret_cast<float4*>(to + h * kBlock + 4 * line);
          lines[0] = make_float4(v[0], v[1], v[2], v[3]);
          lines[8] = make_float4(v[4], v[5], v[6], v[7]);
        }
        // A lane may see nothing of a last block.
        const float base = top == -INFINITY ? 0.f : top * scale[t][e];
#pragma unroll
        for (int s = 0; s < 8; ++s) sum += exp2_fast(fmaf(v[s], scale[t][e], -base));
        add(masses[t][e], base, sum);
      }
  }
#pragma unroll
  for (int t = 0; t < NT; ++t)
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Mass own = merged<4>(masses[t][e]);
      if (line == 0) {
        sh.masses[warp][scorer.head(t, e)] = own;
        if (warp == 0) sh.scales[scorer.head(t, e)] = scale[t][e];
      }
    }
  wait_for_predecessor();  // Who waits for this launch has waited for that one too.
  __syncthreads();
  uint64_t* const sums = p.sums + (uint64_t)list * most_team * group * 4;
#pragma unroll 1
  for (uint32_t h = warp; h < group; h += kWarps) {
    Mass own{kNoMass, {}};
    if (lane < kWarps) own = sh.masses[lane][h];
    own = merged<1>(own);
    if (team > 1) own = exchanged(own, sums + h * 4, group * 4, rank, team);
    if (lane == 0) sh.lse[h] = log2_of(own);
  }
  __syncthreads();

  // A key takes its first head's place. HEADS: how many, or 0.
  uint32_t* const own_bins = &sh.bins[0][lane % kTokenBinCopies];
  auto count_shares = [&](auto heads) {
    constexpr uint32_t HEADS = decltype(heads)::value;
    constexpr int kAtOnce = HEADS ? HEADS : 1;
#pragma unroll 1
    for (uint32_t run = 0; run < runs; ++run) {
      float* const x = place(run);
      float share[2] = {};
#pragma unroll kAtOnce
      for (uint32_t h = 0; h < (HEADS ? HEADS : group); ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float one = exp2_fast(fmaf(x[h * kBlock + 32 * half + lane], sh.scales[h], -sh.lse[h]));
          share[half] = h == 0 ? one : p.reduce == TAPER_MAX_OF_GROUP ? fmaxf(share[half], one) : share[half] + one;
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t token = (first + run) * kBlock + 32 * half + lane;
        const uint32_t key = token >= begin && token < end ? ordered(share[half]) : 0;
        if (pay_counts(key)) atomicAdd(own_bins + pay_bin(key) * kTokenBinCopies, 1u);
        x[32 * half + lane] = __uint_as_float(key);
      }
    }
  };
  if (group == 4) count_shares(std::integral_constant<uint32_t, 4>{});
  else count_shares(std::integral_constant<uint32_t, 0>{});
  __syncthreads();
  uint32_t count = 0, before = 0;
  uint32_t* const bins = p.bins + (uint64_t)list * most_team * kPayBins;
  // Where there are threads enough, two have a bin, of eight ranks at a time each.
  constexpr uint32_t kParts = kWarps / kPayWarps;
  const uint32_t bin = kPayBins - 1 - tid % kPayBins, part = tid / kPayBins;
  uint32_t own_bin = 0;
#pragma unroll
  for (int i = 0; i < kTokenBinCopies; ++i) own_bin += sh.bins[bin][i];
  if (team == 1) {
    count = own_bin;
  } else {
    if (part == 0) store_relaxed(bins + rank * kPayBins + bin, own_bin | kBinFlag);
#pragma unroll 1
    for (uint32_t r = 8 * part; r < team; r += 8 * kParts) {
      uint32_t x[8], all;
      do {
        all = kBinFlag;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) x[i] = r + i < team ? load_relaxed(bins + (r + i) * kPayBins + bin) : kBinFlag;
#pragma unroll
        for (int i = 0; i < 8; ++i) all &= x[i];
      } while (!all);
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        count += x[i] & ~kBinFlag;
        if (r + i < rank) before += x[i] & ~kBinFlag;
      }
    }
    if constexpr (kParts > 1) {
      uint2* const more = reinterpret_cast<uint2*>(sh.masses);  // which nobody reads any more
      static_assert(kParts == 2 && sizeof(sh.masses) >= kPayBins * sizeof(uint2), "room for a second part");
      if (part > 0) more[tid - kPayBins] = make_uint2(count, before);
      __syncthreads();
      if (part == 0) count += more[tid].x, before += more[tid].y;
    }
  }
  const uint32_t most = min(min(p.ks[list], n), (uint32_t)p.capacity);
  const uint32_t least = least_paying(count, n, most, p.noise, sh.paying);
  if (tid < kPayBins) {
    const bool taken = tid < sh.paying.failing;
    before = __reduce_add_sync(~0u, taken ? before : 0), count = __reduce_add_sync(~0u, taken ? count : 0);
    if (lane == 0) sh.before[warp] = before, sh.chosen[warp] = count;
  }
  // Which of sixteen runs' tokens are chosen: 32 of them a lane.
  auto chosen = [&](uint32_t from) {
    uint32_t mask = 0;
#pragma unroll 1
    for (uint32_t run = from; run < min(from + 16, runs); ++run) {
      const float* const x = place(run);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t all = __ballot_sync(~0u, __float_as_uint(x[32 * half + lane]) >= least);
        if (lane == 2 * (run - from) + half) mask = all;
      }
    }
    return mask;
  };
  uint32_t mask = chosen(0), own = __popc(mask);
#pragma unroll 1
  for (uint32_t from = 16; from < runs; from += 16) own += __popc(chosen(from));
  own = __reduce_add_sync(~0u, own);
  if (lane == 0) sh.own[warp] = own;
  __syncthreads();
  // The whole block has read what the others sent.
  const bool leaves = team > 1 && warp == kWarps - 1;
  uint32_t left_before = 0;
  if (leaves && lane == 0) left_before = add_acq_rel(p.sync + (1 + list) * kTeamLine, 1);
  const uint32_t earlier = lane < kPayWarps ? sh.before[lane] : 0, beside = lane < warp ? sh.own[lane] : 0;
  uint32_t to = __reduce_add_sync(~0u, earlier + beside);
  const uint32_t k = __reduce_add_sync(~0u, lane < kPayWarps ? sh.chosen[lane] : 0);
  uint32_t* const ids = p.ids + (int64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t from = 0; from < runs; from += 16) {
    if (from > 0) mask = chosen(from);
    uint32_t mine = warp_upto<uint32_t>(__popc(mask));
    const uint32_t all = __shfl_sync(~0u, mine, 31);
    mine += to - __popc(mask);
    for (; mask; mask &= mask - 1, ++mine)
      if (mine < p.capacity) ids[mine] = (first + from) * kBlock + 32 * lane + __ffs(mask) - 1;
    to += all;
  }
  tell(k);
  // The last block to leave tidies up.
  if (team == 1) return;
  if (leaves && lane == 0) sh.place = left_before;
  __syncthreads();
  if (sh.place < team - 1) return;
  auto clear = [&](void* words, uint32_t count) {
#pragma unroll 1
    for (uint32_t i = tid; i < count / 4; i += kWarps * 32) static_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
  };
  clear(sums, team * group * 8), clear(bins, team * kPayBins);
  if (tid == 0) p.sync[(1 + list) * kTeamLine] = 0;
}

}  // namespace taper
