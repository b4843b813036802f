// Looks at the sample: it doubles from one to the next until the bounds keep the promise for every head of the
// group, or it would be more than reading everything is worth.
//
// A cluster of thread blocks a list. Tiles of 64 draws go to its blocks in turn by their place in the drawing
// order, so that the sums do not depend on what else runs.
#pragma once

#include <cooperative_groups.h>

#include "certain.cuh"

namespace taper {

constexpr int kLookCluster = 8, kLookThreads = 256, kLookWarps = kLookThreads / 32;
constexpr int kLookKeys = 64, kWarpKeys = kLookKeys / kLookWarps;

template <class T, int D>
struct LookShared {
  float q[kGroupMost][D];
  alignas(16) T v[kLookKeys][D];
  alignas(16) float e[kGroupMost][kLookKeys];  // weights relative to `against`
  float norm2[kLookKeys];                      // squared norms of the values
  float against[kGroupMost];
  // What the other thread blocks read: over this one's keys e v and e² v; e, e² and e² |v|².
  float ev[kGroupMost][D], e2v[kGroupMost][D];
  double sums[kGroupMost][3];
  // What they write: whether the sample is enough for a head.
  uint32_t sure[kGroupMost];
};

// One thread block of a list's cluster.
template <class T, int D>
struct Look {
  // A thread adds up one element of the values of every kSets-th head.
  static constexpr int kSets = kLookThreads / D, kHeads = kGroupMost / kSets, kOwn = D / 32;
  const CertainParams& p;
  LookShared<T, D>& sh;
  const int list, rank, row, kv_head, group, tid, lane, warp;
  float ev[kHeads] = {}, e2v[kHeads] = {};
  double sums[2][3] = {};  // of heads `warp` and `warp + 8`, a lane's keys
  float out[kOwn] = {};    // of the head that the warp judges
  float lse = 0.f;

  __device__ __forceinline__ int64_t head(int g) const { return (int64_t)row * p.q_heads + kv_head * group + g; }

  // No unread key scores more than its page's bound, nor can known keys weigh more than together: relative to the
  // larger no weight is above 1, and whatever is too small for a float does not count beside it.
  __device__ __forceinline__ void start() {
    for (int i = tid; i < group * D; i += kLookThreads)
      sh.q[i / D][i % D] = to_float(static_cast<const T*>(p.q)[head(0) * D + i]);
    if (tid < group) sh.against[tid] = fmaxf(p.known_lse[head(tid)], p.reach[head(tid) * 2]);
    __syncthreads();
  }

  // Adds the draws from `done` to `wanted` that are this block's.
  __device__ __forceinline__ void add(uint32_t done, uint32_t wanted) {
    const uint32_t first = done / kLookKeys;
    for (uint32_t tile = first + ((rank - first) & (kLookCluster - 1)); tile * kLookKeys < wanted;
         tile += kLookCluster)
      add_tile(tile * kLookKeys, done, wanted);
  }

