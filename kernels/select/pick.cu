// Entry point of scoring and choosing pages in one launch.
#include "pick.cuh"

namespace taper {
namespace {

template <class T, int W, int NT>
cudaError_t go(PickParams p, cudaStream_t s) {
  // No row has more pages than the widest.
  const int group = p.q_heads / p.kv_heads;
  p.team = pick_team(p.kv_heads, p.stride);
  if (p.team_most > 0 && p.team > p.team_most) p.team = p.team_most;
  const int grid = (p.layers > 0 ? p.layers : 1) * p.rows * p.kv_heads * p.team;
  const bool shares = p.reduce != TAPER_MAX_OF_GROUP;
  // A smaller team's blocks have a warp's sixteen pages each, of which the last team's may have fewer.
  const uint32_t share = pick_share(p.stride, p.team), round = 16 * kPickWarps, few = (p.stride + 15) / 16 * 16;
  const size_t keys = (size_t)pick_place((p.stride + 3) / 4) * 16 + 16;
  const size_t scores = (size_t)(share > round ? share : few < round ? few : round) * group * 4;
  const size_t smem = shares && scores > keys ? scores : keys;
  p.in_order = grid > sm_count();
  auto start = [&](auto kernel) { return launch(kernel, grid, kPickThreads, smem, s, p); };
  if (p.layers > 0) return start(pick_kernel<T, W, NT, true, true>);
  return shares ? start(pick_kernel<T, W, NT, true, false>) : start(pick_kernel<T, W, NT, false, false>);
}

}  // namespace
}  // namespace taper

extern "C" int taper_pick(const taper::PickParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool shares = p->reduce != TAPER_MAX_OF_GROUP;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && (p->width == 64 || p->width == 128) &&
                  (p->dtype == kBf16 || p->dtype == kF16) && p->capacity > 0 && p->stride > 0 &&
                  p->stride <= kPickMost && p->per_block > 0 && kBlock % p->per_block == 0 &&
                  (int64_t)p->rows * p->kv_heads * p->capacity * (kBlock / p->per_block) <= UINT32_MAX &&
                  (!shares || p->masses) && p->layers >= 0 && p->team_most >= 0 &&
                  (p->layers == 0 || (shares && p->queries && p->views && p->pitch == 2 * p->width)) && (p->target != TAPER_BLOCKS || p->per_block == 1);
  if (!ok) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->width, [&](auto t, auto d) {
    return for_group(p->q_heads / p->kv_heads, [&](auto n) {
      return go<decltype(t), decltype(d)::value, (decltype(n)::value / 8)>(*p, stream);
    });
  });
}
