// Attention that reads every key but only a sample of the values (S2ANTA).
//
// A list's tiles are cut into runs, as many as a whole team has thread blocks, by the list's length alone. A team of
// thread blocks works on each list, a rank on one run or, where lists are many, on several neighbouring ones, whose sums
// are kept apart: a list's output has the same bits whatever its team. Pass one
// streams the keys: every tile leaves its weights, relative to its largest, in 16 bits
// and its mass in shared memory. The team meets once to learn where each run's mass
// lies in the whole; then every rank draws from its own. A target in [0, 1) names the
// token at which the running sum of the probabilities passes it, so a head's `samples`
// targets are exactly as many draws, and the output is the mean of their values:
// unbiased, whether targets are one uniform number and its translates (systematic), one
// number in each of the equal intervals (stratified) or all independent.
//
// Source: S2ANTA's estimators, with one offset for all tiles of a head; kPerTile is its single
// pass, with an offset for each tile.
#pragma once

#include "../common/philox.cuh"
#include "../common/scan.cuh"
#include "../common/team.cuh"
#include "../common/wgmma.cuh"
#include "../common/worklist.cuh"

namespace taper {

// kPerTile: every tile gives samples / tiles values, at least one, weighted by its mass.
enum TargetRule : int32_t {
  kSystematic = TAPER_SYSTEMATIC,
  kStratified = TAPER_STRATIFIED,
  kIndependent = TAPER_INDEPENDENT,
  kPerTile = TAPER_PER_TILE
};

using ValuesParams = TaperValuesParams;

constexpr int kValueGroups = 4, kValueWarps = 4 * kValueGroups, kValueThreads = 32 * kValueWarps;
constexpr uint32_t kTargetDraws = 0x53320000u;  // words of a head's targets, and on

template <int D, int N>
struct ValuesLayout {
  static constexpr int kPanel = kBlock * 128, kStage = kPanel * (D / 64);  // keys of a tile
  // A multiple of the warpgroups. Twice as many would be no faster below 524,288 tokens: what is
  // asked for and not there yet delays all else.
  static constexpr int kStages = 64 * 1024 / kStage;
  static constexpr int kQuery = N * 128 * (D / 64);
  // Where a block has several runs, the sums of so many replace the keys and go beyond them.
  static constexpr int kJoined = 16, kSums = kJoined * kValueWarps * D * 4;
  static constexpr int kSingle = kStages * kStage + kQuery, kPacked = kSums > kSingle ? kSums : kSingle;
  // Masses lie after them.
  __host__ __device__ static constexpr int bytes(bool packed) { return packed ? kPacked : kSingle; }
};
__host__ __device__ inline uint32_t rank_tiles(uint32_t tiles, uint32_t team) {
  return (tiles + team - 1) / team;
}

template <int D, int N, bool PACKED>
struct ValuesShared {
  static constexpr int S = ValuesLayout<D, N>::kStages;
  uint64_t full[S], empty[S], q_full, gate;
  uint32_t place, last, list, rank, team;
  float red[kValueGroups][2][4][N];  // warpgroup; maxima, sums; warp; head
  float mass[PACKED ? kTeamMax : 1][N];  // of each run
  float join[PACKED ? 1 : kValueWarps][D];
};

struct ValuesMaps {
  CUtensorMap q, k;
};
// What a launch's teams share: thread blocks for each KV head of all rows together, and room for masses of so many tiles in each.
struct ValuesTeams {
  uint32_t members, stride;
};

// Thread blocks of a list of `tiles`, of which all rows together have `all` a KV head: members are shared out by length.
__device__ __forceinline__ uint32_t values_team(const ValuesTeams& teams, uint32_t tiles, uint32_t all, uint32_t runs) {
  const uint32_t fit = teams.stride / rank_tiles(tiles, runs), least = (runs + fit - 1) / fit;
  uint32_t share = (2ull * tiles * teams.members + all) / (2 * all);
  // All but a whole team would leave one of them two runs.
  if (8 * share >= 7 * runs) share = runs;
  return min(max(share, least), runs);
}

// What the heaviest of a team's ranks weighs: the masses of 32 fit into 32 bits.
constexpr float kWholeMass = 1 << 26;

// PACKED: a rank may have several runs.
template <class T, int D, int N, bool PER_TILE, bool PACKED>
struct ValuesBlock {
  using L = ValuesLayout<D, N>;
  static constexpr int C = N / 4, V = D / 32;
  static constexpr uint32_t kJoined = L::kJoined;
  struct alignas(4 * V) Lane {
    float x[V];
  };
  const ValuesMaps& maps;
  const ValuesParams& p;
  ValuesShared<D, N, PACKED>& sh;
  const uint32_t stages, q_at;
  float* const sums;  // where the keys were: [run of a few][warp][D]
  float* const mass;  // [group][mass_stride], of this rank's tiles: log2, then running sums of each run
  const uint32_t mass_stride, list, rank, team, row, kv_head, len, first, tiles;
  const uint32_t runs, run, run_end, per;  // of the list; this rank's; tiles of each
  const uint32_t* table;
  const uint64_t seed;
  const uint32_t position;
  const int group, lane;
  Gate gate;  // of the consumers

