// A thread block's place in its team: meetings, and what the team's blocks hand each other.
#pragma once

#include "sampled.cuh"

namespace taper {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
// Of eight numbers the sums over lanes that are a multiple of four apart: lane l gets that of number l / 4. What is added up is
// halved with every step, so that it takes seven shuffles.
__device__ __forceinline__ float sums_apart(float (&x)[8]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 4; n; n /= 2) {
    const bool upper = lane & 4 * n;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float give = upper ? x[i] : x[i + n];
      x[i] = (upper ? x[i + n] : x[i]) + __shfl_xor_sync(~0u, give, 4 * n);
    }
  }
  return x[0];
}
// Of numbers that are none of them NaN, as integers of the same order.
__device__ __forceinline__ float warp_max(float x) {
  const int i = __float_as_int(x), top = __reduce_max_sync(~0u, i < 0 ? i ^ 0x7FFFFFFF : i);
  return __int_as_float(top < 0 ? top ^ 0x7FFFFFFF : top);
}

// What all of a team of so many know, but for the sample; one thread writes it for a block. `place` is the block's among
// those of teams of d.team.
__device__ __forceinline__ void set_outline(const DecodeParams& d, const WorkList& w, uint32_t place, uint32_t team,
                                            Outline& o) {
  const uint32_t list = place / d.team, row = list / d.list_heads;
  o.w = w;
  o.set_team(team);
  o.list = o.slot = list, o.rank = o.exact = place % d.team, o.scout = false;
  o.room = team_size(d.list_heads);
  o.row = row, o.head = list % d.list_heads;
  o.kv_head = o.head * d.kv_heads / d.list_heads;
  o.table = d.block_table + (uint64_t)row * d.table_stride;
}

// The ring's barriers; one thread calls this.
template <class Shared>
__device__ __forceinline__ void init_ring(Shared& sh, const DecodeMaps& maps) {
  for (int i = 0; i < Shared::kStages; ++i) {
    mbar_init(smem_u32(&sh.full[i]), 128 + 4 * kWarpArrivals);
    mbar_init(smem_u32(&sh.empty[i]), 4 * kWarpArrivals);
  }
  mbar_init(smem_u32(&sh.q_full[0]), 1);
  tma_prefetch_map(&maps.q);
  tma_prefetch_map(&maps.k);
  tma_prefetch_map(&maps.v);
}

template <int D>
struct Member {
  static constexpr int V = D / 32;
  using Vec = typename std::conditional<V == 4, float4, float2>::type;
  const SampledParams& p;
  const Outline& o;
  Gate& gate;
  const int tid, warp, lane, group;  // of the consumers

  __device__ __forceinline__ uint32_t* counter() const { return p.sync + (1 + o.slot) * kTeamLine; }
  // Part 0 is exact, part 1 the sample, or all that a list reads, part 2 the sample's squares.
  __device__ __forceinline__ uint32_t part(int kind, uint32_t rank, int g) const {
    return ((o.slot * 3 + kind) * o.room + rank) * group + g;
  }
  // Of a rank's sample, with e in units of its sum: the sums of e^2 and of e^2 |v|^2, and the largest of each.
  __device__ __forceinline__ float4* squares(uint32_t rank, int g) const {
    return reinterpret_cast<float4*>(p.sums) + ((o.slot * o.room + rank) * group + g);
  }

  // Of a head's parts, whose log-sum-exps the lanes hold, -inf beyond the team: the lane's weight, 1 over the sum of weights,
  // and the log-sum-exp of all.
  struct Weights {
    float own, inverse, lse;
  };
  static __device__ __forceinline__ Weights weigh(float lse) {
    const float top = warp_max(lse), own = lse == -INFINITY ? 0.f : exp2_fast((lse - top) * kLog2e), sum = warp_sum(own);
    return {own, sum == 0.f ? 0.f : __fdividef(1.f, sum), sum == 0.f ? -INFINITY : top + __logf(sum)};
  }
  // One head's parts of the team, in rank order: this lane's share of their mean, and its log-sum-exp.
  __device__ __forceinline__ float gather(int kind, int g, float (&mean)[V]) const {
    const uint8_t* src = reinterpret_cast<const uint8_t*>(p.d.part_o + (int64_t)part(kind, 0, g) * D + lane * V);
    const uint32_t step = group * D * 4, last = (o.team - 1) * step;  // in bytes
    const float lse = lane < o.team ? __ldcg(p.d.part_lse + part(kind, lane, g)) : -INFINITY;
    Weights weights{};
#pragma unroll
    for (int v = 0; v < V; ++v) mean[v] = 0.f;
#pragma unroll 1
    for (uint32_t r0 = 0; r0 < o.team; r0 += 16) {
      Vec x[16];
#pragma unroll
      for (int k = 0; k < 16; ++k)
        x[k] = __ldcg(reinterpret_cast<const Vec*>(src + min((r0 + k) * step, last)));
      if (r0 == 0) weights = weigh(lse);  // While the parts are on their way.
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const float w = __shfl_sync(~0u, weights.own, (r0 + k) & 31);  // 0 beyond the team
#pragma unroll
        for (int v = 0; v < V; ++v) mean[v] += w * reinterpret_cast<const float*>(&x[k])[v];
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) mean[v] *= weights.inverse;
    return weights.lse;
  }
};

}  // namespace taper
