// Entry point of attention over sampled values.
#include "values.cuh"

namespace taper {
namespace {

template <class T, int D, int N>
cudaError_t go(ValuesParams p, cudaStream_t stream) {
  ValuesMaps maps;
  cudaError_t e = row_map(&maps.k, p.k, p.dtype, p.blocks * p.kv_heads * kBlock, D, kBlock);
  if (e == cudaSuccess) e = row_map(&maps.q, p.q, p.dtype, (int64_t)p.rows * p.q_heads, D, N);
  if (e != cudaSuccess) return e;
  const int team = team_size(p.kv_heads), grid = p.rows * p.kv_heads * team;
  const size_t masses = sizeof(float) * (p.q_heads / p.kv_heads) *
                        rank_tiles((p.max_len + kBlock - 1) / kBlock, team);
  if (masses > 80 * 1024) return cudaErrorInvalidValue;
  p.in_order = grid > sm_count();
  const auto kernel = p.rule == kPerTile ? values_kernel<T, D, N, true> : values_kernel<T, D, N, false>;
  return launch(kernel, grid, kValueThreads + 32, ValuesLayout<D, N>::kBytes + masses, stream,
                p.overlap != 0, maps, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_values(const taper::ValuesParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && (p->head_dim == 64 || p->head_dim == 128) &&
                  (p->dtype == kBf16 || p->dtype == kF16) && p->samples > 0 && p->max_len > 0 &&
                  p->rule >= kSystematic && p->rule <= kPerTile && !(p->rule == kPerTile && p->ids) &&
                  p->blocks * p->kv_heads * kBlock <= INT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return for_group(p->q_heads / p->kv_heads, [&](auto n) {
      return go<decltype(t), decltype(d)::value, decltype(n)::value>(*p, stream);
    });
  });
}
