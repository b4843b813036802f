// How alike the directions of a sample's errors are: what its first few keys say.
//
// With e a sampled key's weight, v its value and o the estimated output, those are the directions
// of r = e (v - o), less its mean. The values are multiplied with one another while the team meets,
// with the outputs once these are known.
#pragma once

#include "parts.cuh"

namespace taper {

template <class T, int D, int N>
struct Pairs : Member<D> {
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  using Member<D>::p, Member<D>::o, Member<D>::warp, Member<D>::lane, Member<D>::group;
  static constexpr int NT = N / 8;
  SampledShared<D, N>& sh;
  LookRoom<D, N>& room;
  const uint32_t values, split;  // of the few, and the room's, in shared memory

  __device__ __forceinline__ bool wanted() const { return p.rule == kChi2; }
  // Whose threads hold the few keys' rows: the second warpgroup's, a row and the one eight below it each.
  __device__ __forceinline__ bool holds() const { return wanted() && warp >= 4; }
  __device__ __forceinline__ uint32_t key(int i) const { return warp % 4 * 16 + lane / 4 + 8 * i; }

  // What is known of a head: half of it was summed over half of the dimensions.
  __device__ __forceinline__ HeadStat stat(int g) const {
    HeadStat s = sh.stat[0][g];
    const HeadStat& t = sh.stat[1][g];
    s.o2 += t.o2, s.ow += t.ow, s.w2 += t.w2, s.a2 += t.a2, s.oe += t.oe;
    return s;
  }

  // By those who hold rows: the values' products with one another.
  __device__ __forceinline__ void multiply() const {
    float x[32];
    mbar_wait(smem_u32(&sh.placed), 0);
    fence_async_smem();
    score_tile<T, D, 64, kFewPanel, kFewPanel>(x, values, values);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kCovarianceKeys / 8; ++j)
        if (key(i) < kCovarianceKeys)
          *reinterpret_cast<float2*>(&room.gram[key(i)][j * 8 + (lane & 3) * 2]) =
              make_float2(x[j * 4 + 2 * i], x[j * 4 + 2 * i + 1]);
  }

  // The few that are among so many points.
  __device__ __forceinline__ uint32_t count(uint32_t points) const {
    if (points >= kFewPoints) return sh.few_placed;
    uint32_t n = 0;
#pragma unroll
    for (int i = 0; i < kCovarianceKeys; i += 32) {
      const uint32_t k = i + lane;
      n += __popc(__ballot_sync(~0u, k < sh.few_placed && sh.few_points[min(k, kCovarianceKeys - 1)] < points));
    }
    return n;
  }
  // Asks for their scores, once the team has met: they come where e will be.
  __device__ __forceinline__ void fetch() const {
    const float* scores = p.scores + o.slot * kFewPoints * group;
    if (!wanted()) return;
#pragma unroll 1
    for (int k = this->tid / N; k < kCovarianceKeys; k += 256 / N) {
      const int h = this->tid % N;
      if (h < group) cp_async4(smem_u32(room.pair[h][k]), scores + (sh.few_points[k] * group + h));
    }
  }
  // By those who hold rows, of a sample of b keys: e in units of its mean, v . o, r . mean and |r - mean|^2.
  __device__ __forceinline__ void look(uint32_t b) const {
    float x[2 * N];
    score_tile<T, D, 4 * N, kFewPanel>(x, values, split);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t k = key(i / 2);
        const int h = t * 8 + (lane & 3) * 2 + (i & 1), at = t * 4 + i;
        if (k >= kCovarianceKeys) continue;
        const HeadStat s = stat(h);
        const float vo = x[at] + x[N / 2 + at], vl = x[N + at] + x[3 * N / 2 + at];
        const float e = b * exp2_fast(room.pair[h][k][0] - s.lse * kLog2e), rw = e * (vl - s.ow);
        *reinterpret_cast<float4*>(room.pair[h][k]) =
            make_float4(e, vo, rw, e * e * (room.gram[k][k] - 2.f * vo + s.o2) - 2.f * rw + s.w2);
      }
  }
  // Of the first n keys' r, centred: sums of their squared products, and of products of their squared norms, over pairs (i, j)
  // with i > j, which lie in eleven tiles of 16 by 8. Where there are warps enough two share a head.
  __device__ __forceinline__ void sum(uint32_t n) const {
    const int each = group <= 4 ? 2 : 1, items = group * each;
#pragma unroll 1
    for (int item = warp; item < items; item += 8) {
      const int h = item / each;
      float x[2] = {};
      add_pairs(h, n, item % each, each, x);
      // One half of the warp adds up the one, the other the other.
      const bool which = lane >= 16;
      float one = (which ? x[1] : x[0]) + __shfl_xor_sync(~0u, which ? x[0] : x[1], 16);
#pragma unroll
      for (int d = 8; d; d /= 2) one += __shfl_xor_sync(~0u, one, d);
      if (lane % 16 == 0) sh.pairs[h][item % each][which] = one;
    }
  }
  // By a whole warp, every `each`-th of the tiles.
  __device__ __forceinline__ void add_pairs(int h, uint32_t n, int first, int each, float (&sum)[2]) const {
    const HeadStat s = stat(h);
#pragma unroll 1
    for (int tile = first; tile < 11; tile += each) {
      const int row0 = (tile < 2 ? 0 : tile < 6 ? 16 : 32) + lane / 4;
      const int col0 = 8 * (tile < 2 ? tile : tile < 6 ? tile - 2 : tile - 6) + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Beyond the few is room that nothing was written to.
        const uint32_t row = row0 + 8 * (i / 2), col = col0 + (i & 1), at = min(row, kCovarianceKeys - 1);
        const float4 a = *reinterpret_cast<const float4*>(room.pair[h][at]);
        const float4 c = *reinterpret_cast<const float4*>(room.pair[h][col]);
        const float x = a.x * c.x * (room.gram[at][col] - a.y - c.y + s.o2) - a.z - c.z + s.w2;
        const bool is = row < n && col < row;
        sum[0] += is ? x * x : 0.f, sum[1] += is ? a.w * c.w : 0.f;
      }
    }
  }
};

}  // namespace taper
