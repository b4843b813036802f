// Attention that reads every key but only a sample of the values (S2ANTA).
//
// A team of thread blocks works on each list, a rank on a run of its tiles. Pass one
// streams the keys: every tile leaves its weights, relative to its largest, in 16 bits
// and its mass in shared memory. The team meets once to learn where each rank's mass
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
  static constexpr int kBytes = kStages * kStage + kQuery + 1024;  // and masses after them
};
__host__ __device__ inline uint32_t rank_tiles(uint32_t tiles, uint32_t team) {
  return (tiles + team - 1) / team;
}

template <int D, int N>
struct ValuesShared {
  static constexpr int S = ValuesLayout<D, N>::kStages;
  uint64_t full[S], empty[S], q_full, gate;
  uint32_t place, last;
  float red[kValueGroups][2][4][N];  // warpgroup; maxima, sums; warp; head
  float mass[N];
  float join[kValueWarps][D];
};

struct ValuesMaps {
  CUtensorMap q, k;
};

// What the heaviest of a team's ranks weighs: the masses of 32 fit into 32 bits.
constexpr float kWholeMass = 1 << 26;

template <class T, int D, int N, bool PER_TILE>
struct ValuesBlock {
  using L = ValuesLayout<D, N>;
  static constexpr int C = N / 4, V = D / 32;
  const ValuesMaps& maps;
  const ValuesParams& p;
  ValuesShared<D, N>& sh;
  const uint32_t stages, q_at;
  float* const mass;  // [group][mass_stride], of this rank's tiles: log2, then running sums
  const uint32_t mass_stride, list, rank, team, row, kv_head, len, first, tiles;
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

