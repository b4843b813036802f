// Entry point of the ordered merge.
#include "merge.cuh"

namespace taper {
namespace {

template <int D>
cudaError_t pick(const MergeParams& p, cudaStream_t s) {
  const int grid = p.rows * p.q_heads;
  if (p.out_f32) return launch(merge_kernel<D, float>, grid, kMergeWarps * 32, 0, s, p.overlap != 0, p);
  if (p.dtype == kBf16)
    return launch(merge_kernel<D, __nv_bfloat16>, grid, kMergeWarps * 32, 0, s, p.overlap != 0, p);
  return launch(merge_kernel<D, __half>, grid, kMergeWarps * 32, 0, s, p.overlap != 0, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_merge(const taper::MergeParams* p, cudaStream_t stream) {
  if (p->rows <= 0 || p->list_heads <= 0 || p->q_heads % p->list_heads) return cudaErrorInvalidValue;
  if (p->head_dim == 128) return taper::pick<128>(*p, stream);
  if (p->head_dim == 64) return taper::pick<64>(*p, stream);
  return cudaErrorInvalidValue;
}
