// Attention over lists in one launch, without plan and merge: a team reads its list, and its last
// thread block adds up. The lists are given, or made of the clusters that a team chooses itself.
#pragma once

#include "../saap/choose.cuh"
#include "feed.cuh"
#include "parts.cuh"

namespace taper {

template <int D, int N>
struct ListedShared : DecodeShared<D, N, kSampledStages<D, N>> {
  uint64_t gate;
  Outline outline;
  uint32_t last;
};
template <int D, int N>
struct ClusteredShared : ListedShared<D, N> {
  uint64_t chosen;
  uint32_t slots;
  ChooseShared choice;
};

template <int D, int N>
inline constexpr int kListedBytes =
    DecodeLayout<D, N, kSampledStages<D, N>>::kBytes - DecodeLayout<D, N>::kQuery;
constexpr int kListedThreads = 384;  // two warpgroups of consumers, one of producers

template <class T, int D, int N, class Shared>
struct ListedConsumer : TileSums<T, D, N, kSampledStages<D, N>> {
  using Sums = TileSums<T, D, N, kSampledStages<D, N>>;
  using L = typename Sums::L;
  const SampledParams& p;
  Shared& st;
  const uint32_t q_s;
  Member<D> member;

  __device__ __forceinline__ void run() {
    const Outline& o = member.o;
    this->clear();
#pragma unroll
    for (int c = 0; c < Sums::C; ++c) this->limit[c] = ~0u, this->ln_weight[c] = 0.f;
    const uint32_t n = o.share_of(list_tiles(o.w), o.rank);
    mbar_wait(smem_u32(&st.q_full[0]), 0);
#pragma unroll 1
    for (uint32_t i = this->wg; i < n; i += 2) {
      const uint32_t stage = i % L::kStages;
      mbar_wait(smem_u32(&st.full[stage]), i / L::kStages & 1);
      this->template tile<true>(stage, q_s, [](int, int, float) {});
      mbar_arrive_warp(smem_u32(&st.empty[stage]), this->lane);
    }
    const int64_t at = member.part(1, o.rank, 0);
    this->store(p.d.part_o + at * D, p.d.part_lse + at, 0);
    member.gate.meet();
    if (member.tid == 0) st.last = add_acq_rel(member.counter() + kLeftWord, 1) == o.team - 1;
    member.gate.meet();
    if (!st.last) return;
    constexpr int V = Member<D>::V;
    const int group = member.group, lane = member.lane;
    const int64_t head = (int64_t)o.list * group;
#pragma unroll 1
    for (int g = member.warp; g < group; g += 8) {
      float mean[V];
      const float lse = member.gather(1, g, mean);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t i = (head + g) * D + lane * V + v;
        if (p.out_f32) static_cast<float*>(p.out)[i] = mean[v];
        else static_cast<T*>(p.out)[i] = static_cast<T>(mean[v]);
      }
      if (p.lse && lane == 0) p.lse[head + g] = lse;
    }
    if (member.tid == 0) {
      p.state[o.list] = kAsListed;
      p.residual[o.list] = o.w.len - fixed_keys(o.w, p.d.block_ids);
      p.counts[o.list] = 0;
      member.counter()[kLeftWord] = 0;  // All have left.
    }
  }
};

// CLUSTERS: of how many each consumer speaks, 0 where lists are given.
template <class T, int D, int N, int CLUSTERS, class Shared>
__device__ __forceinline__ void attend_listed(const DecodeMaps& maps, const SampledParams& p, const ChooseParams& c,
                                              Shared& sh) {
  constexpr int S = kSampledStages<D, N>;
  using L = DecodeLayout<D, N, S>;
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u, q_at = stages + S * L::kStage;
  if (threadIdx.x == 0) {
    init_ring(sh, maps);
    mbar_init(smem_u32(&sh.join_full), 128);
    mbar_init(smem_u32(&sh.join_empty), 128);
    mbar_init(smem_u32(&sh.gate), 256);
    if constexpr (CLUSTERS > 0) mbar_init(smem_u32(&sh.chosen), 1);
    mbar_init_fence();
  }
  // What chooses reads queries, tables and cache before its predecessor, the classifier, has ended: that one's
  // first launch started after all that came ahead of it.
  if constexpr (CLUSTERS == 0) wait_for_predecessor();
  launch_dependents();
  if (threadIdx.x == 0) {
    const uint32_t place = p.d.unit_capacity ? team_place(p.sync) : blockIdx.x;
    const uint32_t list = place / p.d.team;
    if constexpr (CLUSTERS > 0) set_outline(p.d, unclustered(c, list), place, p.d.team, sh.outline);
    else set_outline(p.d, p.d.lists[list], place, p.d.team, sh.outline);
    sh.outline.w.sample_count = 0;
  }
  __syncthreads();
  const Outline& o = sh.outline;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = p.d.q_heads / p.d.list_heads;
  if (warp >= 8) {
    regs_shrink<56>();
    ListFeed<T, D, N, Shared> feed{maps, p.d, sh, o, stages, q_at, lane, warp - 8};
    feed.queries();
    if constexpr (CLUSTERS > 0) {
      // The ranges need no choice, which will say how many tokens there are besides.
      const WorkList& w = o.w;
      feed.blocks(w, o.exact, range_tiles(w.begin[0], w.end[0]) + range_tiles(w.begin[1], w.end[1]));
      mbar_wait(smem_u32(&sh.chosen), 0);
      const uint32_t* tokens = c.tokens + index_of(c, o.list) * c.index_capacity;
      auto of = [&](uint32_t i) {
        uint32_t lo = 0, hi = sh.slots;  // place[lo] <= i < place[hi]
        while (hi - lo > 1) {
          const uint32_t mid = (lo + hi) / 2;
          if (sh.choice.place[mid] <= i) lo = mid;
          else hi = mid;
        }
        return tokens[sh.choice.from[lo] + (i - sh.choice.place[lo])];
      };
      feed.tokens_of(of, [](uint32_t) { return 0.f; });
    } else {
      feed.exact();
    }
    cp_async_wait_all();
    return;
  }
  regs_grow<184>();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
  Gate gate{smem_u32(&sh.gate), kConsumersGate, 256};
  if constexpr (CLUSTERS > 0) {
    uint32_t slots, rows;
    choose<CLUSTERS>(c, o.list, sh.choice, slots, rows, [] { wait_for_predecessor(); }, [&] { gate.meet(); });
    if (threadIdx.x == 0) {
      sh.slots = slots;
      sh.outline.w.token_count = rows;
      mbar_arrive(smem_u32(&sh.chosen));
    }
    gate.meet();
  }
  ListedConsumer<T, D, N, Shared>{
      {sh, p.d.scale * kLog2e, stages, q_at + L::kQuery + wg * L::kProb, wg, tid, tid / 32, lane, group},
      p, sh, q_at, {p, o, gate, (int)threadIdx.x, warp, lane, group}}
      .run();
}

template <class T, int D, int N>
__global__ void __launch_bounds__(kListedThreads, 1)
    listed_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ SampledParams p) {
  __shared__ ListedShared<D, N> sh;
  attend_listed<T, D, N, 0>(maps, p, ChooseParams{}, sh);
}

template <class T, int D, int N, int CLUSTERS>
__global__ void __launch_bounds__(kListedThreads, 1)
    clustered_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ SampledParams p,
                     const __grid_constant__ ChooseParams c) {
  __shared__ ClusteredShared<D, N> sh;
  attend_listed<T, D, N, CLUSTERS>(maps, p, c, sh);
}

}  // namespace taper
