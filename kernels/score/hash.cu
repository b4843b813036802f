// Entry point of the score pass over binary codes.
#include "hash.cuh"

extern "C" int taper_hash_score(const taper::HashScoreParams* p, cudaStream_t stream) {
  using namespace taper;
  const bool ok = p->rows > 0 && p->kv_heads > 0 && p->q_heads % p->kv_heads == 0 &&
                  p->q_heads / p->kv_heads <= 16 && p->words > 0 && p->max_len > 0 &&
                  p->words * (p->per_head ? p->q_heads / p->kv_heads : 1) <= kHashWordsMost;
  if (!ok) return cudaErrorInvalidValue;
  constexpr int kShare = kHashThreads * kHashTokens;
  const dim3 grid((p->max_len + kShare - 1) / kShare, p->kv_heads, p->rows);
  const int group = p->per_head && p->words == 1 ? p->q_heads / p->kv_heads : 0;
  if (group == 4) return launch(hash_score_kernel<4>, grid, kHashThreads, 0, stream, *p);
  if (group == 8) return launch(hash_score_kernel<8>, grid, kHashThreads, 0, stream, *p);
  return launch(hash_score_kernel<0>, grid, kHashThreads, 0, stream, *p);
}
