// Entry point of the score pass.
#include "score.cuh"

namespace taper {
namespace {

template <class T, int W, int NT>
cudaError_t go(const ScoreParams& p, cudaStream_t s) {
  // Few enough blocks that all are resident, where the work allows; each walks on.
  const int runs = (p.max_entries + kScoreWarps * 64 - 1) / (kScoreWarps * 64);
  const int room = sm_count() * (W <= 32 ? 4 : 2) / (p.kv_heads * p.rows);
  const dim3 grid(runs < room ? runs : room > 0 ? room : 1, p.kv_heads, p.rows);
  auto start = [&](auto kernel) { return launch(kernel, grid, kScoreWarps * 32, 0, s, p); };
  if constexpr (W >= 64)
    if (p.ids) return start(score_kernel<T, W, NT, false, true>);
  return start(p.lower ? score_kernel<T, W, NT, true, false> : score_kernel<T, W, NT, false, false>);
}
template <class T, int W>
cudaError_t pick_group(const ScoreParams& p, cudaStream_t s) {
  return p.q_heads / p.kv_heads <= 8 ? go<T, W, 1>(p, s) : go<T, W, 2>(p, s);
}
template <class T>
cudaError_t pick_width(const ScoreParams& p, cudaStream_t s) {
  if (p.width == 128) return pick_group<T, 128>(p, s);
  if (p.width == 64) return pick_group<T, 64>(p, s);
  if (p.width == 32) return pick_group<T, 32>(p, s);
  if (p.width == 16) return pick_group<T, 16>(p, s);
  return cudaErrorInvalidValue;
}

constexpr int kLseThreads = 256;

// A thread block a row and head: the logarithm of its tiles' sums of exponentials. A thread keeps the largest that it has
// met, to which its sum belongs, so that all is read once.
__global__ void __launch_bounds__(kLseThreads) lse_kernel(const TaperLseParams p) {
  __shared__ float tops[kLseThreads / 32], totals[kLseThreads / 32];
  wait_for_predecessor();
  launch_dependents();
  const int i = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const uint32_t per_tile = 64 * p.page, tiles = (p.lens[i / p.q_heads] + per_tile - 1) / per_tile;
  const float* top = p.tile_max + (int64_t)i * p.tile_stride;
  const float* sum = p.tile_sum + (int64_t)i * p.tile_stride;
  // Finite, so that differences of nothing are numbers.
  float most = -1e30f, total = 0.f;
  auto add = [&](float at, float of) {
    const float next = fmaxf(most, at);
    total = total * exp2_fast((most - next) * kLog2e) + of * exp2_fast((at - next) * kLog2e);
    most = next;
  };
#pragma unroll 4
  for (uint32_t t = threadIdx.x; t < tiles; t += kLseThreads) add(top[t], sum[t]);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float at = __shfl_xor_sync(~0u, most, d), of = __shfl_xor_sync(~0u, total, d);
    add(at, of);
  }
  if (lane == 0) tops[warp] = most, totals[warp] = total;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kLseThreads / 32; ++w) add(tops[w], totals[w]);
  p.lse[i] = most + logf(total);
}

}  // namespace
}  // namespace taper

extern "C" int taper_lse(const TaperLseParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->rows <= 0 || p->q_heads <= 0 || p->page <= 0) return cudaErrorInvalidValue;
  return launch(lse_kernel, p->rows * p->q_heads, kLseThreads, 0, stream, *p);
}

extern "C" int taper_score(const taper::ScoreParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->max_entries > 0 && p->kv_heads > 0 &&
                  p->q_heads % p->kv_heads == 0 && p->q_heads / p->kv_heads <= 16 &&
                  p->per_block > 0 && kBlock % p->per_block == 0 &&
                  !p->tile_max == !p->tile_sum && !p->ids == !p->counts &&
                  (!p->ids || (p->width >= 64 && p->per_block == kBlock && !p->tile_max && !p->lower));
  if (!ok) return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? pick_width<__nv_bfloat16>(*p, stream)
                           : pick_width<__half>(*p, stream);
}
