// Entry point of the search by halves.
#include "probe.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t go(const SearchParams& p, cudaStream_t s) {
  const dim3 each(p.run_count, p.kv_heads);
  const cudaError_t e = launch(search_lines_kernel<T, D>, each, 256, 0, s, p);
  if (e != cudaSuccess) return e;
  const int64_t units = (int64_t)p.kv_heads * p.run_count;
  const unsigned grid = (unsigned)(units < p.slots ? units : p.slots);
  return launch(search_kernel<T, D>, grid, kSearchThreads, 0, s, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_search(const taper::SearchParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->run_count > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 && p->tiles > 0 &&
                  p->slots > 0 && p->stages >= 0 && p->stages <= 12 && p->chunk_room >= 0 && p->kept_room >= 0 &&
                  p->kv_heads <= 65535 && (int64_t)p->kv_heads * p->run_count <= INT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return go<decltype(t), decltype(d)::value>(*p, stream);
  });
}
