// Entry points of the steps between matrix products and attention.
#include "layer.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t rope(const RopeParams& p, cudaStream_t s) {
  const int64_t items = (int64_t)p.tokens * (p.q_heads + 2 * p.kv_heads) * (D / 16);
  return launch(rope_kernel<T, D>, (unsigned)((items + 255) / 256), 256, 0, s, p.overlap != 0, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_rope(const taper::RopeParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->q_heads <= 0) return cudaErrorInvalidValue;
  if (p->head_dim == 128)
    return p->dtype == kBf16 ? rope<__nv_bfloat16, 128>(*p, stream) : rope<__half, 128>(*p, stream);
  if (p->head_dim == 64)
    return p->dtype == kBf16 ? rope<__nv_bfloat16, 64>(*p, stream) : rope<__half, 64>(*p, stream);
  return cudaErrorInvalidValue;
}

extern "C" int taper_norm(const taper::NormParams* p, cudaStream_t stream) {
  using namespace taper;
  const int pieces = p->width / 8;
  if (p->rows <= 0 || pieces <= 0 || p->width % 8 || pieces > 1024 * kNormPieces)
    return cudaErrorInvalidValue;
  int threads = 64;
  while (threads < 1024 && threads * 2 < pieces) threads *= 2;
  while (threads * kNormPieces < pieces) threads *= 2;
  return p->dtype == kBf16
             ? launch(norm_kernel<__nv_bfloat16>, p->rows, threads, 0, stream, p->overlap != 0, *p)
             : launch(norm_kernel<__half>, p->rows, threads, 0, stream, p->overlap != 0, *p);
}

extern "C" int taper_silu(const taper::SiluParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t grid = (p->rows * (p->width / 8) + 255) / 256;
  if (p->rows <= 0 || p->width <= 0 || p->width % 8 || grid > INT32_MAX)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16
             ? launch(silu_kernel<__nv_bfloat16>, (unsigned)grid, 256, 0, stream, p->overlap != 0, *p)
             : launch(silu_kernel<__half>, (unsigned)grid, 256, 0, stream, p->overlap != 0, *p);
}
