// Entry points of the walk through lists.
#include "walk.cuh"

namespace taper {
namespace {

// Thread blocks for each of `lists`: what the longest can use, and no more than are resident together.
int beside(int64_t most, int64_t lists) {
  const int64_t room = (int64_t)sm_count() * 8 / lists;
  return (int)(most < room ? most : room > 0 ? room : 1);
}

}  // namespace
}  // namespace taper

extern "C" int taper_walk(const taper::WalkParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->lists > 0 && p->lists <= 65535 && p->capacity > 0 && p->token_shift >= 0 && p->token_shift <= 6 &&
                  !p->states == !p->sampled && !p->states == !p->draws;
  if (!ok) return cudaErrorInvalidValue;
  const int most = (p->capacity + kWalkThreads - 1) / kWalkThreads;
  return launch(walk_kernel, dim3(beside(most, p->lists), p->lists), kWalkThreads, 0, stream, *p);
}

extern "C" int taper_weigh(const taper::WeighParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t heads = (int64_t)p->rows * p->q_heads;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads > 0 && p->q_heads % p->kv_heads == 0 && heads <= 65535 &&
                  p->stride > 0 && p->stride % kBlock == 0;
  if (!ok) return cudaErrorInvalidValue;
  const int most = (p->stride / kBlock + kWeighWarps - 1) / kWeighWarps;
  return launch(weigh_kernel, dim3(beside(most, heads), (unsigned)heads), kWeighWarps * 32, 0, stream,
                *p);
}
