// Entry point of the selection.
#include "select.cuh"

extern "C" int taper_select(const taper::SelectParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->lists > 0 && p->capacity > 0 && p->stride > 0 &&
                  (int64_t)p->lists * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return launch(select_kernel, p->lists, kSelectThreads, 0, stream, p->overlap != 0, *p);
}
