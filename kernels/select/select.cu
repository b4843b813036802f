// Entry points of the selection.
#include "select.cuh"

namespace taper {
namespace {

// As many blocks as leave a thread eight entries; 16 only for very long lists, since so
// large a cluster may wait for room. Where there are many lists no more than the device has at a time, unless what they
// have to keep is more than fits. Results do not depend on the choice.
template <bool MASSES>
cudaError_t go(const GroupSelectParams& p, cudaStream_t s) {
  static const bool wide =
      cluster_fits((const void*)select_kernel<MASSES>, kSelectThreads, kSelectSmem, kClusterMost);
  const uint32_t n = p.base.stride, most = wide ? kClusterMost : 8;
  auto crowded = [&](uint32_t cluster) {
    return (int64_t)2 * cluster * p.base.lists > sm_count() && n <= cluster * kSelectKept;
  };
  uint32_t cluster = 1;
  while (cluster < most && n > cluster * kSelectThreads * (cluster < 8 ? 8 : 40) && !crowded(cluster)) cluster *= 2;
  const uint32_t inbox = cluster > 1 ? 2 * cluster * kSelectBins * (MASSES ? 2 : 1) : 0;
  const uint32_t share = ((n + cluster * 32 - 1) / (cluster * 32) + 127) & ~127u;
  const uint32_t fit = (kSelectSmem / 4 - inbox) & ~4095u;
  const uint32_t room = share * 32 < fit ? share * 32 : fit;
  return launch_cluster(select_kernel<MASSES>, p.base.lists * cluster, kSelectThreads,
                        (inbox + room) * 4, cluster, s, p, room);
}

}  // namespace
}  // namespace taper

extern "C" int taper_select_group(const taper::GroupSelectParams* p, cudaStream_t stream) {
  using namespace taper;
  const SelectParams& b = p->base;
  const bool ok = b.lists > 0 && b.capacity > 0 && b.stride > 0 && p->group > 0 &&
                  b.stride <= 1 << 25 && (int64_t)b.lists * b.capacity <= UINT32_MAX &&
                  b.lists <= INT32_MAX / kClusterMost;
  if (!ok) return cudaErrorInvalidValue;
  return p->mass == kByScore ? go<true>(*p, stream) : go<false>(*p, stream);
}

extern "C" int taper_select(const taper::SelectParams* p, cudaStream_t stream) {
  taper::GroupSelectParams g{};
  g.base = *p;
  g.group = 1;
  return taper_select_group(&g, stream);
}

extern "C" int taper_pages(const taper::PagesParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->lists > 0 && p->lists <= 65535 && p->capacity > 0 && p->page > 0 &&
                  (int64_t)p->lists * p->capacity * p->page <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  const int64_t blocks = ((int64_t)p->capacity * p->page + 255) / 256;
  return launch(pages_kernel, dim3((unsigned)(blocks < 64 ? blocks : 64), p->lists), 256, 0, stream, *p);
}

extern "C" int taper_shares(const taper::SharesParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->rows <= 0 || p->kv_heads <= 0 || p->q_heads % p->kv_heads || p->rows > INT32_MAX / p->kv_heads - 256)
    return cudaErrorInvalidValue;
  return launch(shares_kernel, (p->rows * p->kv_heads + 255) / 256, 256, 0, stream, *p);
}
