// Entry point of the scores of quantized keys.
#include "quantized.cuh"

namespace taper {
namespace {

template <class T, int W, int G>
cudaError_t go(const QuantizedScoreParams& p, cudaStream_t s) {
  // As many thread blocks as are resident, where the work allows; each warp walks on.
  const int runs = (p.max_len + kQuantizedWarps * kBlock - 1) / (kQuantizedWarps * kBlock);
  const int room = (int)((int64_t)sm_count() * (G <= 8 ? 4 : 3) / ((int64_t)p.kv_heads * p.rows));
  const dim3 grid(runs < room ? runs : room > 0 ? room : 1, p.kv_heads, p.rows);
  return launch(quantized_kernel<T, W, G>, grid, kQuantizedWarps * 32, 0, s, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_quantized_score(const taper::QuantizedScoreParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->rows <= 65535 && p->max_len > 0 && p->kv_heads > 0 && p->kv_heads <= 65535 &&
                  p->q_heads % p->kv_heads == 0 && p->q_heads > 0 && p->q_heads / p->kv_heads <= 16 &&
                  p->stride % kBlock == 0 && p->stride >= p->max_len && p->tile_stride >= p->stride / kBlock &&
                  p->tile_max && p->tile_sum;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return for_quantized_group(p->q_heads / p->kv_heads, [&](auto heads) {
      return go<decltype(t), decltype(d)::value / 16, decltype(heads)::value>(*p, stream);
    });
  });
}
