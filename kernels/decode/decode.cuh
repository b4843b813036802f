// Decode attention over work lists (split-KV).
//
// A list names the cache entries that one group of query heads reads: up to two
// token ranges, then whole blocks by logical index, then single tokens by id, then a
// sample of tokens. It is cut into tiles of 64 keys and the tiles into units by their
// number alone, so a list's partial results never depend on its batch mates.
//
// One thread block per multiprocessor walks the units. Producer warps fill a ring of
// shared-memory stages (bulk tensor copies for blocks, 16-byte asynchronous copies
// for single tokens); two consumer warpgroups take alternate tiles of a unit, keep
// their own running softmax and join them at the unit's end. Keys sit on the M side of
// the matrix instruction and the heads of the group on the N side (8 or 16), so a
// group of any size up to 16 reads each key once, and so do several rows of a sequence that see
// nearly the same, as where drafts are checked (FOLD: up to 32 heads). Consumers read nothing from device
// memory: queries and the unit's outline arrive through shared memory too.
#pragma once

#include "consumer.cuh"

namespace taper {

template <class T, int D, int N, bool GATHER, bool FOLD>
__global__ void __launch_bounds__(GATHER ? 384 : 288, 1)
    decode_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ DecodeParams p) {
  using L = DecodeLayout<D, N>;
  extern __shared__ uint8_t raw[];
  __shared__ DecodeShared<D, N> sh;
  __shared__ uint32_t firsts[kOwnLists + 1];
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t q_ring = stages + L::kStages * L::kStage;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(smem_u32(&sh.full[i]), GATHER ? 128 + 4 * kWarpArrivals : 1);
      mbar_init(smem_u32(&sh.empty[i]), 4 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_u32(&sh.q_full[i]), 1);
      mbar_init(smem_u32(&sh.q_empty[i]), 8 * kWarpArrivals);
    }
    mbar_init(smem_u32(&sh.join_full), 128);
    mbar_init(smem_u32(&sh.join_empty), 128);
    mbar_init_fence();
    tma_prefetch_map(&maps.q);
    tma_prefetch_map(&maps.k);
    tma_prefetch_map(&maps.v);
  }
  __syncthreads();
  wait_for_predecessor();
  launch_dependents();
  Units units{p, firsts};
  units.cut();
  if (threadIdx.x >= 256) {
    if constexpr (GATHER) produce_any<T, D, N>(maps, p, sh, units, stages, q_ring);
    else produce_blocks<D, N, FOLD>(maps, p, sh, units, stages, q_ring);
    return;
  }
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
  const int heads = p.q_heads / p.list_heads * (FOLD ? p.fold : 1);
  DecodeConsumer<T, D, N, FOLD> c{{sh, p.scale * kLog2e, stages, q_ring + 2 * L::kQuery + wg * L::kProb,
                                   wg, tid, tid / 32, tid % 32, heads}};
  c.template run<GATHER>(p, q_ring);
}

}  // namespace taper
