// Entry point of the choice of tokens.
#include "token.cuh"

extern "C" int taper_tokens(const taper::TokenParams* p, cudaStream_t stream) {
  using namespace taper;
  const int most = kTokenCluster * kTokenThreads;
  if (p->rows <= 0 || p->vocab <= 0 || p->vocab > 32 * most) return cudaErrorInvalidValue;
  auto go = [&](auto kernel) {
    return launch(kernel, p->rows * kTokenCluster, kTokenThreads, 0, stream, *p);
  };
  if (p->vocab <= 8 * most) return go(token_kernel<8>);
  if (p->vocab <= 16 * most) return go(token_kernel<16>);
  return go(token_kernel<32>);
}
