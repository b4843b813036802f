// Entry points of SAAP: assignment, index, classifier, choice by an index.
#include "choose.cuh"
#include "index.cuh"

namespace taper {
namespace {

template <class T>
cudaError_t linear(const LinearParams& p, cudaStream_t s) {
  auto grid = [&](int tiles) { return dim3(p.outputs / (16 * tiles), p.kv_heads); };
  switch (p.inputs) {
    case 64: return launch(linear_kernel<T, 64, 1>, grid(4), 128, 0, s, p);
    case 128: return launch(linear_kernel<T, 128, 1>, grid(4), 128, 0, s, p);
    case 256: return launch(linear_kernel<T, 64, 4>, grid(1), 128, 0, s, p);
    case 512: return launch(linear_kernel<T, 128, 4>, grid(1), 128, 0, s, p);
    case 1024: return launch(linear_kernel<T, 256, 4>, grid(1), 128, 0, s, p);
  }
  return cudaErrorInvalidValue;
}
template <class T>
cudaError_t assign(const AssignParams& p, cudaStream_t s) {
  const dim3 grid((p.tokens + kAssignTokens - 1) / kAssignTokens, p.kv_heads);
  if (p.head_dim == 128)
    return launch(assign_kernel<T, 128>, grid, kAssignWarps * 32, 0, s, p);
  if (p.head_dim == 64)
    return launch(assign_kernel<T, 64>, grid, kAssignWarps * 32, 0, s, p);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace taper

extern "C" int taper_saap_assign(const taper::AssignParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->clusters < 8 || p->clusters % 8 ||
      p->clusters > kClustersMost)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? assign<__nv_bfloat16>(*p, stream) : assign<__half>(*p, stream);
}

extern "C" int taper_saap_nearest(const taper::NearestParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->kv_heads > 65535 || p->clusters <= 0 || p->clusters > 65536)
    return cudaErrorInvalidValue;
  return launch(nearest_kernel, dim3((p->tokens + 7) / 8, p->kv_heads), 256, 0, stream, *p);
}

extern "C" int taper_saap_index(const taper::IndexParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->sequences > 0 && p->kv_heads > 0 && p->segments > 0 && p->clusters > 0 &&
                  p->clusters <= kClustersMost && p->capacity > 0;
  if (!ok) return cudaErrorInvalidValue;
  const int lists = p->sequences * p->kv_heads;
  const dim3 grid(p->segments, lists);
  const size_t smem = p->clusters * 4;
  cudaError_t e = launch(index_kernel<false>, grid, 32, smem, stream, *p);
  if (e == cudaSuccess) e = launch(index_scan_kernel, lists, 1024, 0, stream, *p);
  if (e == cudaSuccess) e = launch(index_kernel<true>, grid, 32, smem, stream, *p);
  return e;
}

extern "C" int taper_saap_linear(const taper::LinearParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->outputs > 0 && p->outputs % 64 == 0;
  if (!ok) return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? linear<__nv_bfloat16>(*p, stream) : linear<__half>(*p, stream);
}

extern "C" int taper_saap_choose(const taper::ChooseParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->clusters > 0 && p->clusters <= kClustersMost && p->take > 0 &&
                  p->capacity > 0 && (int64_t)p->rows * p->kv_heads * p->capacity <= UINT32_MAX;
  if (!ok) return cudaErrorInvalidValue;
  const dim3 grid(kChooseShare, p->rows * p->kv_heads);
  if (p->clusters <= 1024)
    return launch(choose_kernel<4>, grid, kChooseThreads, 0, stream, *p);
  return launch(choose_kernel<16>, grid, kChooseThreads, 0, stream, *p);
}
