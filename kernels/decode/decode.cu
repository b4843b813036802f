// Entry points of the decode attention: the plan, for lists that several layers share, and
// the attention itself, once per layer.
#include "decode.cuh"
#include "plan.cuh"

namespace taper {
namespace {

template <class T, int D, int N, bool GATHER, bool FOLD = false>
cudaError_t go(const DecodeParams& p, cudaStream_t stream) {
  DecodeMaps maps;
  const int64_t rows = p.blocks * p.kv_heads * kBlock;
  cudaError_t e = row_map(&maps.k, p.k, p.dtype, rows, D, kBlock);
  if (e == cudaSuccess) e = row_map(&maps.v, p.v, p.dtype, rows, D, kBlock);
  if (e == cudaSuccess)
    e = FOLD ? group_map(&maps.q, p.q, p.dtype, (int64_t)p.rows * p.fold, p.q_heads, D,
                         p.q_heads / p.list_heads, p.fold)
             : row_map(&maps.q, p.q, p.dtype, (int64_t)p.rows * p.q_heads, D, N);
  if (e != cudaSuccess) return e;
  const int grid = p.unit_capacity < sm_count() ? p.unit_capacity : sm_count();
  return launch(decode_kernel<T, D, N, GATHER, FOLD>, grid, GATHER ? 384 : 288,
                DecodeLayout<D, N>::kBytes, stream, maps, p);
}
bool valid(const DecodeParams& p) {
  return (p.head_dim == 64 || p.head_dim == 128) && p.list_heads > 0 && p.kv_heads > 0 &&
         p.list_heads % p.kv_heads == 0 && p.q_heads % p.list_heads == 0 &&
         p.q_heads / p.list_heads <= 16 && p.rows > 0 && p.unit_capacity > 0 &&
         (p.units || p.rows * p.list_heads <= kOwnLists) &&
         (p.fold <= 1 || (!p.gather && p.q_heads / p.list_heads * p.fold <= 32)) &&
         (p.dtype == kBf16 || p.dtype == kF16) &&
         p.blocks * p.kv_heads * kBlock <= INT32_MAX;
}

}  // namespace
}  // namespace taper

extern "C" int taper_decode_plan(const taper::DecodeParams* p, cudaStream_t stream) {
  if (!p->units || !taper::valid(*p)) return cudaErrorInvalidValue;
  const int lists = p->rows * p->list_heads, blocks = (lists + taper::kPlanLists - 1) / taper::kPlanLists;
  return taper::launch(taper::decode_plan_kernel, blocks < 64 ? blocks : 64, 1024, 0, stream, *p);
}

extern "C" int taper_decode(const taper::DecodeParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    if (p->fold > 1) {
      using T = decltype(t);
      constexpr int D = decltype(d)::value;
      const bool few = p->q_heads / p->list_heads * p->fold <= 16;
      return few ? go<T, D, 16, false, true>(*p, stream) : go<T, D, 32, false, true>(*p, stream);
    }
    return for_group(p->q_heads / p->list_heads, [&](auto n) {
      using T = decltype(t);
      constexpr int D = decltype(d)::value, N = decltype(n)::value;
      return p->gather ? go<T, D, N, true>(*p, stream) : go<T, D, N, false>(*p, stream);
    });
  });
}
