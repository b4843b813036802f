// Entry point of the count of tokens that are read.
#include "distinct.cuh"

extern "C" int taper_distinct(const taper::DistinctParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t bytes = ((int64_t)p->max_len + 31) / 32 * 4;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads > 0 && p->q_heads % p->kv_heads == 0 && p->max_len > 0 &&
                  bytes <= kMostMarks;
  if (!ok) return cudaErrorInvalidValue;
  return launch(distinct_kernel, p->rows * p->kv_heads, kDistinctThreads, bytes, stream, *p);
}
