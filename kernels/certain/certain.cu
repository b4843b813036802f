// Entry points of the sample whose promise rests on bounds of pages.
#include "look.cuh"
#include "promote.cuh"

namespace taper {
namespace {

bool valid(const CertainParams& p) {
  return p.rows > 0 && p.kv_heads > 0 && p.q_heads % p.kv_heads == 0 && p.q_heads / p.kv_heads <= kGroupMost &&
         p.q_heads >= p.kv_heads && p.per_block > 0 && kBlock % p.per_block == 0 && p.page_stride > 0 &&
         p.words > 0 && p.capacity > 0 && p.draw_stride > 0 && p.looks > 0 && p.pilot_tokens >= 0 &&
         (int64_t)p.rows * p.kv_heads * p.capacity <= UINT32_MAX && p.rows * (int64_t)p.kv_heads <= INT32_MAX / kLookCluster &&
         (p.dtype == kBf16 || p.dtype == kF16);
}

}  // namespace
}  // namespace taper

extern "C" int taper_certain_promote(const taper::CertainParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p) || p->draw_stride > kGuessMost) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return launch(promote_kernel<decltype(t), decltype(d)::value>, p->rows * p->kv_heads, kPromoteThreads, 0, stream, *p);
  });
}

extern "C" int taper_certain_look(const taper::CertainParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return launch(look_kernel<decltype(t), decltype(d)::value>, p->rows * p->kv_heads * kLookCluster, kLookThreads, 0,
                  stream, *p);
  });
}