  __device__ __forceinline__ void add_tile(uint32_t first, uint32_t done, uint32_t wanted) {
    // Lane i has the warp's i-th key, and so again from lane 8 on; keys beyond weigh nothing and are read in the
    // place of one that is there.
    const uint32_t key = first + warp * kWarpKeys + lane % kWarpKeys;
    const bool live = key >= done && key < wanted;
    const uint32_t token = p.draws[(int64_t)list * p.draw_stride + (live ? key : done)];
    const uint64_t own = cache_row(p, row, kv_head, token);
    Piece<T, D> k[kWarpKeys], v[kWarpKeys];
#pragma unroll
    for (int i = 0; i < kWarpKeys; ++i) {
      const uint64_t at = __shfl_sync(~0u, own, i);
      k[i].load(p.k, at);
      v[i].load(p.v, at);
    }
    float mine = 0.f;
#pragma unroll
    for (int i = 0; i < kWarpKeys; ++i) {
      reinterpret_cast<decltype(v[i].raw)*>(sh.v[warp * kWarpKeys + i])[lane] = v[i].raw;
      float square = 0.f;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) square += v[i][j] * v[i][j];
      square = warp_sum(square);
      if (lane == i) mine = square;
    }
    if (lane < kWarpKeys) sh.norm2[warp * kWarpKeys + lane] = mine;
    for (int g = 0; g < group; ++g) {
      float q[kOwn];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) q[j] = sh.q[g][lane * kOwn + j];
#pragma unroll
      for (int i = 0; i < kWarpKeys; ++i) {
        float dot = 0.f;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) dot += q[j] * k[i][j];
        dot = warp_sum(dot);
        if (lane == i) mine = dot;
      }
      if (lane < kWarpKeys)
        sh.e[g][warp * kWarpKeys + lane] = live ? expf(mine * p.scale - sh.against[g]) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int g = warp + kLookWarps * j;
      if (g >= group) continue;
      for (int key = lane; key < kLookKeys; key += 32) {
        const float e = sh.e[g][key];
        sums[j][0] += e;
        sums[j][1] += (double)e * e;
        sums[j][2] += (double)(e * e) * sh.norm2[key];
      }
    }
    const int c = tid % D, set = tid / D;
    for (int key = 0; key < kLookKeys; key += 4) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = to_float(sh.v[key + i][c]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const int g = set + h * kSets;
        if (g >= group) continue;
        const float4 e = *reinterpret_cast<const float4*>(&sh.e[g][key]);
        const float once[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) ev[h] += once[i] * x[i], e2v[h] += once[i] * once[i] * x[i];
      }
    }
    __syncthreads();  // The next tile overwrites.
  }

  // Shows the other blocks what this one's keys come to.
  __device__ __forceinline__ void show() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int g = tid / D + h * kSets;
      if (g < group) sh.ev[g][tid % D] = ev[h], sh.e2v[g][tid % D] = e2v[h];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int g = warp + kLookWarps * j;
      if (g >= group) continue;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const double sum = warp_sum(sums[j][i]);
        if (lane == 0) sh.sums[g][i] = sum;
      }
    }
  }

  // By a warp: whether `drawn` of `rest` keys are enough for a head, whose estimate is left in `out` and `lse`.
  template <class Cluster>
  __device__ __forceinline__ bool is_sure(Cluster& cluster, int g, uint32_t drawn, uint32_t rest) {
    double e = 0., e2 = 0., e2v2 = 0.;
    float once[kOwn] = {}, twice[kOwn] = {};
    for (int r = 0; r < kLookCluster; ++r) {
      const LookShared<T, D>& of = *cluster.map_shared_rank(&sh, r);
      e += of.sums[g][0], e2 += of.sums[g][1], e2v2 += of.sums[g][2];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) once[j] += of.ev[g][lane + 32 * j], twice[j] += of.e2v[g][lane + 32 * j];
    }
    const float against = sh.against[g];
    const double b = drawn, n = rest, scale = n / b, log_bounds = p.log_bounds;
    const double known = (double)expf(p.known_lse[head(g)] - against), denominator = known + scale * e;
    double cross = 0., centre2 = 0., apart2 = 0., size2 = 0.;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int64_t at = head(g) * D + lane + 32 * j;
      out[j] = (float)(((double)p.known_o[at] * known + scale * (double)once[j]) / denominator);
      const double o = out[j], centre = p.centre[at];
      cross += centre * (double)twice[j];
      centre2 += centre * centre;
      apart2 += (o - centre) * (o - centre);
      size2 += o * o;
    }
    lse = (float)(against + log(denominator));
    cross = warp_sum(cross), centre2 = warp_sum(centre2), apart2 = warp_sum(apart2), size2 = warp_sum(size2);
    const double weight = exp((double)p.reach[head(g) * 2] - against), norm = p.reach[head(g) * 2 + 1];
    const double centre_norm = sqrt(centre2);
    const double y2 = e2 / b, x2 = fmax((e2v2 - 2. * cross + centre2 * e2) / b, 0.);
    auto error = [&](double mean2, double most) {
      const double spread = sqrt(mean2) + most * sqrt(2. * log_bounds / b);
      return n * (spread * sqrt(2. * log_bounds / b) + 4. / 3. * most * log_bounds / b);
    };
    const double x = error(x2, weight * (norm + centre_norm)), y = error(y2, weight);
    const double bound = (x + sqrt(apart2) * y) / (denominator - y);
    return y < denominator && bound <= p.epsilon / (1. + p.epsilon) * sqrt(size2);
  }

  // What the list comes to. `drawn` 0: everything is read, by the next launch.
  __device__ __forceinline__ void settle(uint32_t state, uint32_t len, uint32_t drawn, uint32_t rest) {
    const int g = rank + kLookCluster * warp;
    if (warp < 2 && g < group) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) p.out[head(g) * D + lane + 32 * j] = drawn > 0 ? out[j] : 0.f;
      if (lane == 0) p.lse[head(g)] = drawn > 0 ? lse : -INFINITY;
    }
    if (rank > 0 || tid > 0) return;
    WorkList work{};
    work.end[0] = drawn > 0 ? 0 : len;
    work.len = len;
    p.work[list] = work;
    p.state[list] = state;
    p.counts[list] = drawn;
    if (drawn > 0) p.residual[list] = rest;
  }

  template <class Cluster>
  __device__ __forceinline__ void run(Cluster& cluster) {
    const uint32_t len = p.lists[list].len, state = p.state[list], rest = p.rest[list];
    // All of the cluster has read the state before it is written.
    cluster.sync();
    if (state != kToLookAt) return settle(state, len, 0, rest);
    start();
    const double limit = dense_limit(p, len);
    uint32_t wanted = max(p.pilot_tokens, 2), done = 0;
    for (int look = 0; look < p.looks; ++look, wanted *= 2) {
      wanted = min(wanted, rest);
      if (wanted == done || (double)(wanted + (len - rest)) >= limit) break;
      add(done, wanted);
      done = wanted;
      show();
      cluster.sync();
      const int judged = rank + kLookCluster * warp;
      if (warp < 2 && judged < group) {
        const uint32_t sure = is_sure(cluster, judged, done, rest);
        if (lane < kLookCluster) *cluster.map_shared_rank(&sh.sure[judged], lane) = sure;
      }
      cluster.sync();
      bool all = true;
      for (int g = 0; g < group; ++g) all &= sh.sure[g] != 0;
      if (all) return settle(TAPER_SAMPLED, len, done, rest);
    }
    settle(TAPER_DENSE, len, 0, rest);
  }
};

template <class T, int D>
__global__ void __cluster_dims__(kLookCluster, 1, 1) __launch_bounds__(kLookThreads)
    look_kernel(const CertainParams p) {
  __shared__ LookShared<T, D> sh;
  auto cluster = cooperative_groups::this_cluster();
  wait_for_predecessor();
  launch_dependents();
  const int list = blockIdx.x / kLookCluster, rank = blockIdx.x % kLookCluster, tid = threadIdx.x;
  Look<T, D> of{p, sh, list, rank, list / p.kv_heads, list % p.kv_heads, p.q_heads / p.kv_heads, tid, tid & 31,
                tid >> 5};
  of.run(cluster);
}

}  // namespace taper
