// Entry point of Delta Attention's correction.
#include "delta.cuh"

namespace taper {
namespace {

template <int D>
cudaError_t go(const DeltaParams& p, cudaStream_t s) {
  const int64_t chunks = (int64_t)p.tokens * p.q_heads * (D / 8);
  return launch(delta_kernel<D>, (unsigned)((chunks + 255) / 256), 256, 0, s, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_delta(const taper::DeltaParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->gamma <= 0 || p->position < 0) return cudaErrorInvalidValue;
  if (p->head_dim == 128) return go<128>(*p, stream);
  return p->head_dim == 64 ? go<64>(*p, stream) : cudaErrorInvalidValue;
}
