// Entry point of products of a few rows with a weight matrix.
#include "product.cuh"

namespace taper {
namespace {

template <class T, int ROWS>
cudaError_t go(const ProductParams& p, cudaStream_t s) {
  const size_t smem = (size_t)p.rows * p.inputs * 2;
  // More rows take more arithmetic, and so more warps.
  const int resident = p.rows == 1 || smem > 100 * 1024 ? 1 : 2;
  const int blocks = (p.outputs / 2 + kProductWarps - 1) / kProductWarps, room = resident * sm_count();
  return launch(product_kernel<T, ROWS>, blocks < room ? blocks : room, kProductThreads, smem, s,
                p.overlap != 0, p);
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
