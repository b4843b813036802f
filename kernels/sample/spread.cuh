// Which values stand for all of a head's, from scores that are there already, of all tokens or of those
// of a list: draws over all keys at once, or in every tile, as many as its mass asks for by largest
// remainder or as many as in any other. Counts, targets and their order are those of the CPU, in double
// precision.
//
// Source: S2ANTA's `prop` with the largest remainder, and its `flash`.
#pragma once

#include "../common/launch.cuh"
#include "../common/philox.cuh"
#include "../common/ptx.cuh"
#include "../common/scan.cuh"

namespace taper {

using SpreadParams = TaperSpreadParams;

constexpr int kSpreadThreads = 256;
constexpr uint32_t kSpreadTargets = 0x53320000u, kSpreadTiles = 0x53330000u;  // words of a head's draws
constexpr size_t kSpreadShared = 224 * 1024;  // bytes of a list's tiles, beyond which they do not stay in shared memory

// Bytes that the masses and the draws of so many tiles take.
__host__ __device__ inline size_t spread_bytes(int64_t tiles) {
  return (size_t)(tiles + 1) * (sizeof(double) + sizeof(uint32_t));
}
// Words of 8 bytes of them that lie in device memory.
__host__ __device__ inline int64_t spread_room(int64_t tiles) {
  return spread_bytes(tiles) <= kSpreadShared ? 0 : (int64_t)((spread_bytes(tiles) + 7) / 8);
}

struct SpreadShared {
  double warp[kSpreadThreads / 32];
  uint32_t count[kSpreadThreads / 32];
};

// The sum over the block, and what the threads before this one have of it.
template <class S>
__device__ __forceinline__ S spread_before(S x, S* warps, S& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const S sum = warp_upto(x);
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  S before = sum - x;
  total = 0;
#pragma unroll 1
  for (int w = 0; w < kSpreadThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before;
}

struct Spreader {
  const SpreadParams& p;
  SpreadShared& sh;
  const Stream stream;
  const float *scores, *tile_max, *tile_sum;
  const uint32_t len, tiles;
  double* mass;     // [tiles + 1]: of the tiles before each
  uint32_t* first;  // [tiles + 1]: draws before each
  float top;
  double total;

  __device__ __forceinline__ uint32_t chunk() const { return (tiles + kSpreadThreads - 1) / kSpreadThreads; }
  __device__ __forceinline__ uint32_t begin() const { return min(threadIdx.x * chunk(), tiles); }
  __device__ __forceinline__ uint32_t end() const { return min(begin() + chunk(), tiles); }
  __device__ __forceinline__ double uniform(uint32_t draw) const {
    return (double)(stream.words(draw).x >> 8) * (1. / (1 << 24));
  }
  __device__ __forceinline__ float weight(uint32_t token) const {
    return exp2_fast((scores[token] - top) * kLog2e);
  }

  // The mass of 64 keys.
  __device__ __forceinline__ double part(uint32_t i) const {
    return (double)tile_sum[i] * exp2_fast((tile_max[i] - top) * kLog2e);
  }
  // Whether all 64 keys from key `from` on are a part that ends by `to`.
  __device__ __forceinline__ bool parted(uint32_t from, uint32_t to) const {
    return from % kBlock == 0 && min(from + kBlock, len) <= to;
  }

  __device__ __forceinline__ void sum_up() {
    const uint32_t parts = (len + kBlock - 1) / kBlock;
    float most = -INFINITY;
    for (uint32_t i = threadIdx.x; i < parts; i += kSpreadThreads) most = fmaxf(most, tile_max[i]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    if ((threadIdx.x & 31) == 0) sh.warp[threadIdx.x >> 5] = most;
    __syncthreads();
    top = -INFINITY;
    for (int w = 0; w < kSpreadThreads / 32; ++w) top = fmaxf(top, (float)sh.warp[w]);
    double own = 0;
    for (uint32_t t = begin(); t < end(); ++t) {
      const uint32_t to = min((t + 1) * p.tile_tokens, len);
      double m = 0;
      for (uint32_t i = t * p.tile_tokens; i < to;) {
        const bool whole = parted(i, to);
        m += whole ? part(i / kBlock) : (double)weight(i);
        i += whole ? kBlock : 1;
      }
      mass[t + 1] = m;
      own += m;
    }
    double before = spread_before(own, sh.warp, total);
    for (uint32_t t = begin(); t < end(); ++t) mass[t + 1] = before += mass[t + 1];
    if (threadIdx.x == 0) mass[0] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ double of(uint32_t t) const { return mass[t + 1] - mass[t]; }

  // Draws of each tile, whole numbers that add up to `samples`; ties go to the earlier tile.
  __device__ __forceinline__ void largest_remainder() {
    const double scale = p.samples / total;
    uint32_t own = 0, sum;
    for (uint32_t t = begin(); t < end(); ++t) own += (uint32_t)floor(of(t) * scale);
    spread_before(own, sh.count, sum);
    const uint32_t left = (uint32_t)p.samples > sum ? p.samples - sum : 0;
    auto rest = [&](uint32_t t) {
      const double share = of(t) * scale;
      return (uint64_t)__double_as_longlong(share - floor(share));
    };
    // The largest remainder that `left` tiles reach, bit by bit: of numbers that are not negative,
    // bits order as the numbers do.
    uint64_t least = 0;
#pragma unroll 1
    for (int bit = 61; bit >= 0; --bit) {
      const uint64_t tried = least | 1ull << bit;
      uint32_t reach = 0, all;
      for (uint32_t t = begin(); t < end(); ++t) reach += rest(t) >= tried;
      spread_before(reach, sh.count, all);
      if (all >= left) least = tried;
    }
    uint32_t above = 0, equal = 0, over, same;
    for (uint32_t t = begin(); t < end(); ++t) above += rest(t) > least, equal += rest(t) == least;
    spread_before(above, sh.count, over);
    uint32_t rank = spread_before(equal, sh.count, same);
    own = 0;
    for (uint32_t t = begin(); t < end(); ++t) {
      uint32_t n = (uint32_t)floor(of(t) * scale);
      if (rest(t) > least) n += left > 0;
      else if (rest(t) == least && rank++ < left - min(left, over)) ++n;
      first[t + 1] = n;
      own += n;
    }
    uint32_t before = spread_before(own, sh.count, sum);
    for (uint32_t t = begin(); t < end(); ++t) first[t + 1] = before += first[t + 1];
    if (threadIdx.x == 0) first[0] = 0;
    __syncthreads();
  }

  // The first of `n` ascending numbers that is greater than x, or the last.
  template <class S>
  __device__ __forceinline__ uint32_t find(const S* of, S x) const {
    uint32_t lo = 0, hi = tiles - 1;
    while (lo < hi) {
      const uint32_t mid = (lo + hi) / 2;
      if (of[mid + 1] > x) hi = mid;
      else lo = mid + 1;
    }
    return lo;
  }
  // The first key of a tile whose running mass exceeds the target; what rounding would lose goes to the last
  // that has any mass.
  __device__ __forceinline__ uint32_t hit(uint32_t t, double target) const {
    const uint32_t to = min((t + 1) * p.tile_tokens, len);
    uint32_t from = t * p.tile_tokens, end = from;  // the run of keys that it is in: 64, or one
    double running = 0;
    bool beyond = true;
    for (uint32_t i = from; i < to && beyond;) {
      const bool whole = parted(i, to);
      const double m = whole ? part(i / kBlock) : (double)weight(i);
      const uint32_t next = min(i + (whole ? kBlock : 1), to);
      if (m > 0.) {
        from = i, end = next;
        beyond = target >= running + m;
        if (beyond) running += m;
      }
      i = next;
    }
    if (beyond) target = INFINITY;
    uint32_t last = from;
#pragma unroll 8
    for (uint32_t i = from; i < end; ++i) {
      const float w = weight(i);
      if (w > 0.f) {
        running += w;
        last = i;
        if (target < running) break;
      }
    }
    return last;
  }

  // Draw k: its token and its weight in the mean.
  __device__ __forceinline__ uint32_t draw(uint32_t k, uint32_t each, double& share) const {
    share = 1. / p.samples;
    if (p.spread < TAPER_PER_TILE) {
      double place = p.spread == TAPER_SYSTEMATIC ? k + uniform(kSpreadTargets) : uniform(kSpreadTargets + k);
      if (p.spread == TAPER_STRATIFIED) place += k;
      if (p.spread != TAPER_INDEPENDENT) place /= p.samples;
      const double target = place * total;
      const uint32_t t = find(mass, target);
      return hit(t, target - mass[t]);
    }
    const bool fixed = p.spread == TAPER_PER_TILE;
    const uint32_t t = fixed ? k / each : find(first, k);
    const uint32_t own = fixed ? each : first[t + 1] - first[t], at = k - (fixed ? t * each : first[t]);
    if (fixed) share = of(t) / total / each;
    return hit(t, (at + uniform(kSpreadTiles + t)) / own * of(t));
  }
};

__global__ void __launch_bounds__(kSpreadThreads) spread_kernel(const SpreadParams p) {
  extern __shared__ double shared[];
  __shared__ SpreadShared sh;
  wait_for_predecessor();
  launch_dependents();
  const uint32_t list = blockIdx.x, row = list / p.q_heads;
  // The list of keys that the head's group shares.
  const uint32_t of = p.list_heads > 0 ? row * p.list_heads + list % p.q_heads / (p.q_heads / p.list_heads) : 0;
  const uint32_t len = p.counts ? p.counts[of] : p.lens[row];
  const uint32_t* tokens = p.tokens ? p.tokens + (int64_t)of * p.stride : nullptr;
  if (len == 0) {
    if (threadIdx.x == 0) p.work[list] = TaperWorkList{};
    return;
  }
  double* room = p.room ? static_cast<double*>(p.room) + list * spread_room(p.most_tiles) : shared;
  Spreader s{p, sh, {p.seeds[row], (uint32_t)p.layer, list % p.q_heads, p.positions[row]},
             p.scores + (int64_t)list * p.stride, p.tile_max + (int64_t)list * p.tile_stride,
             p.tile_sum + (int64_t)list * p.tile_stride, len, (len + p.tile_tokens - 1) / p.tile_tokens, room,
             reinterpret_cast<uint32_t*>(room + p.most_tiles + 1), 0.f, 0.};
  s.sum_up();
  auto token = [&](uint32_t key) { return tokens ? tokens[key] : key; };
  uint32_t* ids = p.ids + (int64_t)list * p.capacity;
  float* ln_weights = p.ln_weights + (int64_t)list * p.capacity;
  const uint32_t each = max((uint32_t)p.samples / s.tiles, 1u);
  uint32_t n = p.spread == TAPER_PER_TILE ? each * s.tiles : p.samples;
  if (len <= (uint32_t)p.samples) {
    // No fewer values than keys: each has its probability.
    n = len;
    const float lse = s.top + (float)log(s.total);
    for (uint32_t i = threadIdx.x; i < len; i += kSpreadThreads) ids[i] = token(i), ln_weights[i] = s.scores[i] - lse;
  } else {
    // Masses that are no numbers give weights that are none, for the error to show.
    const bool finite = s.total > 0. && s.total < INFINITY;
    if (finite && p.spread == TAPER_LARGEST_REMAINDER) s.largest_remainder();
#pragma unroll 1
    for (uint32_t k = threadIdx.x; k < n; k += kSpreadThreads) {
      double share = NAN;
      ids[k] = token(finite ? s.draw(k, each, share) : k % len);
      ln_weights[k] = (float)log(share);
    }
  }
  if (threadIdx.x == 0) {
    TaperWorkList w{};
    w.token_first = list * p.capacity, w.token_count = n, w.len = p.lens[row];
    p.work[list] = w;
  }
}

}  // namespace taper
