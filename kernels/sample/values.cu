// Entry point of attention over sampled values.
#include "values.cuh"

namespace taper {
namespace {

constexpr int kMostMasses = 80 * 1024;
constexpr int64_t kSetUpTiles = 20;  // what a thread block takes beside its keys, in tiles of them

// The team that has all lists done soonest, were they as long as the longest: larger teams have fewer tiles a rank and more
// of them wait for a multiprocessor. Nothing but time depends on it.
int best_team(int lists, int runs, int64_t per, int64_t fit) {
  int best = runs;
  int64_t least = INT64_MAX;
  for (int team = runs; team > 0; --team) {
    const int64_t own = (runs + team - 1) / team, waves = ((int64_t)lists * team + sm_count() - 1) / sm_count();
    if (own > fit) break;
    const int64_t cost = waves * (kSetUpTiles + own * per);
    if (cost < least) least = cost, best = team;
  }
  return best;
}

template <class T, int D, int N>
cudaError_t go(ValuesParams p, cudaStream_t stream) {
  ValuesMaps maps;
  cudaError_t e = row_map(&maps.k, p.k, p.dtype, p.blocks * p.kv_heads * kBlock, D, kBlock);
  if (e == cudaSuccess) e = row_map(&maps.q, p.q, p.dtype, (int64_t)p.rows * p.q_heads, D, N);
  if (e != cudaSuccess) return e;
  const int runs = team_size(p.kv_heads);
  const int64_t tile = sizeof(float) * (p.q_heads / p.kv_heads), room = kMostMasses / tile;
  const int64_t per = rank_tiles((p.max_len + kBlock - 1) / kBlock, runs), fit = room / per;
  if (fit == 0) return cudaErrorInvalidValue;
  const int team = p.rule == kPerTile ? runs : best_team(p.rows * p.kv_heads, runs, per, fit);
  const bool packed = team < runs;
  ValuesTeams teams{(uint32_t)(p.rows * team), (uint32_t)per};
  int64_t members = teams.members;
  if (packed) {
    // Shares are rounded, at most by one or by a seventh; every row has the least that its masses fit into.
    teams.stride = (uint32_t)(fit < runs ? fit * per : runs * per);
    const int64_t least = fit < runs ? (runs + fit - 1) / fit : 1, shared = members + members / 7 + p.rows * least;
    members = shared < (int64_t)p.rows * runs ? shared : (int64_t)p.rows * runs;
  }
  const int64_t grid = members * p.kv_heads;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  p.in_order = grid > sm_count();
  auto start = [&](auto kernel) {
    return launch(kernel, (int)grid, kValueThreads + 32, ValuesLayout<D, N>::bytes(packed) + 1024 + tile * teams.stride, stream,
                  maps, p, teams);
  };
  if (p.rule == kPerTile) return start(values_kernel<T, D, N, true, false>);
  return packed ? start(values_kernel<T, D, N, false, true>) : start(values_kernel<T, D, N, false, false>);
}

}  // namespace
}  // namespace taper

extern "C" int taper_values(const taper::ValuesParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && (p->head_dim == 64 || p->head_dim == 128) &&
                  (p->dtype == kBf16 || p->dtype == kF16) && p->samples > 0 && p->max_len > 0 &&
                  p->rule >= kSystematic && p->rule <= kPerTile && !(p->rule == kPerTile && p->ids) &&
                  p->blocks * p->kv_heads * kBlock <= INT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return for_group(p->q_heads / p->kv_heads, [&](auto n) {
      return go<decltype(t), decltype(d)::value, decltype(n)::value>(*p, stream);
    });
  });
}