  __device__ __forceinline__ void produce() {
    if (lane == 0) {
      mbar_expect_tx(smem_u32(&sh.q_full), L::kQuery);
#pragma unroll
      for (int h = 0; h < D / 64; ++h)
        tma_load_2d(q_at + h * (N * 128), &maps.q, smem_u32(&sh.q_full), h * 64,
                    row * p.q_heads + kv_head * group);
    }
    // Keys leave L2 first, so that the weights stay there until they are drawn from.
    const uint64_t policy = evict_first();
    for (uint32_t t0 = 0; t0 < tiles; t0 += 32) {
      uint32_t y = 0;
      if (t0 + lane < tiles) y = (table[first + t0 + lane] * p.kv_heads + kv_head) * kBlock;
      for (uint32_t i = 0; i < min(32u, tiles - t0); ++i) {
        const uint32_t at = t0 + i, stage = at % L::kStages, full = smem_u32(&sh.full[stage]);
        const int from = __shfl_sync(~0u, y, i);
        if (lane == 0) {
          mbar_wait(smem_u32(&sh.empty[stage]), (at / L::kStages & 1) ^ 1);
          mbar_expect_tx(full, L::kStage);
#pragma unroll
          for (int h = 0; h < D / 64; ++h)
            tma_load_2d(stages + stage * L::kStage + h * L::kPanel, &maps.k, full, h * 64, from,
                        policy);
        }
        __syncwarp();
      }
    }
  }

  // A head's weights of one of the list's tiles.
  __device__ __forceinline__ __half* weights_of(uint32_t tile, int h) const {
    const int64_t most = (p.max_len + kBlock - 1) / kBlock;
    return static_cast<__half*>(p.weights) + ((list * most + tile) * group + h) * kBlock;
  }

