// The pages that a group of query heads wants most, scored and chosen in one launch.
//
// A team of thread blocks scores a list's pages against their bounds. What counts is the best of the
// group's heads, or the sum of their shares of the mass, for which the team meets: shares need the logarithm of
// each head's sum of exponentials over all pages. Whichever block of the team is done last chooses. Keys are
// counted in bins between the smallest and the largest, then in the bin that holds the last one
// to take, and so on: two or three rounds, where bits from the top would need four and meet in
// few bins. Ties go to the lower id, as everywhere.
#pragma once

#include "../common/scan.cuh"
#include "../common/team.cuh"
#include "../common/warp.cuh"
#include "../common/worklist.cuh"
#include "../score/view.cuh"
#include "ordered.cuh"
#include "paying.cuh"

namespace taper {

using PickParams = TaperPickParams;

constexpr int kPickThreads = 512, kPickWarps = kPickThreads / 32, kPickBins = 2 * kPickThreads;
constexpr int kPickMost = 32768;

// Pages of all layers may be chosen by one launch, where their queries are known before: then there are lists enough to fill
// the device, and thread blocks that go on by themselves.
//
// Thread blocks of a list's team, by the pages that its row sees: a warp for every sixteen of them, up to a whole team.
__host__ __device__ inline int pick_team(int kv_heads, uint32_t entries) {
  const int most = team_size(kv_heads), wanted = (int)((entries + 16 * kPickWarps - 1) / (16 * kPickWarps));
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}
// Pages that a thread block of that rank scores, of `entries`: every team-th sixteen of them. The first has the most.
__host__ __device__ inline uint32_t pick_share(uint32_t entries, uint32_t team, uint32_t rank = 0) {
  return ((entries + 15) / 16 + team - 1 - rank) / team * 16;
}

// Where the i-th four of keys lie: a thread that walks over neighbouring ones shares no bank with its neighbours.
__host__ __device__ inline uint32_t pick_place(uint32_t four) { return four + four / 8; }

struct PickShared {
  uint32_t bins[kPickBins], scratch[33], least, most, found_bin, found_need, found_size, last, place;
  uint32_t first_id, last_id;
  alignas(16) WorkList given;  // the list as it was given
  float lse[16];
  float2 warps[16][kPickWarps];  // of each head, the largest score of each warp and the sum of powers of two relative to it
  PayShared paying;
};

// A list, and the block's place in its team.
struct PickPlace {
  uint32_t team, room, list, rank, row, kv_head, group;  // room: members that a list has room for in scratch
  uint32_t given;                   // the list's place among its layer's
  const void *upper, *lower;        // the layer's bounds
  uint32_t entries, begin, end, n;  // pages seen, and the candidates among them
  uint32_t settled;                 // pages from this one on may be in the making until the launch ahead has ended
};

// By a whole warp: the logarithm of the lanes' sums of powers of two, which are relative to `base`.
__device__ __forceinline__ float logarithm(float base, float sum) {
  sum = warp_sum(sum);
  return sum > 0.f ? base + __log2f(sum) : -INFINITY;
}

// Scores the block's tiles of 16 pages among the `n` from page `begin` on: f(scores, which of the block's tiles, its first
// page less `begin`) by a warp. Where the next ones lie is looked up meanwhile.
template <class View, class F>
__device__ __forceinline__ void score_tiles(const PickParams& p, const PickPlace& at, const View& view, uint32_t begin,
                                            uint32_t n, F f) {
  constexpr int NT = View::kColumns / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto first_of = [&](uint32_t tile) { return (at.rank + tile * at.team) * 16; };
  // Lanes 0 to 15 know the rows of one tile, the others those of the warp's next.
  auto look_up = [&](uint32_t tile) {
    const uint32_t mine = first_of(lane < 16 ? tile : tile + kPickWarps);
    return (uint32_t)view.place(begin + mine + (lane & 15));
  };
  if (first_of(warp) >= n) return;
  uint32_t rows = look_up(warp);
#pragma unroll 1
  for (uint32_t tile = warp; first_of(tile) < n; tile += 2 * kPickWarps) {
    const uint32_t next = look_up(tile + 2 * kPickWarps);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t own = tile + half * kPickWarps, first = first_of(own);
      if (first >= n) break;
      if (begin + first + 16 > at.settled) wait_for_predecessor();
      const uint32_t a = __shfl_sync(~0u, rows, half * 16 + lane / 4), b = __shfl_sync(~0u, rows, half * 16 + lane / 4 + 8);
      typename View::Rows upper, lower;
      view.fetch_lines(upper, at.upper, a, b);
      view.fetch_lines(lower, at.lower, a, b);
      float c[NT][4] = {};
      view.multiply(c, upper, true);
      view.multiply(c, lower, false);
      f(c, own, first);
    }
    rows = next;
  }
}

