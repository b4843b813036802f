// Entry point of scoring and choosing blocks in one launch.
#include "pick.cuh"

namespace taper {
namespace {

template <class T, int W, int NT>
cudaError_t go(const PickParams& p, cudaStream_t s) {
  const int grid = p.rows * p.kv_heads * team_size(p.kv_heads);
  const size_t smem = ((size_t)p.stride + 3) / 4 * 16;
  if (p.lower) return launch(pick_kernel<T, W, NT, true>, grid, kPickThreads, smem, s, p.overlap != 0, p);
  return launch(pick_kernel<T, W, NT, false>, grid, kPickThreads, smem, s, p.overlap != 0, p);
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
  return for_shape(p->dtype, p->width, [&](auto t, auto d) {
    return for_group(p->q_heads / p->kv_heads, [&](auto n) {
      return go<decltype(t), decltype(d)::value, (decltype(n)::value / 8)>(*p, stream);
    });
  });
}
