// Entry point of the ordered merge.
#include "merge.cuh"

namespace taper {
namespace {

template <int D, int W>
cudaError_t pick_type(const MergeParams& p, cudaStream_t s) {
  const int grid = p.rows * p.q_heads;
  if (p.out_f32) return launch(merge_kernel<D, W, float>, grid, W * 32, 0, s, p);
  if (p.dtype == kBf16)
    return launch(merge_kernel<D, W, __nv_bfloat16>, grid, W * 32, 0, s, p);
  return launch(merge_kernel<D, W, __half>, grid, W * 32, 0, s, p);
}
template <int D>
cudaError_t pick_warps(const MergeParams& p, cudaStream_t s) {
  // Many lists a row are cut into few parts each, which four warps hold in one round.
  return p.list_heads >= 8 ? pick_type<D, 4>(p, s) : pick_type<D, 16>(p, s);
}

}  // namespace
}  // namespace taper

extern "C" int taper_merge(const taper::MergeParams* p, cudaStream_t stream) {
  if (p->rows <= 0 || p->list_heads <= 0 || p->q_heads % p->list_heads) return cudaErrorInvalidValue;
  if (p->head_dim == 128) return taper::pick_warps<128>(*p, stream);
  if (p->head_dim == 64) return taper::pick_warps<64>(*p, stream);
  return cudaErrorInvalidValue;
}