  __device__ __forceinline__ __half* weight_of(uint32_t token) const {
    const int64_t padded = (int64_t)(p.max_len + kBlock - 1) / kBlock * kBlock;
    return static_cast<__half*>(p.weights) + (list * padded + token) * group;
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
      __syncwarp();
      if (lane == 0) mbar_arrive(smem_u32(&sh.empty[stage]));

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
        if (h < group) {
          if (in[0]) weight_of(token)[h] = a;
          if (in[1]) weight_of(token + 8)[h] = b;
        }
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

  // One warp: turns a head's tile masses into running sums.
  __device__ __forceinline__ void accumulate(int h) {
    float* m = mass + h * mass_stride;
    float top = -INFINITY, sum = 0;
    for (uint32_t t = lane; t < tiles; t += 32) top = fmaxf(top, m[t]);
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    for (uint32_t t0 = 0; t0 < tiles; t0 += 32) {
      float x = t0 + lane < tiles ? exp2_fast(m[t0 + lane] - top) : 0.f;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float y = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += y;
      }
      if (t0 + lane < tiles) m[t0 + lane] = sum + x;
      sum += __shfl_sync(~0u, x, 31);
    }
    if (lane == 0) {
      sh.mass[h] = sum;
      p.part_lse[((int64_t)list * team + rank) * group + h] = tiles ? top + log2f(sum) : -INFINITY;
    }
  }
  // Where this rank's mass lies in a head's, and what turns targets into tile masses.
  struct Reach {
    float begin, end, scale, total;
  };
  // One warp. All ranks compute the same bounds, so no target is lost between two.
  __device__ __forceinline__ Reach reach(int h) const {
    const float lse =
        lane < team ? __ldcg(p.part_lse + ((int64_t)list * team + lane) * group + h) : -INFINITY;
    float top = lse;
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float share = lse == -INFINITY ? 0.f : exp2_fast(lse - top);
    // Whole numbers, whose sums do not depend on the order that they are taken in: a rank without mass begins where it ends.
    const uint32_t own = __float2uint_rn(share * kWholeMass);
    uint32_t upto = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t y = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += y;
    }
    const bool numbers = !__any_sync(~0u, isnan(share));
    const float total = numbers ? __shfl_sync(~0u, upto, 31) : NAN;
    const uint32_t mine = __shfl_sync(~0u, own, rank);
    // The last rank with mass ends the line, so that rounding loses no target either.
    const bool ends = 31 - __clz(__ballot_sync(~0u, own > 0)) == (int)rank;
    if (p.lse && ends && lane == 0)
      p.lse[(int64_t)row * p.q_heads + kv_head * group + h] = (top + log2f(total / kWholeMass)) * kLn2;
    const uint32_t before = __shfl_sync(~0u, upto, (rank + 31) % 32), here = __shfl_sync(~0u, upto, rank);
    return {rank ? (float)before : 0.f, ends ? INFINITY : (float)here, mine > 0 ? sh.mass[h] / mine : 0.f, total};
  }

  __device__ __forceinline__ float uniform(int h, uint32_t draw) const {
    const Stream s{seed, (uint32_t)p.layer, kv_head * group + h, position};
    return (s.words(kTargetDraws + draw).x >> 8) * (1.f / (1 << 24));
  }

  // One warp: adds up the values of those of a head's targets k = sub, sub + step, ...
  // that fall on this rank.
  __device__ __forceinline__ void draw(int h, uint32_t sub, uint32_t step, float u0, float (&acc)[V]) {
    const float* m = mass + h * mass_stride;
    const auto [begin, end, scale, total] = reach(h);
    const float inverse = 1.f / p.samples;
    const T* values = static_cast<const T*>(p.v);
    uint32_t* ids = p.ids ? p.ids + ((int64_t)row * p.q_heads + kv_head * group + h) * p.samples : nullptr;
    if (!(total > 0.f && total < INFINITY)) {
      // A head whose probabilities are no numbers: nor is its output, and its draws are the first tokens.
#pragma unroll
      for (int j = 0; j < V; ++j) acc[j] = NAN;
      for (uint32_t k = sub + lane * step; ids && rank == 0 && k < p.samples; k += 32 * step) ids[k] = min(k, len - 1);
      return;
    }
    const uint32_t all = (len + kBlock - 1) / kBlock, each = max(p.samples / all, 1u);
    const uint32_t draws = PER_TILE ? tiles * each : p.samples;
    for (uint32_t k0 = sub; k0 < draws; k0 += 32 * step) {
      const uint32_t k = k0 + lane * step;
      float x = u0, left = 0, weight = 1;
      uint32_t lo = 0;
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
        x *= total;
        mine = mine && x >= begin && x < end;
        if (mine) {
          // The first tile whose running sum passes the target, or the last.
          const float y = (x - begin) * scale;
          uint32_t hi = tiles - 1;
          while (lo < hi) {
            const uint32_t mid = (lo + hi) / 2;
            if (m[mid] > y) hi = mid;
            else lo = mid + 1;
          }
          const float before = lo ? m[lo - 1] : 0.f;
          left = fminf(fmaxf((y - before) / (m[lo] - before), 0.f), 1.f);
        }
      }
      // Tile by tile: all draws that fall on one are found in its running sums together.
      uint32_t todo = __ballot_sync(~0u, mine), at = 0;
      const uint32_t block = mine ? table[first + lo] : 0;
#pragma unroll 1
      while (todo) {
        constexpr int kAhead = 2;
        uint32_t tile[kAhead];
        float w[kAhead][2];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          tile[i] = __shfl_sync(~0u, lo, todo ? __ffs(todo) - 1 : 0);  // Any, where none is left.
          todo &= ~__ballot_sync(~0u, lo == tile[i]);
          const uint32_t token = (first + tile[i]) * kBlock + 2 * lane;
          w[i][0] = token < len ? __half2float(__ldcg(weight_of(token) + h)) : 0.f;
          w[i][1] = token + 1 < len ? __half2float(__ldcg(weight_of(token + 1) + h)) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          float upto = w[i][0] + w[i][1];
#pragma unroll
          for (int d = 1; d < 32; d *= 2) {
            const float y = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += y;
          }
          // The first token whose running sum passes the goal, or the last with a weight.
          const float goal = left * __shfl_sync(~0u, upto, 31);
          uint32_t l = 0;
#pragma unroll
          for (int step = 16; step; step /= 2)
            if (!(__shfl_sync(~0u, upto, l + step - 1) > goal)) l += step;
          const uint32_t live = __ballot_sync(~0u, w[i][0] + w[i][1] > 0.f);
          l = min(l, live ? 31 - __clz(live) : 0);
          const float even = __shfl_sync(~0u, w[i][0], l), odd = __shfl_sync(~0u, w[i][1], l);
          const float both = __shfl_sync(~0u, upto, l);  // Of all lanes: not behind a condition.
          const bool second = odd > 0.f && !(both - odd > goal && even > 0.f);
          if (lo == tile[i]) at = 2 * l + second;
        }
      }
      if (ids && mine) ids[k] = (first + lo) * kBlock + at;
      // A token that was drawn several times is read once.
      const uint32_t peers = __match_any_sync(~0u, mine ? lo * kBlock + at : ~0u);
      const uint32_t row = (block * p.kv_heads + kv_head) * kBlock + at;
      const float times = weight * __popc(peers);
      todo = __ballot_sync(~0u, mine && (peers & ((1u << lane) - 1)) == 0);