  // One warpgroup's tiles: every fourth.
  __device__ __forceinline__ void weigh(int wg) {
    const int warp = threadIdx.x / 32 % 4, r0 = warp * 16 + lane / 4;
    const float scale2 = p.scale * kLog2e;
    mbar_wait(smem_u32(&sh.q_full), 0);
    for (uint32_t t = wg; t < tiles; t += kValueGroups) {
      const uint32_t stage = t % L::kStages;
      mbar_wait(smem_u32(&sh.full[stage]), t / L::kStages & 1);
      float s[N / 2];
      score_tile<T, D, N>(s, stages + stage * L::kStage, q_at);
      mbar_arrive_warp(smem_u32(&sh.empty[stage]), lane);

      const uint32_t token = (first + t) * kBlock + r0;
      const bool in[2] = {token < len, token + 8 < len};
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int j = (c / 2) * 4 + (c & 1), h = (c / 2) * 8 + (lane & 3) * 2 + (c & 1);
        s[j] = in[0] ? s[j] * scale2 : -INFINITY;  // What lies beyond may be anything.
        s[j + 2] = in[1] ? s[j + 2] * scale2 : -INFINITY;
        float top = fmaxf(s[j], s[j + 2]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        if (lane < 4) sh.red[wg][0][warp][h] = top;
      }
      bar_sync(1 + wg, 128);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int j = (c / 2) * 4 + (c & 1), h = (c / 2) * 8 + (lane & 3) * 2 + (c & 1);
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < 4; ++w) top = fmaxf(top, sh.red[wg][0][w][h]);
        const __half a = __float2half(exp2_fast(s[j] - top)), b = __float2half(exp2_fast(s[j + 2] - top));
        if (h < group) weights_of(first + t, h)[r0] = a, weights_of(first + t, h)[r0 + 8] = b;
        // The sum is of what was rounded: draws are made from that.
        float sum = __half2float(a) + __half2float(b);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane < 4) sh.red[wg][1][warp][h] = sum;
        s[j] = top;
      }
      bar_sync(1 + wg, 128);
      if (warp == 0 && lane < 4)
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const int h = (c / 2) * 8 + lane * 2 + (c & 1);
          float sum = 0;
#pragma unroll
          for (int w = 0; w < 4; ++w) sum += sh.red[wg][1][w][h];
          if (h < group) mass[h * mass_stride + t] = s[(c / 2) * 4 + (c & 1)] + log2f(sum);
        }
    }
  }

  // One warp: turns a head's tile masses of a run, the n-th of this rank's, into running sums. Short runs share a warp, `width`
  // lanes each: the sums are those that a whole warp comes to. Lanes that have none of their own (`idle`) go along.
  __device__ __forceinline__ void accumulate(int h, uint32_t n, int width, bool idle = false) {
    const int at = PACKED ? lane % width : lane;
    const uint32_t begin = PACKED ? min(n * per, tiles) : 0, count = idle ? 0 : PACKED ? min(per, tiles - begin) : tiles;
    float* m = mass + h * mass_stride + begin;
    float top = -INFINITY, sum = 0;
    for (uint32_t t = at; t < count; t += width) top = fmaxf(top, m[t]);
    for (int d = width / 2; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const uint32_t end = PACKED ? __reduce_max_sync(~0u, count) : count;
    for (uint32_t t0 = 0; t0 < end; t0 += width) {
      float x = t0 + at < count ? exp2_fast(m[t0 + at] - top) : 0.f;
      for (int d = 1; d < width; d *= 2) {
        const float y = __shfl_up_sync(~0u, x, d);
        if (at >= d) x += y;
      }
      if (t0 + at < count) m[t0 + at] = sum + x;
      sum += __shfl_sync(~0u, x, lane | (width - 1));
    }
    if (at == 0 && !idle) {
      sh.mass[n][h] = sum;
      p.part_lse[((int64_t)list * runs + run + n) * group + h] = count ? top + log2f(sum) : -INFINITY;
    }
  }
  // Where a run's mass lies in a head's, and what turns targets into tile masses. PACKED: lane i knows the i-th run's.
  struct Reach {
    float begin, end, scale, total;
    uint32_t last;  // run with mass
  };
  // One warp. All ranks compute the same bounds, so no target is lost between two.
  __device__ __forceinline__ Reach reach(int h) const {
    const float lse =
        lane < runs ? __ldcg(p.part_lse + ((int64_t)list * runs + lane) * group + h) : -INFINITY;
    float top = lse;
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float share = lse == -INFINITY ? 0.f : exp2_fast(lse - top);
    // Whole numbers, whose sums do not depend on the order that they are taken in: a run without mass begins where it ends.
    const uint32_t own = __float2uint_rn(share * kWholeMass);
    const uint32_t upto = warp_upto(own);
    const bool numbers = !__any_sync(~0u, isnan(share));
    const float total = numbers ? __shfl_sync(~0u, upto, 31) : NAN;
    // The last run with mass ends the line, so that rounding loses no target either.
    const int last = 31 - __clz(__ballot_sync(~0u, own > 0));
    if (p.lse && last >= (int)run && last < (int)run_end && lane == 0)
      p.lse[(int64_t)row * p.q_heads + kv_head * group + h] = (top + log2f(total / kWholeMass)) * kLn2;
    if constexpr (PACKED) {
      const uint32_t before = __shfl_up_sync(~0u, upto, 1);
      const bool here = lane >= run && lane < run_end && own > 0;
      return {lane ? (float)before : 0.f, (float)upto, here ? sh.mass[lane - run][h] / own : 0.f, total, (uint32_t)max(last, 0)};
    }
    const uint32_t mine = __shfl_sync(~0u, own, rank);
    const uint32_t before = __shfl_sync(~0u, upto, (rank + 31) % 32), here = __shfl_sync(~0u, upto, rank);
    return {rank ? (float)before : 0.f, last == (int)rank ? INFINITY : (float)here, mine > 0 ? sh.mass[0][h] / mine : 0.f,
            total, 0};
  }

  __device__ __forceinline__ float uniform(int h, uint32_t draw) const {
    const Stream s{seed, (uint32_t)p.layer, kv_head * group + h, position};
    return (s.words(kTargetDraws + draw).x >> 8) * (1.f / (1 << 24));
  }

  // The first of a tile's tokens whose running sum passes a share of the whole, or the last with a weight.
  __device__ __forceinline__ uint32_t token_of(const __half* weights, float left) const {
    constexpr int kPairs = kBlock / 2;
    float pair[kPairs], total = 0, run = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(weights + 2 * i);
      const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 w = __half22float2(*reinterpret_cast<const __half2*>(&word[j]));
        pair[i + j] = w.x + w.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) total += pair[i];
    const float goal = __fmul_rn(left, total);
    uint32_t l = 0, live = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      run += pair[i];
      if (!(run > goal)) l = i + 1, before = run;
      if (pair[i] > 0.f) live = i;
    }
    const bool none = l > live;
    l = min(l, live);
    const float2 w = __half22float2(*reinterpret_cast<const __half2*>(weights + 2 * l));
    return 2 * l + (w.y > 0.f && (none || !(w.x > 0.f && before + (w.x + w.y) - w.y > goal)));
  }

  // One warp: adds up the values of those of a head's targets k = sub, sub + step, ... that fall on this rank, in acc. PACKED:
  // on its runs from from_run to to_run, in the warp's sums of each.
  __device__ __forceinline__ void draw(int h, uint32_t sub, uint32_t step, float u0, const Reach& where, uint32_t from_run,
                                       uint32_t to_run, Lane& acc) {
    const float* m = mass + h * mass_stride;
    const auto [begin, end, scale, total, last] = where;
    const float inverse = 1.f / p.samples;
    const T* values = static_cast<const T*>(p.v);
    uint32_t* ids = p.ids ? p.ids + ((int64_t)row * p.q_heads + kv_head * group + h) * p.samples : nullptr;
    if (!(total > 0.f && total < INFINITY)) {
      // A head whose probabilities are no numbers: nor is its output, and its draws are the first tokens.
#pragma unroll
      for (int j = 0; j < V; ++j) acc.x[j] = NAN;
      if constexpr (PACKED) clear(to_run - from_run, NAN);
      for (uint32_t k = sub + lane * step; ids && rank == 0 && k < p.samples; k += 32 * step) ids[k] = min(k, len - 1);
      return;
    }
    if constexpr (PACKED) clear(to_run - from_run, 0.f);
    const uint32_t all = (len + kBlock - 1) / kBlock, each = max(p.samples / all, 1u);
    const uint32_t draws = PER_TILE ? tiles * each : p.samples;
#pragma unroll 1
    for (uint32_t k0 = sub; k0 < draws; k0 += 32 * step) {
      const uint32_t k = k0 + lane * step;
      float x = u0, left = 0, weight = 1;
      uint32_t lo = 0, of = 0;  // which tile, of which run
      bool mine = k < draws;
      if constexpr (PER_TILE) {
        if (mine) {
          lo = k / each;
          left = (k % each + uniform(h, first + lo)) / each;
          const float own = m[lo] - (lo ? m[lo - 1] : 0.f);
          weight = own / (scale * total) * p.samples / each;
          mine = scale > 0.f && weight > 0.f;  // A rank whose mass rounds to 0 is none of the whole.
        }
      } else {
        if (p.rule != kSystematic && k < p.samples) x = uniform(h, k);
        x = p.rule == kIndependent ? x : (k + x) * inverse;
        x = __fmul_rn(x, total);
        float base = begin, unit = scale;
        uint32_t low = 0, hi = tiles - 1;
        if constexpr (PACKED) {
#pragma unroll
          for (int d = 16; d; d /= 2)
            if (!(__shfl_sync(~0u, end, of + d - 1) > x)) of += d;
          of = min(of, last);
          mine = mine && of >= from_run && of < to_run;
          base = __shfl_sync(~0u, begin, of), unit = __shfl_sync(~0u, scale, of);
          if (mine) lo = low = (of - run) * per, hi = min(low + per, tiles) - 1;
        } else {
          mine = mine && x >= begin && x < end;
        }
        if (mine) {
          // The first tile whose running sum passes the target, or the last.
          const float y = __fmul_rn(__fsub_rn(x, base), unit);
          while (lo < hi) {
            const uint32_t mid = (lo + hi) / 2;
            if (m[mid] > y) hi = mid;
            else lo = mid + 1;
          }
          const float before = lo > low ? m[lo - 1] : 0.f;
          left = fminf(fmaxf((y - before) / (m[lo] - before), 0.f), 1.f);
        }
      }
      const uint32_t block = mine ? table[first + lo] : 0;
      const uint32_t at = mine ? token_of(weights_of(first + lo, h), left) : 0;
      if (ids && mine) ids[k] = (first + lo) * kBlock + at;
      // A token that was drawn several times is read once.
      const uint32_t peers = __match_any_sync(~0u, mine ? lo * kBlock + at : ~0u);
      const uint32_t row = (block * p.kv_heads + kv_head) * kBlock + at;
      const float times = weight * __popc(peers);
      if (PACKED && mine) prefetch_rows(values + (int64_t)row * D);
      uint32_t todo = __ballot_sync(~0u, mine && (peers & ((1u << lane) - 1)) == 0);
#pragma unroll 1
      while (todo) {
        constexpr int kAhead = PACKED ? 8 : 4;
        T x[kAhead][V];
        float share[kAhead];
        Lane* to[kAhead];  // PACKED
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const bool any = todo != 0;
          const int from = any ? __ffs(todo) - 1 : 0;
          todo &= todo - 1;
          const float own = __shfl_sync(~0u, times, from);
          share[i] = any ? own : 0.f;
          if constexpr (PACKED) to[i] = any ? kept(__shfl_sync(~0u, of, from) - from_run) : kept(0);
          const T* v = values + (int64_t)__shfl_sync(~0u, row, from) * D + lane * V;
          for (int j = 0; j < V; ++j) x[i][j] = static_cast<T>(0.f);
          if (!any) continue;
          if constexpr (V == 4) *reinterpret_cast<uint2*>(x[i]) = *reinterpret_cast<const uint2*>(v);
          else *reinterpret_cast<uint32_t*>(x[i]) = *reinterpret_cast<const uint32_t*>(v);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          Lane sum = PACKED ? *to[i] : acc;
#pragma unroll
          for (int j = 0; j < V; ++j) sum.x[j] = fmaf(share[i], to_float(x[i][j]), sum.x[j]);
          (PACKED ? *to[i] : acc) = sum;
        }
      }
    }
  }

  // Brings a row to L2, so that those of many draws are on their way at once.
  __device__ __forceinline__ static void prefetch_rows(const T* row) {
#pragma unroll
    for (int i = 0; i < D; i += 64) prefetch_l2(row + i);
  }
  __device__ __forceinline__ void clear(uint32_t n, float x) const {
#pragma unroll 1
    for (uint32_t i = 0; i < n; ++i)
#pragma unroll
      for (int j = 0; j < V; ++j) kept(i)->x[j] = x;
  }
  // PACKED: this warp's sums of the n-th of a few runs. Values join a run's in the order of lanes, as they do where it is alone.
  __device__ __forceinline__ Lane* kept(uint32_t n) const { return sums_of(n, threadIdx.x / 32); }
  __device__ __forceinline__ Lane* sums_of(uint32_t n, int warp) const {
    return reinterpret_cast<Lane*>(sums + (n * kValueWarps + warp) * D) + lane;
  }

  __device__ __forceinline__ void consume() {
    const int warp = threadIdx.x / 32, tid = threadIdx.x;
    weigh(__shfl_sync(~0u, warp / 4, 0));
    gate.meet();
    if constexpr (PACKED) {
      const int width = per > 16 ? 32 : per > 8 ? 16 : 8, at = lane / width, beside = 32 / width;
      const int tasks = group * (run_end - run);
#pragma unroll 1
      for (int i = warp * beside; i < tasks; i += kValueWarps * beside) {
        const int own = min(i + at, tasks - 1);
        accumulate(own % group, own / group, width, i + at >= tasks);
      }
    } else {
      for (int h = warp; h < group; h += kValueWarps) accumulate(h, 0, 32);
    }
    uint32_t* sync = p.sync + (1 + list) * kTeamLine;
    gate.meet();
    const bool alone = PACKED && team == 1;
    if (tid == 0 && !alone) add_release(sync, 1);
    // Small groups: several warps a head. Its one offset is known before the team has met.
    const int step = kValueWarps / group, sub = warp / group;
    const float u0 = !PER_TILE && p.rule == kSystematic ? uniform(warp % group, 0) : 0.f;
    if (lane == 0 && !alone)
      while (load_acquire(sync) < team) {
      }
    __syncwarp();
    if constexpr (PACKED) {
      Reach where;
      if (sub < step) where = reach(warp % group);
#pragma unroll 1
      for (uint32_t r = run; r < run_end; r += kJoined) {
        const uint32_t end = min(r + kJoined, run_end);
        Lane acc = {};
        if (sub < step) draw(warp % group, sub, step, u0, where, r, end, acc);
        gate.meet();
#pragma unroll 1
        for (int i = warp; i < group * (int)(end - r); i += kValueWarps) {
          Lane all = {};
#pragma unroll 4
          for (int s = 0; s < step; ++s) {
            const Lane own = *sums_of(i / group, s * group + i % group);
#pragma unroll
            for (int j = 0; j < V; ++j) all.x[j] += own.x[j];
          }
          reinterpret_cast<Lane*>(p.parts + (((int64_t)list * runs + r) * group + i) * D)[lane] = all;
        }
        gate.meet();
      }
    } else {
      Lane acc = {};
      if (sub < step) draw(warp % group, sub, step, u0, reach(warp % group), 0, 0, acc);
#pragma unroll
      for (int j = 0; j < V; ++j) sh.join[warp][lane * V + j] = acc.x[j];
      gate.meet();
      for (int i = tid; i < group * D; i += kValueThreads) {
        float x = 0;
        for (int s = 0; s < step; ++s) x += sh.join[s * group + i / D][i % D];
        p.parts[((int64_t)list * team + rank) * group * D + i] = x;
      }
      gate.meet();
    }
    if (!alone) {
      if (tid == 0) sh.last = add_acq_rel(sync + 8, 1) == team - 1;
      gate.meet();
      if (!sh.last) return;
    }
    const int64_t head = (int64_t)row * p.q_heads + kv_head * group;
    const float inverse = 1.f / p.samples;
    for (int i = tid; i < group * D; i += kValueThreads) {
      const float* from = p.parts + (int64_t)list * runs * group * D + i;
      float x = 0;
#pragma unroll 16
      for (uint32_t r = 0; r < runs; ++r) x += __ldcg(from + (int64_t)r * group * D);
      p.out[head * D + i] = x * inverse;
    }
    if (tid == 0 && !alone) sync[0] = sync[8] = 0;  // All have left.
  }
};

