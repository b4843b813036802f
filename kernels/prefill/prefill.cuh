// Prefill attention: 128 query rows at any absolute positions against paged keys.
//
// A tile is up to 128 rows of one launch and one query head, or 64 of each of two heads that read alike. Ids of its
// lists may be marked as read by one half of the rows alone; a value there that is no number reaches the others too, as
// 0 times it. Its keys are all blocks up to its last position (dense), sink and window blocks (sliding window), or the
// blocks of a compressed row list; the causal test uses each row's own position, so strided anchor rows, tails and
// sampled slices are ordinary tiles.
//
// One thread block per multiprocessor walks the tiles in a snake over a table that
// the caller sorts longest first. One warp streams pairs of 64-token blocks by bulk
// tensor copies, or two do so and gather single tokens, the others copy the next tile's query rows, and two consumer
// warpgroups of 64 rows each take turns at the tensor cores: while one computes its softmax the other
// multiplies. Inside a warpgroup the next scores are computed beside the present
// value product. No maximum is taken in the common case: probabilities are computed
// against the maximum known so far, and only a sum above 2^10 makes the step repeat
// with the true one.
#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace taper {

template <class T, int D, bool COLUMNS>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap km, const __grid_constant__ CUtensorMap vm,
                   const __grid_constant__ PrefillParams p) {
  using L = PrefillLayout<D>;
  extern __shared__ uint8_t raw[];
  __shared__ PrefillShared<L::kStages> sh;
  const uint32_t q_s = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t k_s = q_s + 2 * L::kTile, v_s = k_s + L::kStages * L::kTile;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_u32(&sh.q_full[i]), kQueryThreads<COLUMNS>);
      mbar_init(smem_u32(&sh.q_empty[i]), COLUMNS ? 256 : 8);
    }
    for (int i = 0; i < L::kStages; ++i) {
      // Of the warps that copy single tokens every lane arrives, and once more the warp.
      mbar_init(smem_u32(&sh.k_full[i]), COLUMNS ? 33 * kKeyWarps<COLUMNS> : 1);
      mbar_init(smem_u32(&sh.v_full[i]), COLUMNS ? 33 * kKeyWarps<COLUMNS> : 1);
      mbar_init(smem_u32(&sh.k_empty[i]), COLUMNS ? 256 : 8);
      mbar_init(smem_u32(&sh.v_empty[i]), COLUMNS ? 256 : 8);
    }
    mbar_init_fence();
    tma_prefetch_map(&km);
    tma_prefetch_map(&vm);
  }
  __syncthreads();
  wait_for_predecessor();
  launch_dependents();
  if (threadIdx.x >= 256) {
    regs_shrink<40>();
    const int part = __shfl_sync(~0u, threadIdx.x / 32 - 8, 0);
    if (part < kKeyWarps<COLUMNS>) produce_keys<T, D, COLUMNS>(&km, &vm, p, sh, k_s, v_s, part);
    else produce_queries<T, D, COLUMNS>(p, sh, q_s);
  } else {
    regs_grow<232>();
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
    PrefillConsumer<T, D, COLUMNS> c{p,
                            sh,
                            smem_u32(&sh),
                            q_s,
                            k_s,
                            v_s,
                            smem_desc(q_s + wg * (64 * 128)),
                            smem_desc(k_s),
                            smem_desc(v_s, L::kPanel),
                            wg,
                            tid,
                            tid / 32,
                            tid % 32,
                            p.scale * kLog2e};
    c.run();
  }
}

}  // namespace taper
