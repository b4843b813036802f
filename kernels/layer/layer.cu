// Entry points of the steps between matrix products and attention.
#include "layer.cuh"

namespace taper {
namespace {

template <class T, int D>
cudaError_t rope(const RopeParams& p, cudaStream_t s) {
  const int64_t items = (int64_t)p.tokens * (p.q_heads + 2 * p.kv_heads) * (D / 16);
  auto kernel = p.qkv_dtype == kBf16 ? rope_kernel<__nv_bfloat16, T, D> : rope_kernel<__half, T, D>;
  return launch(kernel, (unsigned)((items + 255) / 256), 256, 0, s, p);
}

template <class T>
cudaError_t write(const WriteParams& p, cudaStream_t s) {
  const int64_t grid = ((int64_t)p.tokens * p.kv_heads * (p.head_dim / 8) + 255) / 256;
  auto kernel = p.rows_f32 ? write_kernel<T, float> : write_kernel<T, T>;
  return launch(kernel, (unsigned)grid, 256, 0, s, p);
}

template <class T>
cudaError_t norm(const NormParams& p, cudaStream_t s) {
  const int room = 2 * sm_count();
  auto kernel = p.width / 8 <= 512 ? norm_kernel<T, 1> : norm_kernel<T, 2>;
  return launch(kernel, p.rows < room ? p.rows : room, 512, 0, s, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_rope(const taper::RopeParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->q_heads <= 0) return cudaErrorInvalidValue;
  return for_shape(p->dtype, p->head_dim, [&](auto t, auto d) {
    return rope<decltype(t), decltype(d)::value>(*p, stream);
  });
}

extern "C" int taper_angles(const taper::AnglesParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->rows <= 0 || p->half <= 0 || (!p->positions && p->rows > TAPER_FEW_ROWS)) return cudaErrorInvalidValue;
  const int64_t grid = ((int64_t)p->rows * p->half + 255) / 256;
  return launch(angles_kernel, (unsigned)grid, 256, 0, stream, *p);
}

extern "C" int taper_words(const taper::WordsParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->copy_count < 0 || p->copy_count > TAPER_WORD_COPIES || p->run_count < 0 || p->run_count > TAPER_WORD_RUNS)
    return cudaErrorInvalidValue;
  int64_t fours = 0;
  for (int c = 0; c < p->copy_count; ++c) {
    if (p->copies[c].count < 0 || p->copies[c].count % 4) return cudaErrorInvalidValue;
    fours += p->copies[c].count / 4;
  }
  for (int r = 0; r < p->run_count; ++r) {
    const TaperWordRun& run = p->runs[r];
    if (run.first < 0 || run.count < 0 || run.first > TAPER_WORDS - run.count) return cudaErrorInvalidValue;
  }
  const int64_t grid = (fours + 255) / 256 + 1;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  return launch(words_kernel, (unsigned)grid, 256, 0, stream, *p);
}

extern "C" int taper_write(const taper::WriteParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->tokens <= 0 || p->kv_heads <= 0 || p->head_dim <= 0 || p->head_dim % 8)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? write<__nv_bfloat16>(*p, stream) : write<__half>(*p, stream);
}

extern "C" int taper_norm(const taper::NormParams* p, cudaStream_t stream) {
  using namespace taper;
  if (p->rows <= 0 || p->width <= 0 || p->width % 8) return cudaErrorInvalidValue;
  return p->dtype == kBf16 ? norm<__nv_bfloat16>(*p, stream) : norm<__half>(*p, stream);
}

extern "C" int taper_silu(const taper::SiluParams* p, cudaStream_t stream) {
  using namespace taper;
  const int64_t grid = (p->rows * (p->width / 8) + 255) / 256;
  if (p->rows <= 0 || p->width <= 0 || p->width % 8 || grid > INT32_MAX)
    return cudaErrorInvalidValue;
  return p->dtype == kBf16
             ? launch(silu_kernel<__nv_bfloat16>, (unsigned)grid, 256, 0, stream, *p)
             : launch(silu_kernel<__half>, (unsigned)grid, 256, 0, stream, *p);
}
