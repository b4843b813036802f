// Entry points of products of a few rows with a weight matrix.
#include "chain.cuh"

namespace taper {
namespace {

static_assert(TAPER_CHAIN_INPUTS <= kChainInputsMax);

template <class T, int ROWS>
cudaError_t go(const ProductParams& p, cudaStream_t s) {
  const size_t smem = (size_t)p.rows * p.inputs * 2;
  // More rows take more arithmetic, and so more warps.
  const int resident = p.rows == 1 || smem > 100 * 1024 ? 1 : 2;
  const int blocks = (p.outputs / 2 + kProductWarps - 1) / kProductWarps, room = resident * sm_count();
  return launch(product_kernel<T, ROWS>, blocks < room ? blocks : room, kProductThreads, smem, s, p);
}

template <class T>
cudaError_t rows(const ProductParams& p, cudaStream_t s) {
  if (p.rows == 1) return go<T, 1>(p, s);
  if (p.rows == 2) return go<T, 2>(p, s);
  return go<T, kProductRowsMax>(p, s);
}

}  // namespace
}  // namespace taper

extern "C" int taper_product(const taper::ProductParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->rows <= 0 || p->rows > kProductRowsMax || p->inputs <= 0 || p->inputs % 8 ||
      p->outputs <= 0 || p->outputs % 2 || (int64_t)p->rows * p->inputs * 2 > 220 * 1024)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? rows<__nv_bfloat16>(*p, stream) : rows<__half>(*p, stream);
}

extern "C" int taper_chain(const taper::ChainParams* given, cudaStream_t stream) {
  using namespace taper;
  ChainParams p = *given;
  if (p.count <= 0 || p.count > TAPER_CHAIN_MAX) return cudaErrorInvalidValue;
  p.inputs_most = 0;
  for (int i = 0; i < p.count; ++i) {
    const ProductParams& of = p.products[i];
    if (of.rows != 1 || of.inputs <= 0 || of.inputs % 8 || of.inputs > TAPER_CHAIN_INPUTS || of.outputs <= 0 ||
        of.outputs % 2 || of.dtype != p.products[0].dtype)
      return cudaErrorInvalidValue;
    if (of.inputs > p.inputs_most) p.inputs_most = of.inputs;
  }
  auto go = [&](auto kernel) {
    return launch(kernel, sm_count(), kProductThreads, kChainRing + (size_t)p.inputs_most * 2, stream, p);
  };
  return p.products[0].dtype == kBf16 ? go(chain_kernel<__nv_bfloat16>) : go(chain_kernel<__half>);
}
