// A look at a sample: moments, budgets and the group's decision.
//
// With e a sampled key's weight, v its value and o the estimated output, the error is
// that of a sum of r = e (v - o). The parts of all ranks give o and the mean of r; each
// rank then looks once more at its own sampled values, where one product of values with
// o and with that mean gives every key's |r|^2 and its distance from the mean.
#pragma once

#include <float.h>

#include "draw.cuh"

namespace taper {

enum Verdict : uint32_t { kSample = 0, kNoisy = 1, kGoDense = 2 };

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x < 0 ? 0.f : x));  // NaN stays NaN.
  return y;
}
// x / y to two units in the last place, for y below 2^126.
__device__ __forceinline__ float over(float x, float y) { return __fdividef(x, y); }

// Of a head and its sample; e sums to 1, so `inverse` is 1 over the denominator. `heaviest` is
// chi2's alone, trace_n of the rules that it is not.
struct Moments {
  float n, b, inverse, o2, variance_d, trace_n, trace_r, trace_r2, heaviest;
};

// One head's verdict; `limit` draws and more are not worth while.
struct Promise {
  const SampledParams& p;
  const Moments& m;
  const float limit;

  // The draws without replacement that err as r^2 draws with it; NaN stays NaN.
  __device__ __forceinline__ float draws(float r) const {
    const float b = r * r;
    return isinf(b) ? m.n : ceilf(over(b, 1.f + over(b, m.n)));
  }
  // The 1 - delta quantile of the error's norm: Satterthwaite's gamma, by Wilson and
  // Hilferty.
  __device__ __forceinline__ float quantile(float trace, float trace2) const {
    if (trace <= 0) return 1.f;
    const float spread = over(2 * trace2, 9 * trace * trace);
    const float q = fmaxf(1 - spread + p.upper * root(spread), 0.f);
    return root(q * q * q);
  }
  // A rule's bound for the norm that errors are measured against; c is chi2's quantile.
  __device__ __forceinline__ float bound(float norm, float c, float scalar) const {
    if (p.rule == kRatio || p.rule == kChi2) {
      // The denominator's own error changes the output's to second order only: chi2 leaves it out.
      const bool chi2 = p.rule == kChi2;
      const float trace = m.trace_r * (1.f + (chi2 ? p.unseen * m.heaviest : 0.f));
      const float deviation = m.n * root(trace) * m.inverse;
      return draws(c * over(deviation, p.epsilon * norm) + (chi2 ? 0.f : p.rest * scalar));
    }
    const float deviation = over(m.n * root(m.trace_n) * m.inverse, norm);
    float r = INFINITY;
#pragma unroll 1
    for (int i = 0; i < 6; ++i) {
      const float x = p.split_vector[i] * deviation, y = p.split_scalar[i] * scalar;
      r = fminf(r, p.rule == kLemma ? over(2 * (x + y), p.epsilon)
                                    : over(x + (1 + p.epsilon) * y, p.epsilon));
    }
    return x_or(r, deviation);
  }
  // fminf drops NaN, which must stay.
  __device__ __forceinline__ float x_or(float r, float deviation) const {
    return deviation != deviation ? deviation : draws(r);
  }
  __device__ __forceinline__ Verdict verdict(float& budget) const {
    const float scalar = m.n * root(m.variance_d) * m.inverse;
    if (p.rule == kDenominator) {
      budget = draws(over(p.whole * scalar, p.epsilon));
      return budget != budget ? kGoDense : kSample;
    }
    const float trace = p.rule == kRatio || p.rule == kChi2 ? m.trace_r : m.trace_n;
    // As a function of the spread's root the quantile is concave: least at an end.
    const float least = p.rule == kRatio ? p.most : fminf(quantile(1.f, 1.f), 1.f);
    // Where even the norm with its noise is too small, no larger sample is asked for.
    if (!(m.o2 > 0) || isinf(m.o2)) return kGoDense;
    const float reach = m.n * m.inverse;
    const float left = m.o2 - reach * reach * fmaxf(trace, 0.f) * (over(1, m.b) - over(1, m.n));
    // By the norm with its noise, by the norm without, and by chi2's own quantile: a loop, so
    // that the bound's instructions are fetched once.
    float norm = root(m.o2), c = least;
#pragma unroll 1
    for (int step = 0;; ++step) {
      budget = bound(norm, c, scalar);
      if (step == 0) {
        if (budget > limit) return kGoDense;
        if (left < kLeastSignal * m.o2) return kNoisy;
        norm = root(left);
      } else if (step == 2 || p.rule != kChi2 || budget > limit) {
        break;
      } else {
        c = quantile(m.trace_r, m.trace_r2);
      }
    }
    return budget != budget ? kGoDense : kSample;
  }
};