#pragma unroll 1
      while (todo) {
        constexpr int kAhead = 4;
        T x[kAhead][V];
        float share[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const bool any = todo != 0;
          const int from = any ? __ffs(todo) - 1 : 0;
          todo &= todo - 1;
          const float own = __shfl_sync(~0u, times, from);
          share[i] = any ? own : 0.f;
          const T* v = values + (int64_t)__shfl_sync(~0u, row, from) * D + lane * V;
          for (int j = 0; j < V; ++j) x[i][j] = static_cast<T>(0.f);
          if (!any) continue;
          if constexpr (V == 4) *reinterpret_cast<uint2*>(x[i]) = *reinterpret_cast<const uint2*>(v);
          else *reinterpret_cast<uint32_t*>(x[i]) = *reinterpret_cast<const uint32_t*>(v);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
          for (int j = 0; j < V; ++j) acc[j] += share[i] * to_float(x[i][j]);
      }
    }
  }

  __device__ __forceinline__ void consume() {
    const int warp = threadIdx.x / 32, tid = threadIdx.x;
    weigh(__shfl_sync(~0u, warp / 4, 0));
    gate.meet();
    for (int h = warp; h < group; h += kValueWarps) accumulate(h);
    uint32_t* sync = p.sync + (1 + list) * kTeamLine;
    gate.meet();
    if (tid == 0) add_release(sync, 1);
    // Small groups: several warps a head. Its one offset is known before the team has met.
    const int step = kValueWarps / group, sub = warp / group;
    const float u0 = !PER_TILE && p.rule == kSystematic ? uniform(warp % group, 0) : 0.f;
    if (lane == 0)
      while (load_acquire(sync) < team) {
      }
    __syncwarp();
    float acc[V] = {};
    if (sub < step) draw(warp % group, sub, step, u0, acc);
#pragma unroll
    for (int j = 0; j < V; ++j) sh.join[warp][lane * V + j] = acc[j];
    gate.meet();
    for (int i = tid; i < group * D; i += kValueThreads) {
      float x = 0;
      for (int s = 0; s < step; ++s) x += sh.join[s * group + i / D][i % D];
      p.parts[((int64_t)list * team + rank) * group * D + i] = x;
    }
    gate.meet();
    if (tid == 0) sh.last = add_acq_rel(sync + 8, 1) == team - 1;
    gate.meet();
    if (!sh.last) return;
    const int64_t head = (int64_t)row * p.q_heads + kv_head * group;
    const float inverse = 1.f / p.samples;
    for (int i = tid; i < group * D; i += kValueThreads) {
      const float* from = p.parts + (int64_t)list * team * group * D + i;
      float x = 0;
#pragma unroll 16
      for (uint32_t r = 0; r < team; ++r) x += __ldcg(from + (int64_t)r * group * D);
      if (p.out_f32) static_cast<float*>(p.out)[head * D + i] = x * inverse;
      else static_cast<T*>(p.out)[head * D + i] = static_cast<T>(x * inverse);
    }
    if (tid == 0) sync[0] = sync[8] = 0;  // All have left.
  }
};

template <class T, int D, int N, bool PER_TILE>
__global__ void __launch_bounds__(kValueThreads + 32, 1)
    values_kernel(const __grid_constant__ ValuesMaps maps, const __grid_constant__ ValuesParams p) {
  using L = ValuesLayout<D, N>;
  extern __shared__ uint8_t raw[];
  __shared__ ValuesShared<D, N> sh;
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u, q_at = stages + L::kStages * L::kStage;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(smem_u32(&sh.full[i]), 1);
      mbar_init(smem_u32(&sh.empty[i]), 4);
    }
    mbar_init(smem_u32(&sh.q_full), 1);
    mbar_init(smem_u32(&sh.gate), kValueThreads);
    mbar_init_fence();
    tma_prefetch_map(&maps.q);
    tma_prefetch_map(&maps.k);
  }
  wait_for_predecessor();
  launch_dependents();
  if (threadIdx.x == 0) sh.place = p.in_order ? team_place(p.sync) : blockIdx.x;
  __syncthreads();
  const uint32_t team = team_size(p.kv_heads), list = sh.place / team, rank = sh.place % team;
  const uint32_t row = list / p.kv_heads, len = p.lens[row], all = (len + kBlock - 1) / kBlock;
  const uint32_t per = rank_tiles(all, team), first = min(rank * per, all);
  const uint32_t* table = p.block_table + (uint64_t)(p.row_table ? p.row_table[row] : row) * p.table_stride;
  float* mass = reinterpret_cast<float*>(raw + (q_at + L::kQuery - smem_u32(raw)));
  ValuesBlock<T, D, N, PER_TILE> block{maps, p, sh, stages, q_at, mass,
                             rank_tiles((p.max_len + kBlock - 1) / kBlock, team), list, rank, team, row,
                             list % p.kv_heads, len, first, min(per, all - first), table,
                             p.seeds[row], p.positions[row],
                             p.q_heads / p.kv_heads, (int)threadIdx.x % 32, Gate{smem_u32(&sh.gate), 1 + kValueGroups, kValueThreads}};
  if (threadIdx.x >= kValueThreads) block.produce();
  else block.consume();
}

}  // namespace taper