// Of each of the block's pages the best head's score becomes its key.
template <class View>
__device__ __forceinline__ void score_best(const PickParams& p, const PickPlace& at, const View& view, uint32_t* out) {
  constexpr int NT = View::kColumns / 8;
  const int lane = threadIdx.x & 31, quad = lane & 3;
  score_tiles(p, at, view, at.begin, at.n, [&](const float (&c)[NT][4], uint32_t, uint32_t first) {
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (t * 8 + 2 * quad + (i & 1) < at.group) best[i / 2] = fmaxf(best[i / 2], c[t][i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], d));
      const uint32_t e = first + lane / 4 + 8 * h;
      if (quad == 0 && e < at.n) out[e] = ordered(best[h]);
    }
  });
}

// Of each of the block's pages the heads' shares of the mass, added up or the largest, become its key. `scores`
// holds the block's own, times log2(e).
template <class View>
__device__ __forceinline__ void score_shares(const PickParams& p, const PickPlace& at, const View& view, float* scores,
                                             PickShared& sh, uint32_t* out) {
  constexpr int NT = View::kColumns / 8;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = lane & 3;
  const float scale2 = p.scale * kLog2e;
  float top[2 * NT], sum[2 * NT];  // of this lane's heads, over its rows
#pragma unroll
  for (int h = 0; h < 2 * NT; ++h) top[h] = -INFINITY, sum[h] = 0.f;
  score_tiles(p, at, view, 0, at.entries, [&](const float (&c)[NT][4], uint32_t tile, uint32_t first) {
#pragma unroll
    for (int k = 0; k < 2 * NT; ++k) {
      const uint32_t h = k / 2 * 8 + 2 * quad + k % 2;
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t row = lane / 4 + 8 * i;
        x[i] = first + row < at.entries ? c[k / 2][2 * i + k % 2] * scale2 : -INFINITY;
        if (h < at.group) scores[(tile * 16 + row) * at.group + h] = x[i];
      }
      const float most = fmaxf(top[k], fmaxf(x[0], x[1])), base = most == -INFINITY ? 0.f : most;
      sum[k] = sum[k] * exp2_fast(top[k] - base) + exp2_fast(x[0] - base) + exp2_fast(x[1] - base);
      top[k] = most;
    }
  });
#pragma unroll
  for (int k = 0; k < 2 * NT; ++k) {
    float most = top[k];
#pragma unroll
    for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    float all = sum[k] * exp2_fast(top[k] - (most == -INFINITY ? 0.f : most));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) all += __shfl_xor_sync(~0u, all, d);
    if (lane < 4) sh.warps[k / 2 * 8 + 2 * quad + k % 2][warp] = make_float2(most, all);
  }
  __syncthreads();
  // A warp a head; lane r speaks with rank r. A logarithm travels with its own flag.
  if (warp < at.group) {
    const float2 of = sh.warps[warp][lane % kPickWarps];
    const float most_here = warp_max(of.x), base = most_here == -INFINITY ? 0.f : most_here;
    const float own = logarithm(base, lane < kPickWarps ? of.y * exp2_fast(of.x - base) : 0.f);
    uint64_t* words = p.masses + ((uint64_t)at.list * at.room * at.group + warp) * 2;
    if (lane == 0) store_relaxed(words + at.rank * at.group * 2, (uint64_t)__float_as_uint(own) << 32 | 1);
    float theirs = -INFINITY;
    if (lane < at.team) {
      ulonglong2 word;
      do word = load_relaxed(words + lane * at.group * 2);
      while ((uint32_t)word.x == 0);
      theirs = __uint_as_float((uint32_t)(word.x >> 32));
    }
    __syncwarp();
    const float most = warp_max(theirs), from = most == -INFINITY ? 0.f : most;
    const float lse = logarithm(from, exp2_fast(theirs - from));
    if (lane == 0) sh.lse[warp] = lse;
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = tid; (at.rank + i / 16 * at.team) * 16 < at.entries; i += kPickThreads) {
    const uint32_t e = (at.rank + i / 16 * at.team) * 16 + i % 16;
    float share = 0.f;
    for (uint32_t h = 0; h < at.group; ++h) {
      const float one = exp2_fast(scores[i * at.group + h] - sh.lse[h]);
      share = p.reduce == TAPER_SUM_OF_GROUP ? share + one : fmaxf(share, one);
    }
    if (e >= at.begin && e < at.end && e - at.begin < at.n) out[e - at.begin] = ordered(share);
  }
}

