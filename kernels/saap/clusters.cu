// Entry points of keys' clusters and of the choice of whole ones.
#include "keys.cuh"
#include "probe.cuh"

extern "C" int taper_saap_probe(const taper::ProbeParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 && p->clusters > 0 &&
                  p->clusters <= kProbeMost && p->most > 0 && p->capacity > 0 &&
                  (int64_t)p->rows * p->kv_heads * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  // What a list comes to does not depend on how many blocks share it.
  const int64_t shares = ((int64_t)p->capacity + kProbeShare - 1) / kProbeShare;
  const int lists = p->rows * p->kv_heads;
  int team = 1;
  // The bits of a thread's runs have to fit, however many lists there are.
  auto smem = [&](int team) {
    const int each = (p->capacity / (int)kProbeRun + 2 + team - 1) / team;
    return sizeof(ProbeShared) + (each + kProbeThreads - 1) / kProbeThreads * kProbeThreads;
  };
  while (team < kProbeTeam && team < shares && (2 * team * lists <= sm_count() || smem(team) > kProbeSmem)) team *= 2;
  const auto kernel = p->clusters <= 4 * kProbeThreads ? probe_kernel<4> : probe_kernel<8>;
  return launch_cluster(kernel, lists * team, kProbeThreads, smem(team), team, stream, *p);
}

extern "C" int taper_saap_nearest(const taper::NearestParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->kv_heads > 65535 || p->clusters <= 0 || p->clusters > 65536)
    return cudaErrorInvalidValue;
  return launch(nearest_kernel, dim3((p->tokens + 7) / 8, p->kv_heads), 256, 0, stream, *p);
}

extern "C" int taper_saap_key_clusters(const taper::KeyClusterParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t layers = ((int64_t)p->tokens + kKeyTokens - 1) / kKeyTokens;
  if (p->tokens <= 0 || layers > 65535 || p->kv_heads <= 0 || p->kv_heads > 65535 || p->clusters <= 0 || p->clusters > 65536)
    return cudaErrorInvalidValue;
  int team = 1;
  while (team < kKeyTeam && team * kKeyRows < p->clusters) team *= 2;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return launch_cluster(key_clusters_kernel<decltype(t), decltype(d)::value / 32>, dim3(team, p->kv_heads, layers),
                          32 * kKeyWarps, 0, team, stream, *p);
  });
}
