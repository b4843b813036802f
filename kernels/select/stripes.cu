// Entry points: columns and slashes to lists of key blocks, what rows read by them, and columns beside such lists.
#include "stripes.cuh"

extern "C" int taper_stripes(const taper::StripesParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->heads > 0 && p->words > 0 && p->words <= 12288 &&
                  (!p->tiles || p->tile_count > 0) && (p->tiles || p->slashes) && p->each > 0 &&
                  (p->each == 1 || (!p->halves && p->slash == TAPER_TWO_BLOCKS));
  if (!ok) return cudaErrorInvalidValue;
  if (p->slashes) {
    const cudaError_t e = launch(stripe_bits_kernel, p->heads, 256, p->words * 4, stream, *p);
    if (e != cudaSuccess || !p->tiles) return e;
  }
  const int64_t items = (int64_t)p->heads * p->tile_count;
  return launch(stripe_lists_kernel, (unsigned)((items + 3) / 4), 128, 0, stream, *p);
}

extern "C" int taper_before(const taper::BeforeParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t items = (int64_t)p->heads * p->runs;
  const bool ok = p->heads > 0 && p->runs > 0 && p->words > 0 && p->block_tokens > 0 && (!p->tokens || p->token_stride > 0) &&
                  items < INT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  return launch(before_kernel, (unsigned)((items + 3) / 4), 128, 0, stream, *p);
}

extern "C" int taper_drop_columns(const taper::ColumnsParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->heads > 0 && p->tile_count > 0 && p->column_stride > 0 && p->list_heads > 0 &&
                  p->heads % p->list_heads == 0;
  if (!ok) return cudaErrorInvalidValue;
  const int64_t items = (int64_t)p->heads * p->tile_count;
  return launch(drop_columns_kernel, (unsigned)((items + 3) / 4), 128, 0, stream, *p);
}
