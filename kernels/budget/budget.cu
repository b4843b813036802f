// Entry point of a decode step in one launch that samples.
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
  // Tables are as wide as the longest row, at least.
  p.d.team = sampled_team(p.d.list_heads, (int64_t)p.d.table_stride * kBlock);
  const int grid = p.d.rows * p.d.list_heads * p.d.team;
  p.d.unit_capacity = grid > sm_count();  // Tells the kernel to form teams in order.
  p.ahead = p.scouts > 0 && !p.d.unit_capacity;
  if (p.scouts > 0) p.scouts = grid < sm_count();  // One multiprocessor at least would have nothing to do.
  return launch(sampled_kernel<T, D, N>, grid + p.scouts, kSampledThreads, kSampledBytes<D, N>, stream, maps, p);
}

bool valid(const SampledParams& p) {
  const DecodeParams& d = p.d;
  return (d.head_dim == 64 || d.head_dim == 128) && d.rows > 0 && d.kv_heads > 0 &&
         d.list_heads > 0 && d.list_heads % d.kv_heads == 0 && d.q_heads % d.list_heads == 0 &&
         d.q_heads / d.list_heads <= 16 && (d.dtype == kBf16 || d.dtype == kF16) &&
         d.blocks * d.kv_heads * kBlock <= INT32_MAX && p.capacity > 0 && p.epsilon > 0;
}

}  // namespace
}  // namespace taper

extern "C" int taper_sampled(const taper::SampledParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return for_shape(p->d.dtype, p->d.head_dim, [&](auto t, auto d) {
    return for_group(p->d.q_heads / p->d.list_heads, [&](auto n) {
      return go<decltype(t), decltype(d)::value, decltype(n)::value>(*p, stream);
    });
  });
}
