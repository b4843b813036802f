// Entry point of the sampled decode step.
#include "consume.cuh"

namespace taper {
namespace {

template <class T, int D, int N>
cudaError_t go(SampledParams p, cudaStream_t stream) {
  DecodeMaps maps;
  const int64_t rows = p.d.blocks * p.d.kv_heads * kBlock;
  cudaError_t e = row_map(&maps.k, p.d.k, p.d.dtype, rows, D, kBlock);
  if (e == cudaSuccess) e = row_map(&maps.v, p.d.v, p.d.dtype, rows, D, kBlock);
  if (e == cudaSuccess) e = row_map(&maps.q, p.d.q, p.d.dtype, (int64_t)p.d.rows * p.d.q_heads, D, N);
  if (e != cudaSuccess) return e;
  const int grid = p.d.rows * p.d.list_heads * team_size(p.d.list_heads);
  p.d.unit_capacity = grid > sm_count();  // Tells the kernel to form teams in order.
  return launch(sampled_kernel<T, D, N>, grid, 512, kSampledBytes<D, N>, stream, p.d.overlap != 0, maps, p);
}
template <class T, int D>
cudaError_t pick_group(const SampledParams& p, cudaStream_t s) {
  return p.d.q_heads / p.d.list_heads <= 8 ? go<T, D, 8>(p, s) : go<T, D, 16>(p, s);
}
template <class T>
cudaError_t pick_dim(const SampledParams& p, cudaStream_t s) {
  return p.d.head_dim == 128 ? pick_group<T, 128>(p, s) : pick_group<T, 64>(p, s);
}

bool valid(const SampledParams& p) {
  const DecodeParams& d = p.d;
  return (d.head_dim == 64 || d.head_dim == 128) && d.rows > 0 && d.kv_heads > 0 &&
         d.list_heads > 0 && d.list_heads % d.kv_heads == 0 && d.q_heads % d.list_heads == 0 &&
         d.q_heads / d.list_heads <= 16 && (d.dtype == kBf16 || d.dtype == kF16) &&
         d.blocks * d.kv_heads * kBlock <= INT32_MAX &&
         (p.rule == kListed || (p.capacity > 0 && p.epsilon > 0 && p.draw_stride <= INT32_MAX));
}

}  // namespace
}  // namespace taper

extern "C" int64_t taper_sampled_draws(int64_t len) { return taper::sampled_draws(len); }

extern "C" int taper_sampled(const taper::SampledParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return p->d.dtype == kBf16 ? pick_dim<__nv_bfloat16>(*p, stream) : pick_dim<__half>(*p, stream);
}
