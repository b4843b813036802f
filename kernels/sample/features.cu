// Entry point of the draws of features.
#include "features.cuh"

extern "C" int taper_features(const taper::FeaturesParams* p, cudaStream_t stream) {
  using namespace taper;
  const int heads = p->group > 0 ? p->group : 1;
  const bool ok = p->rows > 0 && p->q_heads > 0 && p->group >= 0 && p->q_heads % heads == 0 && p->head_dim > 0 &&
                  p->head_dim % 32 == 0 && p->head_dim <= 1024 && p->draws > 0 && p->draws <= 64;
  if (!ok) return cudaErrorInvalidValue;
  return launch(features_kernel, p->rows * (p->q_heads / heads), p->head_dim, 0, stream, *p);
}
