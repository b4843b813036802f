// Entry points of the budgets, in the order in which a step queues them.
#include "budget.cuh"

namespace taper {
namespace {

bool valid(const BudgetParams& p) {
  return p.rows > 0 && p.kv_heads > 0 && p.q_heads % p.kv_heads == 0 &&
         p.q_heads / p.kv_heads <= 16 && p.capacity > 0 && p.epsilon > 0 &&
         (p.head_dim == 64 || p.head_dim == 128) &&
         (int64_t)p.rows * p.kv_heads * p.capacity <= UINT32_MAX;
}

template <class T, int D>
cudaError_t pilot(const BudgetParams& p, cudaStream_t s) {
  const dim3 grid(kPilotSplits, p.rows * p.kv_heads);
  if (p.q_heads / p.kv_heads <= 8)
    return launch(budget_pilot_kernel<T, D, 1>, grid, kPilotThreads, 0, s, p.overlap != 0, p);
  return launch(budget_pilot_kernel<T, D, 2>, grid, kPilotThreads, 0, s, p.overlap != 0, p);
}
template <class T, int D>
cudaError_t judge(const BudgetParams& p, cudaStream_t s) {
  const size_t smem = sizeof(float) * kCovarianceKeys * (D + 1);
  return launch(budget_judge_kernel<T, D>, p.rows * p.q_heads, kJudgeThreads, smem, s,
                p.overlap != 0, p);
}

}  // namespace
}  // namespace taper

extern "C" int taper_budget_begin(const taper::BudgetParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return launch(budget_begin_kernel, (p->rows * p->kv_heads + 127) / 128, 128, 0, stream,
                p->overlap != 0, *p);
}

extern "C" int taper_budget_pilot(const taper::BudgetParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  if (p->head_dim == 128)
    return p->dtype == kBf16 ? pilot<__nv_bfloat16, 128>(*p, stream) : pilot<__half, 128>(*p, stream);
  return p->dtype == kBf16 ? pilot<__nv_bfloat16, 64>(*p, stream) : pilot<__half, 64>(*p, stream);
}

extern "C" int taper_budget_judge(const taper::BudgetParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  if (p->head_dim == 128)
    return p->dtype == kBf16 ? judge<__nv_bfloat16, 128>(*p, stream) : judge<__half, 128>(*p, stream);
  return p->dtype == kBf16 ? judge<__nv_bfloat16, 64>(*p, stream) : judge<__half, 64>(*p, stream);
}

extern "C" int taper_budget_settle(const taper::BudgetParams* p, cudaStream_t stream) {
  using namespace taper;
  if (!valid(*p)) return cudaErrorInvalidValue;
  return launch(budget_settle_kernel, (p->rows * p->kv_heads + 127) / 128, 128, 0, stream,
                p->overlap != 0, *p);
}
