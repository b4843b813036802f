// Entry points of what rows go through before they are compared with something learned.
#include "project.cuh"

#include <algorithm>

extern "C" int taper_rows(const taper::RowsParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t grid = ((int64_t)p->tokens * p->heads * (p->width / 2) + 255) / 256;
  if (p->tokens <= 0 || p->heads <= 0 || p->width <= 0 || p->width % 2 || grid > INT32_MAX)
    return cudaErrorInvalidValue;
  auto kernel = p->x_f32 ? rows_kernel<float> : p->dtype == kBf16 ? rows_kernel<__nv_bfloat16> : rows_kernel<__half>;
  return launch(kernel, (unsigned)grid, 256, 0, stream, *p);
}

extern "C" int taper_project(const taper::ProjectParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->maps > 0 && p->maps <= 65535 && p->x_heads > 0 && p->heads % p->maps == 0 &&
                  p->heads % p->x_heads == 0 && p->heads > 0 && p->inputs > 0 && p->outputs > 0 &&
                  (int64_t)p->rows * (p->heads / p->maps) <= INT32_MAX - 16 &&
                  (int64_t)p->rows * p->x_heads * p->inputs <= UINT32_MAX && (!p->weight_bf16 || p->inputs % 8 == 0) &&
                  (!p->cos || p->inputs % 2 == 0);
  if (!ok) return cudaErrorInvalidValue;
  const int count = p->rows * (p->heads / p->maps);
  // A warp takes so many outputs of so many rows at a time.
  auto go = [&](auto kernel, int outputs, int rows) {
    ProjectParams q = *p;
    const int fit = std::max(kStagedBytes / 4 / p->inputs, 1), share = kProjectWarps * outputs;
    q.staged = std::min(fit > rows ? fit / rows * rows : fit, count);
    const dim3 grid((p->outputs + share - 1) / share, p->maps);
    return launch(kernel, grid, kProjectWarps * 32, (size_t)q.staged * p->inputs * sizeof(float), stream, q);
  };
  if (p->weight_bf16) {
    const dim3 grid((p->outputs + kShortOutputs - 1) / kShortOutputs, p->maps);
    return launch(project_short_kernel, grid, kProjectWarps * 32, short_bytes(p->inputs), stream, *p);
  }
  // Where there is enough for most multiprocessors, a number that is loaded serves many products.
  const int64_t wide = (int64_t)p->maps * ((p->outputs + 8 * kProjectWarps - 1) / (8 * kProjectWarps));
  if (count >= 16 && 2 * wide >= sm_count()) return go(project_kernel<16, 8>, 8, 16);
  return count <= 4 ? go(project_kernel<4, 4>, 4, 4) : go(project_kernel<8, 4>, 4, 8);
}

extern "C" int taper_channels(const taper::ChannelsParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t grid = ((int64_t)p->rows * p->q_heads * p->width + 255) / 256;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 && p->width > 0 && grid <= INT32_MAX;
  if (!ok || p->head_dim <= 0) return cudaErrorInvalidValue;
  return launch(channels_kernel, (unsigned)grid, 256, 0, stream, *p);
}
