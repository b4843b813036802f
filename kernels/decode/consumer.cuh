// Decode attention: the warpgroups that turn stages into partial results.
#pragma once

#include "tile.cuh"

namespace taper {

template <class T, int D, int N, bool FOLD>
struct DecodeConsumer : TileSums<T, D, N> {
  using Sums = TileSums<T, D, N>;
  using L = typename Sums::L;
  using Sums::C, Sums::group, Sums::lane, Sums::sh, Sums::wg;

  __device__ __forceinline__ void reset(const DecodeParams& p, uint32_t list) {
    this->clear();
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if constexpr (FOLD) {
        const int row = this->head(c) / (p.q_heads / p.list_heads);
        this->limit[c] = max(p.fold - 1 - row, 0);
        this->ln_weight[c] = 0.f;
        continue;
      }
      const int64_t at = (int64_t)list * group + this->head(c);
      const bool any = p.head_counts && this->head(c) < group;
      this->limit[c] = any ? p.head_counts[at] : 0;
      this->ln_weight[c] = any ? p.head_ln_weight[at] : 0.f;
    }
  }

  template <bool GATHER>
  __device__ __forceinline__ void run(const DecodeParams& p, uint32_t q_ring) {
    uint32_t count = 0;
    for (uint32_t k = 0;; ++k) {
      const uint32_t slot = k & 1;
      mbar_wait(smem_u32(&sh.q_full[slot]), (k >> 1) & 1);
      const UnitOutline u = sh.outline[slot];
      if (u.tiles == 0) break;
      reset(p, u.list);
      // Tiles alternate by their place in the ring, so that every stage has one consumer:
      // a warpgroup that skipped a phase of a barrier could not tell it from the next.
      // Which warpgroup takes a unit's first tile thus depends on the units before, but
      // the join is symmetric.
      for (uint32_t i = (wg ^ count) & 1; i < u.tiles; i += 2) {
        const uint32_t stage = (count + i) % L::kStages, round = (count + i) / L::kStages;
        mbar_wait(smem_u32(&sh.full[stage]), round & 1);
        this->template tile<GATHER, FOLD>(stage, q_ring + slot * L::kQuery);
        mbar_arrive_warp(smem_u32(&sh.empty[stage]), lane);
      }
      count += u.tiles;
      mbar_arrive_warp(smem_u32(&sh.q_empty[slot]), lane);
      this->store(p.part_o + (int64_t)u.unit * group * L::kDim, p.part_lse + (int64_t)u.unit * group, k);
    }
  }
};

}  // namespace taper
