// Entry point of the choice of values.
#include "spread.cuh"

extern "C" int taper_spread(const taper::SpreadParams* p, cudaStream_t stream) {
  using namespace taper;
  const size_t smem = ((size_t)p->most_tiles + 1) * (sizeof(double) + sizeof(uint32_t));
  const int64_t needed = p->spread == TAPER_PER_TILE && p->most_tiles > p->samples ? p->most_tiles : p->samples;
  const bool ok = p->rows > 0 && p->q_heads > 0 && p->samples > 0 && p->tile_tokens > 0 &&
                  p->tile_tokens % kBlock == 0 && p->most_tiles > 0 && smem <= 224 * 1024 &&
                  p->capacity >= needed && p->spread >= TAPER_SYSTEMATIC && p->spread <= TAPER_LARGEST_REMAINDER &&
                  (int64_t)p->rows * p->q_heads * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return launch(spread_kernel, p->rows * p->q_heads, kSpreadThreads, smem, stream, p->overlap != 0, *p);
}
