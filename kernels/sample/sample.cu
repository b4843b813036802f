// Entry point of the sampling without replacement.
#include "sample.cuh"

extern "C" int taper_sample(const taper::SampleParams* p, cudaStream_t stream) {
  using namespace taper;
  const size_t bitmap = ((size_t)p->max_len + 31) / 32 * 4;
  const bool ok = p->rows > 0 && p->list_heads > 0 && p->capacity > 0 && p->max_len > 0 &&
                  p->max_len <= (1 << 30) && bitmap <= 224 * 1024;
  if (!ok) return cudaErrorInvalidValue;
  return launch(sample_kernel, p->rows * p->list_heads * kSampleCluster, kSampleThreads, bitmap, stream, *p);
}
