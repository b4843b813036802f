// Entry point of the choice of values.
#include "spread.cuh"

extern "C" int64_t taper_spread_room(int64_t most_tiles) { return taper::spread_room(most_tiles); }

extern "C" int taper_spread(const taper::SpreadParams* p, cudaStream_t stream) {
  using namespace taper;
  const size_t smem = p->room ? 0 : spread_bytes(p->most_tiles);
  const int64_t needed = p->spread == TAPER_PER_TILE && p->most_tiles > p->samples ? p->most_tiles : p->samples;
  const bool ok = p->rows > 0 && p->q_heads > 0 && p->samples > 0 && p->tile_tokens > 0 &&
                  p->most_tiles > 0 && (p->room || spread_room(p->most_tiles) == 0) && !p->tokens == !p->counts &&
                  (!p->tokens || (p->list_heads > 0 && p->q_heads % p->list_heads == 0)) &&
                  p->capacity >= needed && p->spread >= TAPER_SYSTEMATIC && p->spread <= TAPER_LARGEST_REMAINDER &&
                  (int64_t)p->rows * p->q_heads * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return launch(spread_kernel, p->rows * p->q_heads, kSpreadThreads, smem, stream, *p);
}