template <class T, int D, int N>
struct Judge {
  static constexpr int V = D / 32, kLoads = D / 32, NT = N / 8;
  using Vec = typename std::conditional<V == 4, float4, float2>::type;
  const SampledParams& p;
  SampledShared<D, N>& sh;
  const Outline& o;
  Gate& gate;
  const int tid, warp, lane, group;  // of the consumers
  uint32_t met = 0;                  // meetings so far

  __device__ __forceinline__ uint32_t* counter() const { return p.sync + (1 + o.list) * kTeamLine; }
  // The team meets in two halves, so that there is work to do in between.
  __device__ __forceinline__ void tell() {
    gate.meet();
    ++met;
    if (tid == 0) add_release(counter(), 1);
  }
  __device__ __forceinline__ void hear() {
    if (tid == 0)
      while (load_acquire(counter()) < met * o.team) {
      }
    gate.meet();
  }
  __device__ __forceinline__ int64_t part(int kind, uint32_t rank, int g) const {
    return ((o.list * 2ll + kind) * o.team + rank) * group + g;
  }

  // One head's parts of the team, in rank order: this lane's share of their mean, and its log-sum-exp.
  __device__ __forceinline__ float gather(int kind, int g, float (&mean)[V]) const {
    const float* src = p.d.part_o + part(kind, 0, g) * D + lane * V;
    const float lse = lane < o.team ? __ldcg(p.d.part_lse + part(kind, lane, g)) : -INFINITY;
    float weight = 0.f, sum = 0.f, top = -INFINITY;
#pragma unroll
    for (int v = 0; v < V; ++v) mean[v] = 0.f;
#pragma unroll 1
    for (uint32_t r0 = 0; r0 < o.team; r0 += 16) {
      Vec x[16];
#pragma unroll
      for (int k = 0; k < 16; ++k)
        x[k] = __ldcg(reinterpret_cast<const Vec*>(src + (int64_t)min(r0 + k, o.team - 1) * group * D));
      if (r0 == 0) {  // While the parts are on their way.
        top = warp_max(lse);
        weight = lse == -INFINITY ? 0.f : exp2_fast((lse - top) * kLog2e);
        sum = warp_sum(weight);
      }
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const float w = __shfl_sync(~0u, weight, (r0 + k) & 31);  // 0 beyond the team
#pragma unroll
        for (int v = 0; v < V; ++v) mean[v] += w * reinterpret_cast<const float*>(&x[k])[v];
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) mean[v] = sum > 0.f ? __fdividef(mean[v], sum) : 0.f;
    return sum > 0.f ? top + __logf(sum) : -INFINITY;
  }

