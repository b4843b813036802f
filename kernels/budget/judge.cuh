// A meeting of the team: estimates, moments, budgets and the group's decision at each look.
#pragma once

#include "pairs.cuh"
#include "promise.cuh"

namespace taper {

template <class T, int D, int N>
struct Judge : Pairs<T, D, N> {
  using Base = Pairs<T, D, N>;
  using Base::gate, Base::group, Base::lane, Base::o, Base::p, Base::sh, Base::split, Base::warp;

  uint32_t met = 0;    // meetings so far

  // A team of one has nobody to tell. Nor has a scout, which may run beside the last launch's: they have one line of counters.
  __device__ __forceinline__ bool alone() const { return o.team == 1; }
  // The team meets in two halves, so that there is work to do in between. `passed`: sampled keys of this warpgroup's tiles since
  // the last meeting.
  __device__ __forceinline__ void tell(uint32_t passed) {
    if (this->tid % 128 == 0) sh.passed[this->tid / 128] = passed;
    gate.meet();
    ++met;
    if (this->tid > 0) return;
    const uint32_t both = sh.passed[0] + sh.passed[1];
    if (alone()) sh.drawn = met == 1 ? both : sh.drawn + both;
    else add_release(meeting(), (uint64_t)both << 32 | 1);
  }
  // Returns the team's sampled keys: no block tells of more before all have heard.
  __device__ __forceinline__ uint32_t hear() {
    if (this->tid == 0 && !alone()) {
      uint64_t told;
      do told = load_acquire(meeting());
      while ((uint32_t)told < met * o.team);
      sh.drawn = told >> 32;
    }
    gate.meet();
    return sh.drawn;
  }
  __device__ __forceinline__ uint64_t* meeting() const { return reinterpret_cast<uint64_t*>(this->counter() + kMetWord); }

  // From the second look on, by one thread: a block writes and tells again only when all have heard of the last, and read it.
  __device__ __forceinline__ void wait_for_slowest() const {
    if (alone()) return;
    while (load_acquire(this->counter() + kHeardWord) < met * o.team) {
    }
  }

  // Merges the team's exact parts, samples and their squares, and estimates the output where a sampled key stands for `scale`
  // keys: half of a head's dimensions a warp.
  __device__ __forceinline__ void combine(float scale) {
    constexpr int kLanes = D / 4, kBeside = 32 / kLanes, kLoads = 8 / kBeside;  // a part's lanes, parts side by side
#pragma unroll 1
    for (int item = warp; item < 2 * group; item += 8) {
      const int half = item & 1, g = item / 2, d = half * (D / 2) + lane % kLanes * 2;
      const bool is = lane < o.team;
      const float lse[2] = {is ? __ldcg(p.d.part_lse + this->part(0, lane, g)) : -INFINITY,
                            is ? __ldcg(p.d.part_lse + this->part(1, lane, g)) : -INFINITY};
      const float4 square = __ldcg(this->squares(min((uint32_t)lane, o.team - 1), g));
      const uint8_t* src = reinterpret_cast<const uint8_t*>(p.d.part_o + (int64_t)this->part(0, 0, g) * D + d);
      const uint32_t step = group * D * 4, last = (o.team - 1) * step, kind = o.room * step;  // in bytes
      float2 sum[3] = {};
      typename Base::Weights known{}, own{};
#pragma unroll 1
      for (uint32_t r0 = 0; r0 < o.team; r0 += 8) {
        const uint32_t first = r0 + lane / kLanes;
        float2 x[3][kLoads];
#pragma unroll
        for (int i = 0; i < 3; ++i)
#pragma unroll
          for (int k = 0; k < kLoads; ++k)
            x[i][k] = __ldcg(reinterpret_cast<const float2*>(src + i * kind + min((first + k * kBeside) * step, last)));
        if (r0 == 0) known = this->weigh(lse[0]), own = this->weigh(lse[1]);  // While the parts are on their way.
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          const int rank = (first + k * kBeside) & 31;  // A weight is 0 beyond the team.
          const float a = __shfl_sync(~0u, known.own, rank), c = __shfl_sync(~0u, own.own, rank), w[3] = {a, c, c * c};
#pragma unroll
          for (int i = 0; i < 3; ++i) sum[i].x += w[i] * x[i][k].x, sum[i].y += w[i] * x[i][k].y;
        }
      }
#pragma unroll
      for (int d = kLanes; d < 32; d *= 2)
#pragma unroll
        for (int i = 0; i < 3; ++i)
          sum[i].x += __shfl_xor_sync(~0u, sum[i].x, d), sum[i].y += __shfl_xor_sync(~0u, sum[i].y, d);

      const float ahead = own.lse + __logf(scale);
      // Shares of the two in the denominator; they are 0 and 0 where nothing is seen.
      const float top = max_nan(known.lse, ahead), none = top == -INFINITY ? 0.f : 1.f;
      const float a = none * exp2_fast((known.lse - top) * kLog2e), c = none * exp2_fast((ahead - top) * kLog2e);
      const float all = none > 0.f ? a + c : 1.f, inverse = __fdividef(none, all);
      // The output, and the sample's mean less it.
      const float2 mean = {sum[1].x * own.inverse, sum[1].y * own.inverse};
      const float2 out = {(a * (sum[0].x * known.inverse) + c * mean.x) * inverse,
                          (a * (sum[0].y * known.inverse) + c * mean.y) * inverse};
      const float2 lean = {mean.x - out.x, mean.y - out.y};
      auto put = [&](int row, float2 y) {
        const float high[2] = {to_float(static_cast<T>(y.x)), to_float(static_cast<T>(y.y))};
        st_shared_u32(split + split_at<D, N>(2 * row * N + g, d), pack2<T>(y.x, y.y));
        st_shared_u32(split + split_at<D, N>((2 * row + 1) * N + g, d), pack2<T>(y.x - high[0], y.y - high[1]));
      };
      put(0, out), put(1, lean);
      const float w = own.own * own.inverse, w2 = is ? w * w : 0.f;
      const float most = warp_max(w2 * square.z), most_v = warp_max(w2 * square.w);
      constexpr float kOnce = 1.f / kBeside;  // Each dimension is in so many lanes.
      auto dot = [](float2 a, float2 b) { return kOnce * (a.x * b.x + a.y * b.y); };
      float x[8] = {dot(out, out), dot(out, lean), dot(lean, lean), dot(mean, mean),
                    own.inverse * own.inverse * dot(out, sum[2]), w2 * square.x, w2 * square.y, lane == 0 ? most_v : 0.f};
      float one = sums_apart(x);
#pragma unroll
      for (int d = 2; d; d /= 2) one += __shfl_xor_sync(~0u, one, d);
      HeadStat& to = sh.stat[half][g];
      if (lane % 4 == 0) reinterpret_cast<float*>(&to)[lane / 4] = one;
      if (lane == 1) *reinterpret_cast<float4*>(&to.lse) = make_float4(own.lse, __fdividef(c, all * scale), top + __logf(all), most);
    }
    cp_async_wait_all();  // Scores of the few.
    fence_async_smem();
    gate.meet();
  }

