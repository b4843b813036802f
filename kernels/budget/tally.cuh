// What a rank adds up of its own sampled values once the estimated outputs are known.
//
// With e a sampled key's weight, v its value and o the estimated output, the error is that of a
// sum of r = e (v - o). One product of values with o gives every key's |r|^2. How alike the
// directions of r are, less its mean, the first few keys say.
#pragma once

#include "parts.cuh"

namespace taper {

template <class T, int D, int N>
struct Tally : Member<D> {
  using Shared = SampledShared<D, N>;
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  using Member<D>::p, Member<D>::o, Member<D>::warp, Member<D>::lane, Member<D>::group;
  static constexpr int NT = N / 8, C = N / 4, kLoads = D / 32;
  Shared& sh;
  const uint32_t stages, split;  // in shared memory

  // The head of a thread's c-th pair of accumulators.
  __device__ __forceinline__ int head(int c) const { return c / 2 * 8 + (lane & 3) * 2 + (c & 1); }
  // The first few keys' values.
  __device__ __forceinline__ const T* values() const { return static_cast<const T*>(o.few_near ? o.near : p.d.v); }
  // -inf of a point that is not the sample's.
  __device__ __forceinline__ float score_of(uint32_t point, int h) const {
    const float* scores = p.scores + (int64_t)o.slot * p.capacity * group;
    const float score = __ldcg(scores + (point * group + min(h, group - 1)));  // below 2^32 of them
    return h < group ? score : -INFINITY;
  }
  // Of a rank's own sampled keys: sums of e^2, |r|^2 and e^2 |v|^2 (of chi2 the largest e^2).
  using Sums = float[C][3];