// The list as it was given, with its `k` pages.
__device__ __forceinline__ WorkList with_pages(const PickParams& p, uint32_t list, uint32_t k, const PickShared& sh) {
  WorkList w = sh.given;
  if (p.target == TAPER_BLOCKS) {
    w.block_first = list * p.capacity, w.block_count = k;
    return w;
  }
  // What the first and the last page have beyond the ranges lies at the ends of the list.
  const uint32_t page = kBlock / p.per_block, from = w.end[0], to = w.begin[1];
  uint32_t front = 0, back = 0;
  if (k > 0) {
    const uint32_t first = sh.first_id * page, last = (sh.last_id + 1) * page;
    front = from > first ? from - first : 0;
    back = last > to ? last - to : 0;
  }
  w.token_first = list * p.capacity * page + front;
  w.token_count = k > 0 && from < to ? k * page - front - back : 0;
  return w;
}

// By the whole thread block: the ids of the largest keys, and the list.
__device__ __forceinline__ void choose_pages(const PickParams& p, const PickPlace& at, const uint32_t* out,
                                             uint32_t* keys, PickShared& sh) {
  const int tid = threadIdx.x, lane = tid & 31;
  const uint32_t n = at.n, list = at.list;
  // Four keys at a time wherever keys are walked; beyond the end they rank below all.
  uint32_t lo = ~0u, hi = 0;
  const uint32_t fours = (n + 3) / 4;
  const bool aligned = p.stride % 4 == 0;
#pragma unroll 4
  for (uint32_t i = tid; i < fours; i += kPickThreads) {
    uint4 u;
    if (aligned) {
      u = __ldcg(reinterpret_cast<const uint4*>(out) + i);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) (&u.x)[k] = __ldcg(out + min(4 * i + k, n - 1));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t& x = (&u.x)[k];
      if (4 * i + k < n) lo = min(lo, x), hi = max(hi, x);
      else x = 0;
    }
    reinterpret_cast<uint4*>(keys)[pick_place(i)] = u;
  }
  lo = __reduce_min_sync(~0u, lo), hi = __reduce_max_sync(~0u, hi);
  if (lane == 0) atomicMin(&sh.least, lo), atomicMax(&sh.most, hi);
  __syncthreads();
  lo = sh.least, hi = sh.most;
  uint32_t need = min(min(p.ks ? p.ks[at.given] : (uint32_t)p.k, n), (uint32_t)p.capacity);
  if (need == 0) lo = ~0u, hi = ~0u;  // No key is above, and none equal is needed.
  if (need == n) lo = 0;
  if (p.noise > 0.f) {
#pragma unroll 2
    for (uint32_t i = tid; i < fours; i += kPickThreads) {
      const uint4 u = reinterpret_cast<const uint4*>(keys)[pick_place(i)];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (pay_counts((&u.x)[k])) atomicAdd(&sh.bins[pay_bin((&u.x)[k])], 1u);
    }
    __syncthreads();
    lo = least_paying(tid < kPayBins ? sh.bins[kPayBins - 1 - tid] : 0, n, need, p.noise, sh.paying);
    hi = lo - 1, need = 0;  // All from there on.
  }
#pragma unroll 1
  while (need > 0 && need < n && lo < hi) {
    const int bits = 32 - __clz(hi - lo), shift = max(bits - 10, 0);
#pragma unroll 2
    for (uint32_t i = tid; i < fours; i += kPickThreads) {
      const uint4 u = reinterpret_cast<const uint4*>(keys)[pick_place(i)];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t x = (&u.x)[k];
        if (x >= lo && x <= hi && 4 * i + k < n) atomicAdd(&sh.bins[(x - lo) >> shift], 1u);
      }
    }
    __syncthreads();
    // From the top: thread t has bins 1023 - 2t and 1022 - 2t.
    const int top = kPickBins - 1 - 2 * tid;
    const uint32_t a = sh.bins[top], b = sh.bins[top - 1];
    uint32_t all;
    const uint32_t above = block_exclusive_sum(a + b, sh.scratch, all);
    if (above < need && need <= above + a + b) {
      const bool upper = need <= above + a;
      sh.found_bin = upper ? top : top - 1;
      sh.found_need = need - (upper ? above : above + a);
      sh.found_size = upper ? a : b;
    }
    sh.bins[top] = sh.bins[top - 1] = 0;
    __syncthreads();
    need = sh.found_need;
    lo += sh.found_bin << shift;
    hi = min(hi, lo + ((1u << shift) - 1));
    if (need == sh.found_size) break;  // All of them.
  }
  // All above the range, and the first `need` of those in it. A thread owns a run of keys.
  const uint32_t share = (fours + kPickThreads - 1) / kPickThreads, first = tid * share;
  const uint32_t stop = min(first + share, fours);
  uint32_t mine = 0;  // of the former, and of the latter in the upper half
#pragma unroll 4
  for (uint32_t i = first; i < stop; ++i) {
    const uint4 u = reinterpret_cast<const uint4*>(keys)[pick_place(i)];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (4 * i + k < n) mine += (&u.x)[k] > hi ? 1 : (&u.x)[k] >= lo ? 1 << 16 : 0;
  }
  uint32_t all;
  const uint32_t before = block_exclusive_sum(mine, sh.scratch, all), k = (all & 0xFFFF) + min(all >> 16, need);
  uint32_t gt = before & 0xFFFF, eq = before >> 16;
  uint32_t* ids = p.ids + (int64_t)list * p.capacity;
