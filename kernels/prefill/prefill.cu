// Entry point of the prefill attention.
#include "prefill.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t go(const PrefillParams& p, cudaStream_t stream) {
  CUtensorMap km, vm;
  const int64_t rows = p.blocks * p.kv_heads * kBlock;
  cudaError_t e = row_map(&km, p.k, p.dtype, rows, D, kBlock);
  if (e == cudaSuccess) e = row_map(&vm, p.v, p.dtype, rows, D, kBlock);
  if (e != cudaSuccess) return e;
  const int64_t work = (int64_t)p.tile_count * item_heads(p);
  const int grid = work < sm_count() ? (int)work : sm_count();
  if (p.column_begin)
    return launch(prefill_kernel<T, D, true>, grid, 384, PrefillLayout<D>::kBytes, stream, km, vm, p);
  return launch(prefill_kernel<T, D, false>, grid, 384, PrefillLayout<D>::kBytes, stream, km, vm, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_prefill(const taper::PrefillParams* params, cudaStream_t stream) {
  using namespace taper;
  PrefillParams own = *params;
  if (!own.heads) own.head_count = own.q_heads;
  if (own.list_stride == 0) own.list_stride = own.tile_count;
  const auto* p = &own;
  const bool ok = p->tile_count > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  (p->dtype == kBf16 || p->dtype == kF16) &&
                  (int64_t)p->tile_count * p->q_heads <= INT32_MAX / 2 &&
                  p->blocks * p->kv_heads * kBlock <= INT32_MAX &&
                  (!p->csr_begin || (p->csr_heads > 0 && p->head_count % p->csr_heads == 0)) &&
                  (!p->column_begin ||
                   (p->column_heads > 0 && p->head_count % p->column_heads == 0)) &&
                  p->head_count > 0 && (!p->head_pairs || p->head_count % 2 == 0) &&
                  (p->splits <= 0 || p->lse);
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return go<decltype(t), decltype(d)::value>(*p, stream);
  });
}
