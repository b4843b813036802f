// Entry point of scoring and choosing blocks in one launch.
#include "pick.cuh"

namespace taper {
namespace {

template <class T, int W, int NT>
cudaError_t go(const PickParams& p, cudaStream_t s) {
  const int grid = p.rows * p.kv_heads * team_size(p.kv_heads);
  const size_t smem = (size_t)p.stride * 4;
  if (p.lower) return launch(pick_kernel<T, W, NT, true>, grid, kPickThreads, smem, s, p.overlap != 0, p);
  return launch(pick_kernel<T, W, NT, false>, grid, kPickThreads, smem, s, p.overlap != 0, p);
}
template <class T, int W>
cudaError_t pick_group(const PickParams& p, cudaStream_t s) {
  return p.q_heads / p.kv_heads <= 8 ? go<T, W, 1>(p, s) : go<T, W, 2>(p, s);
}
template <class T>
cudaError_t pick_width(const PickParams& p, cudaStream_t s) {
  return p.width == 128 ? pick_group<T, 128>(p, s) : pick_group<T, 64>(p, s);
}

}  // namespace
}  // namespace taper

extern "C" int taper_pick_blocks(const taper::PickParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && (p->width == 64 || p->width == 128) &&
                  (p->dtype == kBf16 || p->dtype == kF16) && p->capacity > 0 && p->stride > 0 &&
                  p->stride <= kPickMost && (int64_t)p->rows * p->kv_heads * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? pick_width<__nv_bfloat16>(*p, stream) : pick_width<__half>(*p, stream);
}
