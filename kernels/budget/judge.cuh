// A meeting of the team: estimates, moments, budgets and the group's decision at each look.
#pragma once

#include "promise.cuh"
#include "tally.cuh"

namespace taper {

template <class T, int D, int N>
struct Judge : Tally<T, D, N> {
  using Base = Tally<T, D, N>;
  using typename Base::Ahead, typename Base::Sums;
  using Base::C, Base::kPairTiles, Base::V;
  using Base::gate, Base::group, Base::lane, Base::o, Base::p, Base::sh, Base::split, Base::warp;

  uint32_t met = 0;  // meetings so far

  // The team meets in two halves, so that there is work to do in between. `passed`: sampled keys of this warpgroup's tiles since
  // the last meeting.
  __device__ __forceinline__ void tell(uint32_t passed) {
    if (this->tid % 128 == 0) sh.passed[this->tid / 128] = passed;
    gate.meet();
    ++met;
    if (this->tid == 0) add_release(meeting(), (uint64_t)(sh.passed[0] + sh.passed[1]) << 32 | 1);
  }
  // Returns the team's sampled keys: no block tells of more before all have heard.
  __device__ __forceinline__ uint32_t hear() {
    if (this->tid == 0) {
      uint64_t told;
      do told = load_acquire(meeting());
      while ((uint32_t)told < met * o.team);
      sh.drawn = told >> 32;
    }
    gate.meet();
    return sh.drawn;
  }
  __device__ __forceinline__ uint64_t* meeting() const { return reinterpret_cast<uint64_t*>(this->counter() + kMetWord); }

  // Merges the team's exact parts and samples, and estimates the output where a sampled key
  // stands for `scale` keys: `split` has it, rounded, among its rows.
  __device__ __forceinline__ void combine(float scale, bool exact) {
#pragma unroll 1
    for (int item = warp; item < 2 * group; item += 8) {
      const int kind = item & 1, g = item / 2;
      float mean[V] = {}, lse = -INFINITY;
      if (kind == 1 || exact) lse = this->gather(kind, g, mean);
#pragma unroll
      for (int v = 0; v < V; ++v) sh.merged[kind][g][lane * V + v] = mean[v];
      if (lane == 0) sh.merged_lse[kind][g] = lse;
    }
    gate.meet();
#pragma unroll 1
    for (int g = warp; g < group; g += 8) {
      const float known = sh.merged_lse[0][g], own = sh.merged_lse[1][g], ahead = own + __logf(scale);
      // Shares of the two in the denominator; they are 0 and 0 where nothing is seen.
      const float top = max_nan(known, ahead), none = top == -INFINITY ? 0.f : 1.f;
      const float a = none * exp2_fast((known - top) * kLog2e), c = none * exp2_fast((ahead - top) * kLog2e);
      const float all = none > 0.f ? a + c : 1.f, inverse = __fdividef(none, all);
      float o2 = 0, ow = 0, w2 = 0, a2 = 0;
      float part[2][V];  // the output, and the sample's mean less it
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float mean = sh.merged[1][g][lane * V + v];
        const float out = (a * sh.merged[0][g][lane * V + v] + c * mean) * inverse, lean = mean - out;
        part[0][v] = out, part[1][v] = lean;
        o2 += out * out, ow += out * lean, w2 += lean * lean, a2 += mean * mean;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int v = 0; v < V; v += 2) {
          const float x = part[k][v], y = part[k][v + 1];
          const float x_high = to_float(static_cast<T>(x)), y_high = to_float(static_cast<T>(y));
          const int d = lane * V + v;
          st_shared_u32(split + split_at<D, N>(k, g, d), pack2<T>(x, y));
          st_shared_u32(split + split_at<D, N>(k, g + N, d), pack2<T>(x - x_high, y - y_high));
        }
      float x[4] = {o2, ow, w2, a2};
      warp_sums(x);
      if (lane == 0) sh.stat[g] = {own, x[0], x[1], x[2], __fdividef(c, all * scale), x[3], top + __logf(all)};
    }
    fence_async_smem();
    gate.meet();
  }