// One warp: which list and rank the block has that is the place-th. None, if there are fewer.
template <class S>
__device__ __forceinline__ void find_seat(const ValuesParams& p, const ValuesTeams& teams, uint32_t place, S& sh) {
  const uint32_t lane = threadIdx.x, runs = team_size(p.kv_heads);
  auto tiles_of = [&](uint32_t row) { return row < p.rows ? (p.lens[row] + kBlock - 1) / kBlock : 0; };
  uint32_t all = 0, before = 0;
  for (uint32_t r = lane; r < p.rows; r += 32) all += tiles_of(r);
  all = __reduce_add_sync(~0u, all);
  for (uint32_t r0 = 0; r0 < p.rows; r0 += 32) {
    const uint32_t tiles = tiles_of(r0 + lane), team = tiles ? values_team(teams, tiles, all, runs) : 0;
    const uint32_t upto = warp_upto(team * p.kv_heads);
    const bool beyond = before + upto > place;
    if (beyond && before + upto - team * p.kv_heads <= place) {
      const uint32_t at = place - (before + upto - team * p.kv_heads);
      sh.list = (r0 + lane) * p.kv_heads + at / team, sh.rank = at % team, sh.team = team;
    }
    if (__any_sync(~0u, beyond)) return;
    before += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) sh.team = 0;
}