  // One tile of values at v_s; `score` of the thread's rows and heads.
  __device__ __forceinline__ void tile(uint32_t v_s, const float (&score)[C][2], Sums& sum) const {
    float x[N];
    score_tile<T, D, 2 * N>(x, v_s, split);
    // Half a row a lane.
    const int row = warp % 4 * 16 + lane / 2, half = lane & 1;
    float norm = 0.f;
#pragma unroll 2
    for (int i = 0; i < D / 16; ++i) {
      const uint32_t at = D == 128 ? half * (kBlock * 128) + swizzled(row, i ^ (half * 4))
                                   : swizzled(row, half * 4 + i);
      const uint4 y = ld_shared_v4(v_s + at);
      const T* v = reinterpret_cast<const T*>(&y);
#pragma unroll
      for (int k = 0; k < 8; ++k) norm += to_float(v[k]) * to_float(v[k]);
    }
    norm += __shfl_xor_sync(~0u, norm, 1);
    float v2[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) v2[i] = __shfl_sync(~0u, norm, lane / 4 * 2 + 16 * i);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const float4 stat = *reinterpret_cast<const float4*>(&sh.stat[head(c)]);  // lse, o2, ow, w2
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = c / 2 * 4 + (c & 1) + 2 * i;
        const bool is = score[c][i] > -INFINITY;
        const float vo = x[at] + x[N / 2 + at];
        const float e = exp2_fast(score[c][i] - stat.x * kLog2e), e2 = e * e;
        const float away = e2 * (v2[i] - 2.f * vo + stat.y);
        const float third = p.rule == kChi2 ? e2 : e2 * v2[i];
        sum[c][0] += is ? e2 : 0.f, sum[c][1] += is ? away : 0.f;
        sum[c][2] = join(2, sum[c][2], is ? third : 0.f);
      }
    }
  }
  // Sums, but for the largest e^2.
  __device__ __forceinline__ float join(int k, float x, float y) const {
    return k == 2 && p.rule == kChi2 ? fmaxf(x, y) : x + y;
  }
  // The values of all of the rank's points, from the ring, two tiles a stage. `pos` counts stages.
  __device__ __forceinline__ void look(uint32_t points, uint32_t& pos, Sums& sum) const {
    const uint32_t tiles = Run(o, 0, points).tiles(), n = (tiles + 1) / 2;
    const int r0 = warp % 4 * 16 + lane / 4;
#pragma unroll 1
    for (uint32_t i = (warp / 4 ^ pos) & 1; i < n; i += 2) {
      const uint32_t stage = (pos + i) % L::kStages;
      float score[2][C][2];
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint32_t point = (o.rank + (2 * i + t) * o.team) * kBlock + r0 + 8 * k;
            const float own = score_of(min(point, points - 1), head(c));
            score[t][c][k] = point < points ? own : -INFINITY;
          }
      mbar_wait(smem_u32(&sh.full[stage]), (pos + i) / L::kStages & 1);
      fence_async_smem();
#pragma unroll 1
      for (uint32_t t = 0; t < 2 && 2 * i + t < tiles; ++t) {
        tile(stages + stage * L::kStage + t * L::kTile, score[0], sum);
#pragma unroll
        for (int c = 0; c < C; ++c) score[0][c][0] = score[1][c][0], score[0][c][1] = score[1][c][1];
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem_u32(&sh.empty[stage]));
    }
    pos += n;
  }

  // Of the first few keys, sixteen a warp: their values, and their row. The warpgroup that has
  // fewer stages to look at takes them.
  struct Few {
    uint4 x[kLoads], y[kLoads];
    float score[NT][4];
    uint32_t row;
  };
  // What of this does not depend on the team's parts.
  struct Ahead {
    Few few;
    uint32_t count;  // of the few
    int first;       // of the rank's tiles of pairs
    uint32_t row;    // of the lane's key in it
    float dot[4];
  };
  __device__ __forceinline__ bool takes_few(uint32_t pos, const Ahead& a) const {
    return mixes(a) && ((warp / 4 ^ pos) & 1) && warp % 4 * 16 < a.count;
  }
  __device__ __forceinline__ void fetch(Few& f) const {
    const T* lo = values() + (int64_t)__shfl_sync(~0u, f.row, lane / 4) * D;
    const T* hi = values() + (int64_t)__shfl_sync(~0u, f.row, lane / 4 + 8) * D;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      f.x[i] = reinterpret_cast<const uint4*>(lo)[(lane & 3) + 4 * i];
      f.y[i] = reinterpret_cast<const uint4*>(hi)[(lane & 3) + 4 * i];
    }
  }
  // The thread's scores of them, once the team has met: all on their way before the first is used.
  __device__ __forceinline__ void fetch_scores(Ahead& a) const {
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = warp % 4 * 16 + lane / 4 + 8 * (i / 2);
        const int h = t * 8 + (lane & 3) * 2 + (i & 1);
        const float score = score_of(sh.few_points[min(key, a.count - 1)], h);
        a.few.score[t][i] = key < a.count ? score : -INFINITY;
      }
  }
  // Their e in units of the sample's mean, v . o, r . mean and |r - mean|^2, for products with one another.
  __device__ __forceinline__ void look_at_few(const Few& f, uint32_t b) const {
    const int quad = lane & 3;
    float vo[NT][4] = {}, vl[NT][4] = {}, v2[2], square[2][4] = {};
    // The diagonals of the rows' products with one another: each lies in one of the four lanes that hold a row.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = f.x[i], y = f.y[i];
      mma_16x8x16<T>(square[0], x.x, y.x, x.y, y.y, x.x, x.y);
      mma_16x8x16<T>(square[0], x.z, y.z, x.w, y.w, x.z, x.w);
      mma_16x8x16<T>(square[1], x.x, y.x, x.y, y.y, y.x, y.y);
      mma_16x8x16<T>(square[1], x.z, y.z, x.w, y.w, y.z, y.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      v2[i] = __shfl_sync(~0u, lane & 4 ? square[i][2 * i + 1] : square[i][2 * i], (lane & ~3) | lane >> 3);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float(&to)[4] = k < 2 ? vo[t] : vl[t];
          const uint4 x = f.x[i], y = f.y[i];
          const uint4 z = ld_shared_v4(split + split_at<D, N>(k / 2, k % 2 * N + t * 8 + lane / 4, (quad + 4 * i) * 8));
          mma_16x8x16<T>(to, x.x, y.x, x.y, y.y, z.x, z.y);
          mma_16x8x16<T>(to, x.z, y.z, x.w, y.w, z.z, z.w);
        }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = t * 8 + quad * 2 + (i & 1);
        const uint32_t key = warp % 4 * 16 + lane / 4 + 8 * (i / 2);
        if (key >= kCovarianceKeys) continue;
        const HeadStat& stat = sh.stat[h];
        const float e = b * exp2_fast(f.score[t][i] - stat.lse * kLog2e);
        float* pair = sh.pair[key][h];
        pair[0] = e, pair[1] = vo[t][i], pair[2] = e * (vl[t][i] - stat.ow);
        pair[3] = e * e * (v2[i / 2] - 2.f * vo[t][i] + stat.o2) - 2.f * pair[2] + stat.w2;
      }
  }

  // The first few keys' r, centred, multiplied with one another: pairs (i, j) with i > j
  // lie in eleven tiles of 16 by 8, which the ranks share from the least busy one on.
  static constexpr int kPairTiles = 11;
  static __device__ __forceinline__ int pair_row(int tile) { return tile < 2 ? 0 : tile < 6 ? 16 : 32; }
  static __device__ __forceinline__ int pair_col(int tile) {
    return 8 * (tile < 2 ? tile : tile < 6 ? tile - 2 : tile - 6);
  }
  __device__ __forceinline__ int first_pair_tile(uint32_t points) const {
    const uint32_t end = Run(o, 0, points).end(), at = o.rank + o.team - (end - o.over_team(end) * o.team);
    return at < o.team ? at : at - o.team;
  }
  __device__ __forceinline__ bool mixes(const Ahead& a) const { return p.rule == kChi2 && a.first < kPairTiles; }
  // The row of the lane's key in a tile.
  __device__ __forceinline__ uint32_t pair_at(int tile, uint32_t few) const {
    return few_row(lane < 16 ? pair_row(tile) + lane : pair_col(tile) + (lane & 7), few);
  }
  __device__ __forceinline__ uint32_t few_row(uint32_t key, uint32_t few) const {
    return sh.few_rows[min(key, max(few, 1u) - 1)];
  }
  __device__ __forceinline__ void gram(uint32_t mine, float (&dot)[4]) const {
    const int quad = lane & 3;
    const T* rows[3];
#pragma unroll
    for (int j = 0; j < 3; ++j)
      rows[j] = values() + (int64_t)__shfl_sync(~0u, mine, j * 8 + lane / 4) * D + quad * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) dot[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(rows[0] + 32 * i);
      const uint4 y = *reinterpret_cast<const uint4*>(rows[1] + 32 * i);
      const uint4 z = *reinterpret_cast<const uint4*>(rows[2] + 32 * i);
      mma_16x8x16<T>(dot, x.x, y.x, x.y, y.y, z.x, z.y);
      mma_16x8x16<T>(dot, x.z, y.z, x.w, y.w, z.z, z.w);
    }
  }
  // Adds up a head's squared products in a tile, and the products of their squared norms; each lane its own.
  __device__ __forceinline__ void mix(int tile, uint32_t few, int h, const float (&dot)[4], float (&sum)[2]) const {
    const HeadStat& s = sh.stat[h];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = pair_row(tile) + lane / 4 + 8 * (i / 2);
      const int col = pair_col(tile) + (lane & 3) * 2 + (i & 1);
      // Beyond the few is room that nothing was written to.
      const float *a = sh.pair[min(row, kCovarianceKeys - 1)][h], *c = sh.pair[col][h];
      const float x = a[0] * c[0] * (dot[i] - a[1] - c[1] + s.o2) - a[2] - c[2] + s.w2;
      const bool is = row < few && col < row;
      sum[0] += is ? x * x : 0.f, sum[1] += is ? a[3] * c[3] : 0.f;
    }
  }

  // Where the first few values lie, while tiles are on their way,
  __device__ __forceinline__ void look_up(uint32_t points, Ahead& a) const {
    a.first = first_pair_tile(points);
    if (!mixes(a)) return;
    mbar_wait(smem_u32(&sh.placed), 0);
    // Those of them that are among as many points.
    a.count = 0;
#pragma unroll
    for (int i = 0; i < kCovarianceKeys; i += 32) {
      const uint32_t key = i + lane;
      a.count += __popc(__ballot_sync(~0u, key < sh.few_placed && sh.few_points[min(key, kCovarianceKeys - 1)] < points));
    }
    a.few.row = few_row(warp % 4 * 16 + (lane & 15), a.count);
    a.row = pair_at(a.first, a.count);
  }
  // and they themselves, while the team meets.
  __device__ __forceinline__ void prepare(uint32_t pos, Ahead& a) const {
    if (takes_few(pos, a)) fetch(a.few);
    if (mixes(a) && warp < group) gram(a.row, a.dot);
  }
};

}  // namespace taper
