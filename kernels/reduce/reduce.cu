// Entry point of the probability reduction.
#include "reduce.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t go(const ReduceParams& p, cudaStream_t s) {
  const dim3 grid((p.max_blocks + kSplitBlocks - 1) / kSplitBlocks, p.q_heads, p.slice_count);
  cudaError_t e = launch(slice_lse_kernel<T, D>, grid, 128, 0, s, p);
  if (e == cudaSuccess) e = launch(slice_mass_kernel<T, D>, grid, 128, 0, s, p);
  if (e != cudaSuccess) return e;
  const dim3 sums((p.max_blocks + 255) / 256, p.q_heads, p.slice_count);
  return launch(slice_diagonals_kernel, sums, 256, 0, s, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_reduce(const taper::ReduceParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->slice_count > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->max_blocks > 0 && p->splits * kSplitBlocks >= p->max_blocks &&
                  p->q_heads <= 65535 && p->slice_count <= 65535;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return go<decltype(t), decltype(d)::value>(*p, stream);
  });
}
