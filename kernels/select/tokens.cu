// Entry point of scoring and choosing tokens in one launch.
#include "tokens.cuh"

namespace taper {
namespace {

constexpr int kTokenSmem = 217 * 1024;

// Thread blocks a list: as many as end soonest, of which each takes some time for meetings beside its blocks of tokens.
int best_team(int lists, int most, int warps, int blocks) {
  constexpr int kMeetings = 6;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int team = 1; team <= most; ++team) {
    const int64_t rounds = ((int64_t)lists * team + sm_count() - 1) / sm_count();
    const int64_t cost = rounds * (kMeetings + (blocks + team * warps - 1) / (team * warps));
    if (cost < least) best = team, least = cost;
  }
  return best;
}

template <class T, int W, int G>
cudaError_t go(TokensParams p, cudaStream_t s) {
  constexpr int kWarps = token_warps(G), kBytes = QuantizedScorer<T, W, G>::kBytes, kRings = kWarps * kTokenStages * kBytes;
  const int lists = p.rows * p.kv_heads, blocks = p.stride / kBlock, scores = p.q_heads / p.kv_heads * kBlock * 4;
  p.team = best_team(lists, team_size(p.kv_heads), kWarps, blocks);
  p.in_order = lists * p.team > sm_count();
  p.group = p.q_heads / p.kv_heads, p.room = team_size(p.kv_heads);
  const int runs = (blocks + p.team * kWarps - 1) / (p.team * kWarps) - (scores <= kBytes ? kTokenStages : 0);
  const int fit = (kTokenSmem - kRings) / (kWarps * scores), kept = runs < 0 ? 0 : runs < fit ? runs : fit;
  // Places that are dealt out are numbers.
  const dim3 grid = p.in_order ? dim3(lists * p.team) : dim3(p.team, p.kv_heads, p.rows);
  return launch(tokens_kernel<T, W, G>, grid, kWarps * 32, kRings + kWarps * kept * scores, s, p,
                (uint32_t)kept);
}

}  // namespace
}  // namespace taper

extern "C" int taper_pick_tokens(const taper::TokensParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && p->rows <= 65535 && p->kv_heads <= 65535 && p->stride > 0 &&
                  p->stride % kBlock == 0 && p->stride <= 1 << 25 &&
                  p->capacity > 0 && (int64_t)p->rows * p->kv_heads * p->capacity <= UINT32_MAX && p->noise > 0.f &&
                  (int64_t)p->rows * p->kv_heads <= INT32_MAX / kTeamMax;
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return for_quantized_group(p->q_heads / p->kv_heads, [&](auto heads) {
      return go<decltype(t), decltype(d)::value / 16, decltype(heads)::value>(*p, stream);
    });
  });
}