#pragma unroll 1
  for (uint32_t i = first; i < stop && mine > 0; ++i) {
    const uint4 u = reinterpret_cast<const uint4*>(keys)[pick_place(i)];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t e = 4 * i + j, x = (&u.x)[j];
      const bool over = e < n && x > hi, equal = e < n && x <= hi && x >= lo;
      if (over || (equal && eq < need)) {
        const uint32_t to = gt + min(eq, need);
        ids[to] = at.begin + e;
        if (to == 0) sh.first_id = at.begin + e;
        if (to == k - 1) sh.last_id = at.begin + e;
      }
      gt += over, eq += equal;
    }
  }
  __syncthreads();
  if (tid == 0) {
    p.work[list] = with_pages(p, at.given, k, sh);
    p.sync[(1 + list) * kTeamLine] = 0;
  }
}

template <class T, int W, int NT, bool SHARES, bool LAYERS>
__global__ void __launch_bounds__(kPickThreads, 1) pick_kernel(const PickParams p) {
  extern __shared__ __align__(16) uint32_t keys[];  // or scores, before
  __shared__ PickShared sh;
  const int tid = threadIdx.x;
  if (tid == 0) sh.least = ~0u, sh.most = 0;
  sh.bins[2 * tid] = sh.bins[2 * tid + 1] = 0;
  if (p.fresh <= 0) wait_for_predecessor();
  launch_dependents();
  // Teams that meet, and may not all be on the device at once, form in the order of starting.
  if (tid == 0) sh.place = p.in_order ? team_place(p.sync) : blockIdx.x;
  __syncthreads();
  PickPlace at;
  at.room = team_size(p.kv_heads), at.list = sh.place / p.team, at.rank = sh.place % p.team;
  const uint32_t lists = p.rows * p.kv_heads, layer = LAYERS ? at.list / lists : 0;
  at.given = at.list - layer * lists;
  at.row = at.given / p.kv_heads, at.kv_head = at.given % p.kv_heads, at.group = p.q_heads / p.kv_heads;
  at.upper = p.view, at.lower = p.lower;
  const T* queries = static_cast<const T*>(p.q) + (int64_t)at.row * p.q_heads * W;
  if constexpr (LAYERS) {
    const T* bounds = reinterpret_cast<const T*>(p.views[layer]);
    at.upper = bounds + W, at.lower = bounds;
    queries = reinterpret_cast<const T*>(p.queries[at.row]) + (int64_t)(p.first + layer) * p.q_heads * W;
  }
  const uint32_t page = kBlock / p.per_block;
  at.entries = min((p.lens[at.row] + page - 1) / page, (uint32_t)p.stride);
  at.team = min(pick_team(p.kv_heads, at.entries), p.team);
  if (at.rank >= at.team) return;
  at.begin = p.begins ? p.begins[at.given] : 0;
  at.end = min(p.ends ? p.ends[at.given] : at.entries, at.entries);
  at.n = at.end > at.begin ? at.end - at.begin : 0;
  at.settled = p.fresh > 0 ? (p.lens[at.row] - min((uint32_t)p.fresh, p.lens[at.row])) / page : ~0u;
  // There by the time one block has to choose.
  if (tid < sizeof(WorkList) / 4)
    reinterpret_cast<uint32_t*>(&sh.given)[tid] = reinterpret_cast<const uint32_t*>(p.lists + at.given)[tid];
  uint32_t* out = p.keys + (int64_t)at.list * p.stride;
  if (at.n > 0) {
    ViewRows<T, W, NT, true> view{
        p.block_table + (uint64_t)at.row * p.table_stride, at.entries, at.kv_head,
        (uint32_t)p.kv_heads, (uint32_t)p.per_block, (uint32_t)(p.pitch ? p.pitch : W), tid & 31};
    view.load_queries(queries + at.kv_head * at.group * W, at.group);
    if constexpr (SHARES) score_shares(p, at, view, reinterpret_cast<float*>(keys), sh, out);
    else score_best(p, at, view, out);
  }
  wait_for_predecessor();  // Who waits for this launch has waited for that one too.
  __syncthreads();
  if (tid == 0) sh.last = add_acq_rel(p.sync + (1 + at.list) * kTeamLine, 1) == at.team - 1;
  __syncthreads();
  if (!sh.last) return;
  if (SHARES && tid < at.team * at.group) p.masses[((uint64_t)at.list * at.room * at.group + tid) * 2] = 0;
  choose_pages(p, at, out, keys, sh);
}

}  // namespace taper
