// Entry points of the metadata kept beside the cache.
#include "append.cuh"
#include "quantized.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t go(const AppendParams& p, cudaStream_t s) {
  const dim3 grid(p.max_blocks, p.kv_heads, p.span_count);
  cudaError_t e = cudaSuccess;
  if (p.quantized) e = launch(quantize_kernel<T, D>, grid, 128, 0, s, p);
  const bool more = p.pages || p.norms || p.labels;
  return e == cudaSuccess && more ? launch(append_kernel<T, D>, grid, 128, 0, s, p) : e;
}

}  // namespace
}  // namespace taper

extern "C" int taper_append(const taper::AppendParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->span_count > 0 && p->kv_heads > 0 && p->max_blocks > 0 &&
                  p->kv_heads <= 65535 && p->span_count <= 65535 &&
                  (!p->labels || (p->channels && p->width > 0)) &&
                  ((!p->pages && !p->norms) || (p->page > 0 && kBlock % p->page == 0));
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return go<decltype(t), decltype(d)::value>(*p, stream);
  });
}

extern "C" int taper_codes(const taper::CodeParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t grid = ((int64_t)p->tokens * p->heads * p->words + 63) / 64;
  if (grid <= 0 || grid > INT32_MAX || p->kv_heads <= 0 || p->heads % p->kv_heads)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16
             ? launch(code_kernel<__nv_bfloat16>, (unsigned)grid, 256, 0, stream, *p)
             : launch(code_kernel<__half>, (unsigned)grid, 256, 0, stream, *p);
}