template <class T, int D, int N, bool PER_TILE, bool PACKED>
__global__ void __launch_bounds__(kValueThreads + 32, 1)
    values_kernel(const __grid_constant__ ValuesMaps maps, const __grid_constant__ ValuesParams p,
                  const __grid_constant__ ValuesTeams teams) {
  using L = ValuesLayout<D, N>;
  extern __shared__ uint8_t raw[];
  __shared__ ValuesShared<D, N, PACKED> sh;
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u, q_at = stages + L::kStages * L::kStage;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(smem_u32(&sh.full[i]), 1);
      mbar_init(smem_u32(&sh.empty[i]), 4 * kWarpArrivals);
    }
    mbar_init(smem_u32(&sh.q_full), 1);
    mbar_init(smem_u32(&sh.gate), kValueThreads);
    mbar_init_fence();
    tma_prefetch_map(&maps.q);
    tma_prefetch_map(&maps.k);
  }
  wait_for_predecessor();
  launch_dependents();
  if constexpr (PACKED) {
    if (threadIdx.x < 32) {
      uint32_t place = blockIdx.x;
      if (p.in_order && threadIdx.x == 0) place = team_place(p.sync);
      find_seat(p, teams, __shfl_sync(~0u, place, 0), sh);
    }
  } else if (threadIdx.x == 0) {
    sh.place = p.in_order ? team_place(p.sync) : blockIdx.x;
  }
  __syncthreads();
  const uint32_t runs = team_size(p.kv_heads), team = PACKED ? sh.team : runs;
  const uint32_t stride = PACKED ? teams.stride : rank_tiles((p.max_len + kBlock - 1) / kBlock, runs);
  if (PACKED && team == 0) return;
  const uint32_t list = PACKED ? sh.list : sh.place / team, rank = PACKED ? sh.rank : sh.place % team;
  const uint32_t run = PACKED ? rank * runs / team : rank, run_end = PACKED ? (rank + 1) * runs / team : rank + 1;
  const uint32_t row = list / p.kv_heads, len = p.lens[row], all = (len + kBlock - 1) / kBlock;
  const uint32_t per = rank_tiles(all, runs), first = min(run * per, all);
  const uint32_t* table = p.block_table + (uint64_t)row * p.table_stride;
  float* keys = reinterpret_cast<float*>(raw + (stages - smem_u32(raw)));
  float* mass = reinterpret_cast<float*>(raw + (stages + L::bytes(PACKED) - smem_u32(raw)));
  ValuesBlock<T, D, N, PER_TILE, PACKED> block{maps, p, sh, stages, q_at, keys, mass, stride, list, rank, team, row,
                             list % p.kv_heads, len, first, min((run_end - run) * per, all - first), runs, run, run_end, per,
                             table, p.seeds[row], p.positions[row],
                             p.q_heads / p.kv_heads, (int)threadIdx.x % 32, Gate{smem_u32(&sh.gate), 1 + kValueGroups, kValueThreads}};
  if (threadIdx.x >= kValueThreads) block.produce();
  else block.consume();
}

}  // namespace taper
