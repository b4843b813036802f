// Entry points: means of runs of rows, and the own block of each list.
#include "pool.cuh"

extern "C" int taper_means(const taper::MeansParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->run_count > 0 && p->heads > 0 && p->heads <= 65535 &&
                  (p->dtype == kBf16 || p->dtype == kF16);
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    constexpr int kD = decltype(d)::value;
    return launch(means_kernel<decltype(t), kD>, dim3(p->run_count, p->heads), kD, 0, stream, *p);
  });
}

extern "C" int taper_own(const taper::OwnParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->lists <= 0 || p->run_count <= 0 || p->capacity <= 0) return cudaErrorInvalidValue;
  return launch(own_kernel, (p->lists + 255) / 256, 256, 0, stream, *p);
}