  // All consumers of the team, once the parts are combined, of b keys among the first `points`. All return the same. `noisy`
  // counts the looks that could not tell; `beside` is for those who hold no rows of the few, to do meanwhile.
  template <class F>
  __device__ __forceinline__ Decision decide(uint32_t points, uint32_t b, uint32_t& noisy, F beside) {
    // A first look may err upwards.
    const float limit = 4 * b < o.most ? kDoubt * o.limit : o.limit;
    mbar_arrive_warp(smem_u32(&sh.read), lane);  // All parts are, which the sifting warps tell the team.
    if (warp < 4) beside();
    if (this->holds()) this->look(b);
    fence_async_smem();  // What this wrote where tiles were comes before tiles.
    gate.meet();
    const uint32_t few = this->wanted() ? this->count(points) : 0;
    if (few > 0) {
      this->sum(few);
      gate.meet();
    }
    // Every warp comes to the verdicts by itself, of eight heads side by side. The first head that does not say how much speaks
    // for the group.
    uint32_t bad = kSample, most = 0;
#pragma unroll 1
    for (int g0 = 0; g0 < group; g0 += 8) {
      float budget = 0.f;
      const bool in = g0 + lane / 4 < group;
      Verdict v = judged(min(g0 + lane / 4, group - 1), b, few, limit, budget);
      if (v == kSample && !(budget < limit)) v = kGoDense;
      const uint32_t not_so = __ballot_sync(~0u, in && v != kSample);
      const uint32_t first = __shfl_sync(~0u, v, not_so ? __ffs(not_so) - 1 : 0);
      if (bad == kSample && not_so) bad = first;
      most = max(most, __reduce_max_sync(~0u, in && v == kSample ? (uint32_t)budget : 0));
    }
    return settle(points, b, bad, most, noisy);
  }

  // A head's verdict, by four lanes.
  __device__ __forceinline__ Verdict judged(int g, uint32_t b, uint32_t few, float limit, float& budget) const {
    const HeadStat s = this->stat(g);
    float2 pairs{};
    if (few > 0) {
      pairs = {sh.pairs[g][0][0], sh.pairs[g][0][1]};
      if (group <= 4) pairs.x += sh.pairs[g][1][0], pairs.y += sh.pairs[g][1][1];
    }
    const float d = b, free = over(1.f, d - 1), away = s.v2 - 2.f * s.oe + s.o2 * s.e2;
    Moments m;
    m.n = o.residual, m.b = d, m.inverse = s.inverse, m.o2 = s.o2;
    m.variance_d = (s.e2 - over(1.f, d)) * free;
    m.trace_r = (away - over(s.w2, d)) * free;
    m.trace_n = (s.v2 - over(s.a2, d)) * free;
    m.heaviest = fmaxf(over(s.most, fmaxf(s.e2, FLT_MIN)), over(s.most_v, fmaxf(s.v2, FLT_MIN)));
    // As a covariance in D dimensions has it, and 1 where nothing varies or a sum is too small or too large to divide by.
    const bool sound = pairs.x < pairs.y && pairs.y >= FLT_MIN && pairs.y < 0x1p126f;
    m.alignment = sound ? fmaxf(over(pairs.x, pairs.y), 1.f / D) : 1.f;
    const Verdict v = Promise{p, m, limit}.verdict(lane, budget);
    return b < 2 ? kNoisy : v;
  }
  // The group reads what its neediest head needs, `most`, unless a head does not say. What a sample says of its own size is
  // checked by what the larger sample says, until it is enough.
  __device__ __forceinline__ Decision settle(uint32_t points, uint32_t b, uint32_t bad, uint32_t most, uint32_t& noisy) const {
    uint32_t wanted = o.residual;
    if (bad == kSample) {
      if (most <= b) return {kSampled, b};
      wanted = grown(p, b, most);
    } else if (bad == kNoisy && ++noisy < kNoisyLooks) {
      wanted = 4 * max(b, 2u);
    }
    if (wanted >= min(o.residual, o.most)) return {kDense, 0};
    const uint32_t next = points + o.points_of(wanted - b);
    return next < o.w.len && next <= p.capacity ? Decision{0, next} : Decision{kDense, 0};
  }
};

}  // namespace taper