  // Merges the team's exact parts and samples, and estimates the output
  // where a sampled key stands for `scale` keys: it is left in join_o.
  __device__ __forceinline__ void combine(float scale, bool exact) {
#pragma unroll 1
    for (int item = warp; item < 2 * group; item += 8) {
      const int kind = item & 1, g = item / 2;
      float mean[V] = {}, lse = -INFINITY;
      if (kind == 1 || exact) lse = gather(kind, g, mean);
#pragma unroll
      for (int v = 0; v < V; ++v) sh.merged[kind][g][lane * V + v] = mean[v];
      if (lane == 0) sh.merged_lse[kind][g] = lse;
    }
    gate.meet();
#pragma unroll 1
    for (int g = warp; g < group; g += 8) {
      const float known = sh.merged_lse[0][g], own = sh.merged_lse[1][g], ahead = own + __logf(scale);
      // Shares of the two in the denominator; they are 0 and 0 where nothing is seen.
      const float top = fmaxf(known, ahead), none = top == -INFINITY ? 0.f : 1.f;
      const float a = none * exp2_fast((known - top) * kLog2e), c = none * exp2_fast((ahead - top) * kLog2e);
      const float all = none > 0.f ? a + c : 1.f;
      float o2 = 0, ow = 0, w2 = 0, a2 = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int d = lane * V + v;
        const float mean = sh.merged[1][g][d];
        const float out = none * __fdividef(a * sh.merged[0][g][d] + c * mean, all), lean = mean - out;
        sh.join_o[g][d] = out;
        const T high = static_cast<T>(out), lean_high = static_cast<T>(lean);
        T* split = reinterpret_cast<T*>(&sh.split[0][g][d]);
        split[0] = high, split[N * D] = static_cast<T>(out - to_float(high));
        split[2 * N * D] = lean_high, split[3 * N * D] = static_cast<T>(lean - to_float(lean_high));
        o2 += out * out, ow += out * lean, w2 += lean * lean, a2 += mean * mean;
      }
      o2 = warp_sum(o2), ow = warp_sum(ow), w2 = warp_sum(w2), a2 = warp_sum(a2);
      if (lane == 0) {
        sh.stat[g] = {own, __fdividef(c, all * scale), o2, ow, w2, a2, top + __logf(all)};
      }
    }
    gate.meet();
  }

  __device__ __forceinline__ const T* values() const { return static_cast<const T*>(p.d.v); }
  __device__ __forceinline__ uint32_t row_of(uint32_t id) const {
    return (o.table[id / kBlock] * p.d.kv_heads + o.kv_head) * kBlock + id % kBlock;
  }

  // Sixteen draws for one warp: which, their values and scores.
  struct Place {
    uint32_t start, stop;  // draws; none where start >= stop
    uint32_t id;           // of draw start + lane % 16
    bool pairs;            // of the first few draws, for their products
  };
  struct Strip : Place {
    uint4 x[kLoads], y[kLoads];
    float score[NT][4];
  };
  // The rank's strips of a sample of b, and after them those of the first few draws.
  __device__ __forceinline__ uint32_t strips(uint32_t b) const { return Run(o, 0, b).tiles() * 4; }
  __device__ __forceinline__ Place find(uint32_t strip, uint32_t b) const {
    const uint32_t own = strips(b);
    Place s;
    s.pairs = strip >= own;
    s.start = s.pairs ? (strip - own) * 16 : (o.first + strip / 4 * o.team) * kBlock + strip % 4 * 16;
    s.stop = s.pairs ? min(b, (uint32_t)kCovarianceKeys) : b;
    s.id = s.start < s.stop ? drawn_id<D, N>(p, sh, min(s.start + (lane & 15), s.stop - 1)) : 0;
    return s;
  }
  // `mine`: the row of the lane's draw.
  __device__ __forceinline__ void fetch(Strip& s, uint32_t mine) const {
    const int quad = lane & 3;
    if (s.start >= s.stop) return;
    const uint4* lo = reinterpret_cast<const uint4*>(
        values() + (int64_t)__shfl_sync(~0u, mine, lane / 4) * D) + quad;
    const uint4* hi = reinterpret_cast<const uint4*>(
        values() + (int64_t)__shfl_sync(~0u, mine, lane / 4 + 8) * D) + quad;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) s.x[i] = lo[4 * i], s.y[i] = hi[4 * i];
  }
  // Scores of other ranks' draws are there only after the meeting.
  __device__ __forceinline__ void fetch_scores(Strip& s) const {
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = t * 8 + (lane & 3) * 2 + (i & 1);
        const uint32_t draw = s.start + lane / 4 + 8 * (i / 2);
        s.score[t][i] = draw < s.stop && h < group
                            ? __ldcg(p.scores + ((int64_t)o.list * p.capacity + draw) * group + h)
                            : -INFINITY;
      }
  }

  // Adds a strip's e^2, |r|^2, e^2 |v|^2 and |r - mean|^4; of chi2 the largest e^2 for the third.
  __device__ __forceinline__ void look(const Strip& s, float share, float (&sum)[NT][2][4]) {
    const int quad = lane & 3;
    if (s.start >= s.stop) return;
    float vo[NT][4] = {}, vl[NT][4] = {}, norm[2] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = s.x[i], y = s.y[i];
      const uint32_t a[4] = {x.x, x.y, x.z, x.w}, c[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T *va = reinterpret_cast<const T*>(&a[j]), *vc = reinterpret_cast<const T*>(&c[j]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          norm[0] += to_float(va[k]) * to_float(va[k]);
          norm[1] += to_float(vc[k]) * to_float(vc[k]);
        }
      }
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float(&to)[4] = k < 2 ? vo[t] : vl[t];
          const uint4 z = *reinterpret_cast<const uint4*>(&sh.split[k][t * 8 + lane / 4][(quad + 4 * i) * 8]);
          mma_16x8x16<T>(to, x.x, y.x, x.y, y.y, z.x, z.y);
          mma_16x8x16<T>(to, x.z, y.z, x.w, y.w, z.z, z.w);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      norm[k] += __shfl_xor_sync(~0u, norm[k], 1);
      norm[k] += __shfl_xor_sync(~0u, norm[k], 2);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = t * 8 + quad * 2 + (i & 1);
        const uint32_t draw = s.start + lane / 4 + 8 * (i / 2);
        if (s.score[t][i] == -INFINITY) continue;
        const HeadStat& stat = sh.stat[h];
        const float e = exp2_fast(s.score[t][i] - stat.lse * kLog2e);
        const float away = e * e * (norm[i / 2] - 2.f * vo[t][i] + stat.o2);
        const float along = e * share * (vl[t][i] - stat.ow);  // r . mean
        const float off = away - 2.f * along + share * share * stat.w2;
        if (s.pairs) {
          float* pair = sh.pair[draw][h];
          pair[0] = e, pair[1] = vo[t][i], pair[2] = along;
        } else {
          float* to = sum[t][i & 1];
          to[0] += e * e, to[1] += away, to[3] += off * off;
          to[2] = p.rule == kChi2 ? fmaxf(to[2], e * e) : to[2] + e * e * norm[i / 2];
        }
      }
  }

  // The first few draws' r, centred, multiplied with one another: pairs (i, j) with i > j
  // lie in eleven tiles of 16 by 8, which the ranks share from the least busy one on.
  static constexpr int kPairTiles = 11;
  static __device__ __forceinline__ int pair_row(int tile) { return tile < 2 ? 0 : tile < 6 ? 16 : 32; }
  static __device__ __forceinline__ int pair_col(int tile) {
    return 8 * (tile < 2 ? tile : tile < 6 ? tile - 2 : tile - 6);
  }
  __device__ __forceinline__ int first_pair_tile(uint32_t b) const {
    return (o.first + o.team - Run(o, 0, b).end() % o.team) % o.team;
  }
  __device__ __forceinline__ uint32_t pair_id(int tile, uint32_t few) const {
    return drawn_id<D, N>(p, sh, min(lane < 16 ? pair_row(tile) + lane : pair_col(tile) + (lane & 7), few - 1));
  }
  __device__ __forceinline__ void gram(uint32_t mine, float (&dot)[4]) const {
    const int quad = lane & 3;
    const T* rows[3];
#pragma unroll
    for (int j = 0; j < 3; ++j)
      rows[j] = values() + (int64_t)__shfl_sync(~0u, mine, j * 8 + lane / 4) * D + quad * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) dot[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(rows[0] + 32 * i);
      const uint4 y = *reinterpret_cast<const uint4*>(rows[1] + 32 * i);
      const uint4 z = *reinterpret_cast<const uint4*>(rows[2] + 32 * i);
      mma_16x8x16<T>(dot, x.x, y.x, x.y, y.y, z.x, z.y);
      mma_16x8x16<T>(dot, x.z, y.z, x.w, y.w, z.z, z.w);
    }
  }
  // The sum of a head's squared products in a tile, both orders.
  __device__ __forceinline__ float mix(int tile, uint32_t few, int h, float share, const float (&dot)[4]) const {
    const HeadStat& s = sh.stat[h];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = pair_row(tile) + lane / 4 + 8 * (i / 2);
      const int col = pair_col(tile) + (lane & 3) * 2 + (i & 1);
      if (row >= few || col >= row) continue;
      const float *a = sh.pair[row][h], *c = sh.pair[col][h];
      const float x = a[0] * c[0] * (dot[i] - a[1] - c[1] + s.o2) - a[2] - c[2] + share * share * s.w2;
      sum += 2.f * x * x;
    }
    return warp_sum(sum);
  }

  // What of the judging does not depend on the team's parts.
  struct Ahead {
    Strip strip;
    uint32_t row, pair_row;  // of the lane's draw, and of its draw among the first few
    float dot[4];
  };
  __device__ __forceinline__ uint32_t jobs(uint32_t b) const {
    const bool mixes = p.rule == kChi2 && first_pair_tile(b) < kPairTiles;
    return strips(b) + (mixes ? 3 : 0);
  }
  __device__ __forceinline__ bool takes_pairs(uint32_t b) const { return warp < group && jobs(b) != strips(b); }
  // Where the values lie, while the sample's tiles are on their way,
  __device__ __forceinline__ void look_up(uint32_t b, Ahead& a) const {
    Draws<D, N>{sh}.await(b);
    Place place{0, 0, 0, false};
    if (warp < jobs(b)) place = find(warp, b);
    const uint32_t few = min(b, (uint32_t)kCovarianceKeys);
    const uint32_t id = takes_pairs(b) ? pair_id(first_pair_tile(b), few) : 0;
    static_cast<Place&>(a.strip) = place;
    a.row = row_of(place.id), a.pair_row = row_of(id);
  }
  // and they themselves, while the team meets.
  __device__ __forceinline__ void prepare(uint32_t b, Ahead& a) const {
    fetch(a.strip, a.row);
    if (takes_pairs(b)) gram(a.pair_row, a.dot);
  }

  // All consumers of the team, once the parts are combined. All return the same. `look` numbers
  // the looks from 0, `noisy` counts those that could not tell.
  __device__ __forceinline__ Decision decide(uint32_t b, uint32_t look, uint32_t& noisy, Ahead& a) {
    const uint32_t few = min(b, (uint32_t)kCovarianceKeys), all = jobs(b), first_tile = first_pair_tile(b);
    const float share = over(1.f, (float)b);
    // A first look may err upwards.
    const float limit = 4 * b < o.most ? kDoubt * o.limit : o.limit;
    float sum[NT][2][4] = {};
    // The first strip's values are there; where the next one's lie is looked up beside each.
    fetch_scores(a.strip);
#pragma unroll 1
    for (uint32_t k = warp + 8;; k += 8) {
      Place next{0, 0, 0, false};
      if (k < all) next = find(k, b);
      this->look(a.strip, share, sum);
      if (k >= all) break;
      static_cast<Place&>(a.strip) = next;
      fetch(a.strip, row_of(a.strip.id));
      fetch_scores(a.strip);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float x = sum[t][i][k];
#pragma unroll
          for (int d = 4; d < 32; d *= 2) x = join(k, x, __shfl_xor_sync(~0u, x, d));
          if (lane < 4) sh.sums[warp][t * 8 + lane * 2 + i][k] = x;
        }
    gate.meet();
    // A sum travels with the number of its look in place of a flag. One warp a head.
    uint64_t* sums = p.sums + (int64_t)o.list * o.team * group * 4;
    const uint32_t epoch = look + 1;
    const bool mixes = all != strips(b);
    // Products of few keys stand for those of all.
    const float stands = over((float)b * (b - 1), (float)few * (few - 1));
#pragma unroll 1
    for (int g = warp; g < group; g += 8) {
      float own = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) own = join(lane & 3, own, sh.sums[w][g][lane & 3]);
      if (mixes) {
        float more = mix(first_tile, few, g, share, a.dot);
#pragma unroll 1
        for (int t = first_tile + o.team; t < kPairTiles; t += o.team) {
          float dot[4];
          gram(row_of(pair_id(t, few)), dot);
          more += mix(t, few, g, share, dot);
        }
        if ((lane & 3) == 3) own += more * stands;
      }
      if (lane < 4)
        store_relaxed(sums + ((int64_t)o.rank * group + g) * 4 + lane,
                      (uint64_t)__float_as_uint(own) << 32 | epoch);
      const uint64_t* of = sums + ((int64_t)min((uint32_t)lane, o.team - 1) * group + g) * 4;
      ulonglong2 lo, hi;
      do {
        lo = load_relaxed(of), hi = load_relaxed(of + 2);
      } while ((uint32_t)lo.x != epoch || (uint32_t)lo.y != epoch || (uint32_t)hi.x != epoch ||
               (uint32_t)hi.y != epoch);
      __syncwarp();
      auto of_rank = [&](uint64_t word) {
        return lane < o.team ? __uint_as_float((uint32_t)(word >> 32)) : 0.f;
      };
      const float e2 = warp_sum(of_rank(lo.x)), away = warp_sum(of_rank(lo.y)), off = warp_sum(of_rank(hi.y));
      const float third = p.rule == kChi2 ? warp_max(of_rank(hi.x)) : warp_sum(of_rank(hi.x));
      const HeadStat& s = sh.stat[g];
      const float d = b, free = over(1.f, d - 1);
      Moments m;
      m.n = o.residual, m.b = d, m.inverse = s.inverse, m.o2 = s.o2;
      m.variance_d = (e2 - over(1.f, d)) * free;
      m.trace_r = (away - over(s.w2, d)) * free;
      m.trace_n = (third - over(s.a2, d)) * free;
      m.heaviest = over(third, fmaxf(e2, FLT_MIN));
      m.trace_r2 = off * free * free;
      float budget = 0.f;
      const Verdict v = Promise{p, m, limit}.verdict(budget);
      if (lane == 0) sh.verdict[g] = v, sh.budget[g] = budget;
    }
    gate.meet();
    return settle(b, limit, noisy);
  }

  // Sums over lanes, warps and ranks, but for the largest e^2.
  __device__ __forceinline__ float join(int k, float x, float y) const {
    return k == 2 && p.rule == kChi2 ? fmaxf(x, y) : x + y;
  }

  // The group reads what its neediest head needs. What a sample says of its own size is checked
  // by what the larger sample says, until it is enough.
  __device__ __forceinline__ Decision settle(uint32_t b, float limit, uint32_t& noisy) const {
    uint32_t verdict = kSample;
    float most = 0;
#pragma unroll 1
    for (int g = 0; g < group && verdict == kSample; ++g) {
      verdict = sh.verdict[g];
      if (verdict == kSample && !(sh.budget[g] < limit)) verdict = kGoDense;
      most = fmaxf(most, sh.budget[g]);
    }
    uint32_t wanted = o.residual;
    if (verdict == kSample) {
      if (most <= b) return {kSampled, b};
      wanted = min((uint32_t)most, b + (b + 1) / 2);
    } else if (verdict == kNoisy && ++noisy < kNoisyLooks) {
      wanted = 4 * b;
    }
    return wanted < min(o.residual, o.most) && wanted <= p.capacity ? Decision{0, wanted} : Decision{kDense, 0};
  }
};

}  // namespace taper