  // All consumers of the team, once the parts are combined, of b keys among the first `points`. All return the same. `look`
  // numbers the looks from 0, `noisy` counts those that could not tell.
  __device__ __forceinline__ Decision decide(uint32_t points, uint32_t b, uint32_t look, uint32_t& noisy, Ahead& a, uint32_t& pos) {
    const int first_tile = a.first;
    // A first look may err upwards.
    const float limit = 4 * b < o.most ? kDoubt * o.limit : o.limit;
    if (this->takes_few(pos, a)) this->look_at_few(a.few, b);
    Sums sum = {};
    Base::look(points, pos, sum);
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
#pragma unroll
      for (int c = 0; c < C; ++c)
#pragma unroll
        for (int k = 0; k < 3; ++k) sum[c][k] = this->join(k, sum[c][k], __shfl_xor_sync(~0u, sum[c][k], d));
#pragma unroll
    for (int c = 0; c < C; ++c)
      if (lane < 4)
        // The fourth is the pairs'.
        *reinterpret_cast<float4*>(sh.sums[warp][this->head(c)]) = make_float4(sum[c][0], sum[c][1], sum[c][2], 0.f);
    gate.meet();
    // A sum travels with the number of its look in place of a flag. One warp a head.
    uint64_t* sums = p.sums + (int64_t)o.slot * o.room * group * 4;
    const uint32_t epoch = look + 1;
    const bool mixes = this->mixes(a);
#pragma unroll 1
    for (int g = warp; g < group; g += 8) {
      float own = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) own = this->join(lane & 3, own, sh.sums[w][g][lane & 3]);
      if (mixes) {
        float more[2] = {};
        this->mix(first_tile, a.count, g, a.dot, more);
#pragma unroll 1
        for (int t = first_tile + o.team; t < kPairTiles && !o.scout; t += o.team) {
          float dot[4];
          this->gram(this->pair_at(t, a.count), dot);
          this->mix(t, a.count, g, dot, more);
        }
        warp_sums(more);
        // Of the two a ratio is wanted: eight bits of each are enough.
        if ((lane & 3) == 3) own = __uint_as_float(pack2<__nv_bfloat16>(more[0], more[1]));
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
      if (g + 8 >= group && lane == 0) mbar_arrive(smem_u32(&sh.heard));
      auto of_rank = [&](uint64_t word) {
        return lane < o.team ? __uint_as_float((uint32_t)(word >> 32)) : 0.f;
      };
      const uint32_t pairs = lane < o.team ? hi.y >> 32 : 0;
      float x[4] = {of_rank(lo.x), of_rank(lo.y), __uint_as_float(pairs << 16), __uint_as_float(pairs & 0xFFFF0000)};
      warp_sums(x);
      const float e2 = x[0], away = x[1];
      const float third = p.rule == kChi2 ? warp_max(of_rank(hi.x)) : warp_sum(of_rank(hi.x));
      const HeadStat& s = sh.stat[g];
      const float d = b, free = over(1.f, d - 1);
      Moments m;
      m.n = o.residual, m.b = d, m.inverse = s.inverse, m.o2 = s.o2;
      m.variance_d = (e2 - over(1.f, d)) * free;
      m.trace_r = (away - over(s.w2, d)) * free;
      m.trace_n = (third - over(s.a2, d)) * free;
      m.heaviest = over(third, fmaxf(e2, FLT_MIN));
      // As a covariance in D dimensions has it, and 1 where nothing varies or a sum is too large to divide by.
      m.alignment = x[2] < x[3] && x[3] < 0x1p126f ? fmaxf(over(x[2], x[3]), 1.f / D) : 1.f;
      float budget = 0.f;
      const Verdict v = b < 2 ? kNoisy : Promise{p, m, limit}.verdict(lane, budget);
      if (lane == 0) sh.verdict[g] = v, sh.budget[g] = budget;
    }
    // By the warp that has the fewest heads, and not waited for before the others are: the block has heard the team.
    uint32_t heard = 0;
    if (warp == 7) {
      mbar_wait(smem_u32(&sh.heard), look & 1);
      if (lane == 0) heard = atomicAdd(this->counter() + kHeardWord, 1u);
    }
    gate.meet();
    const Decision decision = settle(points, b, limit, noisy);
    if (warp == 7 && lane == 0) sh.last = heard == o.team * epoch - 1;
    return decision;
  }

  // By all consumers, after the last look: whether no other block of the team was later in hearing it.
  __device__ __forceinline__ bool was_last() const {
    gate.meet();
    return sh.last;
  }
  // The group reads what its neediest head needs. What a sample says of its own size is checked
  // by what the larger sample says, until it is enough.
  __device__ __forceinline__ Decision settle(uint32_t points, uint32_t b, float limit, uint32_t& noisy) const {
    const bool in = lane < group;
    const float budget = in ? sh.budget[lane] : 0.f;
    uint32_t verdict = in ? sh.verdict[lane] : kSample;
    if (verdict == kSample && !(budget < limit)) verdict = kGoDense;
    // The first head that does not say how much speaks for the group.
    const uint32_t bad = __ballot_sync(~0u, verdict != kSample);
    const uint32_t first = __shfl_sync(~0u, verdict, bad ? __ffs(bad) - 1 : 0);
    const uint32_t most = __reduce_max_sync(~0u, verdict == kSample ? (uint32_t)budget : 0);
    uint32_t wanted = o.residual;
    if (!bad) {
      if (most <= b) return {kSampled, b};
      wanted = min(most, grown(b));
    } else if (first == kNoisy && ++noisy < kNoisyLooks) {
      wanted = 4 * max(b, 2u);
    }
    if (wanted >= min(o.residual, o.most)) return {kDense, 0};
    const uint32_t next = points + o.points_of(wanted - b);
    return next < o.w.len && next <= p.capacity ? Decision{0, next} : Decision{kDense, 0};
  }
};

}  // namespace taper
