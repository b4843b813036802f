// Which points of the permutation a list's sample has: those whose tokens the list does not read.
//
// Four warps of a thread block do nothing else, so that this goes on beside the exact part. Each rank sifts its own tiles; how
// many points passed its team is told with what they came to.
#pragma once

#include "parts.cuh"

namespace taper {

static __device__ __noinline__ bool holds(const uint32_t* ids, uint32_t count, uint32_t x) {
  uint32_t lo = 0, hi = count;
  while (lo < hi) {
    const uint32_t mid = (lo + hi) / 2;
    if (ids[mid] < x) lo = mid + 1;
    else hi = mid;
  }
  return lo < count && ids[lo] == x;
}

template <int D, class Shared>
struct Sieve {
  const SampledParams& p;
  Shared& sh;
  const Outline& o;
  Gate& gate;
  const uint32_t values;  // of the sample's first few keys, in shared memory
  const int tid, warp, lane;  // of the sifting warps
  const Permutation permutation;
  uint32_t tiles = 0;  // sifted so far
  // What the list reads by blocks or by pages of 2^shift tokens: their ids, and tokens that the bitmap covers. Of a list that
  // reads tokens alone every so many-th id, `apart`, stands where the bitmap does.
  const uint32_t* ids = nullptr;
  uint32_t count = 0, shift = 6, covered = 0, apart = 0;

  __device__ __forceinline__ void mark() {
    const WorkList& w = o.w;
    if (p.d.token_shift == 0 && w.block_count == 0 && w.token_count > 0) {
      ids = p.d.token_ids + w.token_first, count = w.token_count, apart = (count + kMarkWords - 1) / kMarkWords;
#pragma unroll 8
      for (uint32_t i = tid; i < kMarkWords; i += kSieveThreads) sh.chosen[i] = i * apart < count ? ids[i * apart] : ~0u;
      gate.meet();
      return;
    }
    if (p.d.token_shift > 0) {
      shift = p.d.token_shift;
      const uint32_t first = w.token_first >> shift, front = w.token_first - (first << shift);
      ids = p.d.token_ids + first, count = (front + w.token_count + (1u << shift) - 1) >> shift;
    } else {
      ids = p.d.block_ids + w.block_first, count = w.block_count;
    }
    covered = kMarkWords * 32 << shift;
    for (int i = tid; i < kMarkWords; i += kSieveThreads) sh.chosen[i] = 0;
    gate.meet();
#pragma unroll 4
    for (uint32_t i = tid; i < count; i += kSieveThreads) {
      const uint32_t b = ids[i];
      if (b < kMarkWords * 32) atomicOr(&sh.chosen[b / 32], 1u << (b % 32));
    }
    gate.meet();
  }
  // By `apart`: whether the list reads token x. The last few ids are loaded side by side.
  static constexpr uint32_t kBeside = 8;
  __device__ __forceinline__ bool is_among(uint32_t x) const {
    uint32_t at = 0;
#pragma unroll
    for (uint32_t d = kMarkWords / 2; d; d /= 2)
      if (sh.chosen[at + d] <= x) at += d;
    at *= apart;
    uint32_t end = min(at + apart, count);
    for (uint32_t n = apart; n > kBeside; n = (n + 1) / 2) {
      const uint32_t mid = at + (end - at) / 2;
      (ids[mid] <= x ? at : end) = mid;
    }
    bool is = false;
#pragma unroll
    for (uint32_t i = 0; i < kBeside; ++i) is |= ids[min(at + i, count - 1)] == x;
    return is;
  }
  __device__ __forceinline__ bool passes(uint32_t x) const {
    const WorkList& w = o.w;
    const bool ranged = ((x >= w.begin[0]) & (x < w.end[0])) | ((x >= w.begin[1]) & (x < w.end[1]));
    if (apart > 0) return !ranged & !is_among(x);
    const uint32_t bits = sh.chosen[min(x >> (shift + 5), kMarkWords - 1)];
    if (ranged || (x < covered && (bits >> (x >> shift & 31) & 1))) return false;
    return !(x >= covered && holds(ids, count, x >> shift)) &&
           !(p.d.token_shift == 0 && w.token_count > 0 && holds(p.d.token_ids + w.token_first, w.token_count, x));
  }

  // The thread's token of the rank's tile s, or of the one after it: a tile is for two warps.
  uint32_t token = 0, token_at = ~0u;
  __device__ __forceinline__ void seek(uint32_t s) {
    if (s != token_at) token_at = s, token = permutation.point((s + warp / 2 * o.team) * kBlock + warp % 2 * 32 + lane);
  }
  // The rank's tiles of a run, two at a time.
  __device__ __forceinline__ void sift(const Run& g) {
    const uint32_t n = g.tiles();
#pragma unroll 1
    for (uint32_t i = warp / 2; i < n; i += 2) {
      seek(g.first() + (i - warp / 2) * o.team);
      const uint32_t word = __ballot_sync(~0u, passes(token)), at = tiles + i;
      mbar_wait(smem_u32(&sh.used[at % kSieved]), (at / kSieved & 1) ^ 1);
      if (lane == 0) {
        sh.passes[at % kSieved][warp % 2] = word;
        mbar_arrive(smem_u32(&sh.sieved[at % kSieved]));
      }
    }
    tiles += n;
  }

  // The sample's first few keys, a point a thread, and their values: for the judge, which has no time for it between tiles.
  __device__ __forceinline__ void place() {
    const uint32_t x = permutation.point(tid);
    const bool pass = tid < o.w.len && passes(x);
    const uint32_t row = (o.table[x / kBlock] * p.d.kv_heads + o.kv_head) * kBlock + x % kBlock;
    const uint32_t all = __ballot_sync(~0u, pass);
    if (lane == 0) sh.few_kept[warp] = __popc(all);
    gate.meet();
    uint32_t at = __popc(all & ((1u << lane) - 1)), few = 0;
#pragma unroll
    for (int w = 0; w < kSieveThreads / 32; ++w) {
      at += w < warp ? sh.few_kept[w] : 0;
      few += sh.few_kept[w];
    }
    few = min(few, (uint32_t)kCovarianceKeys);
    auto put = [&](uint32_t to) { sh.few_points[to] = tid, sh.few_rows[to] = row; };
    if (pass && at < few) put(at);
    // Whoever looks beyond them finds a point that may be asked for.
    if (tid >= few && tid < kCovarianceKeys) put(tid);
    if (tid == 0) sh.few_placed = few;
    gate.meet();
#pragma unroll 1
    for (uint32_t i = tid; i < few * (D / 8); i += kSieveThreads) {
      const uint32_t key = i / (D / 8), chunk = i % (D / 8);
      cp_async16(values + chunk / 8 * kFewPanel + swizzled(key, chunk % 8),
                 static_cast<const uint16_t*>(p.d.v) + (int64_t)sh.few_rows[key] * D + chunk * 8);
    }
    cp_async_arrive(smem_u32(&sh.placed));
  }

  __device__ __forceinline__ void run() {
    if (o.dense) return;
    uint32_t* counter = p.sync + (1 + o.slot) * kTeamLine;
    seek(o.rank);
    mark();
    Decision d{0, o.points};
#pragma unroll 1
    for (uint32_t look = 0, from = 0; d.state == 0; ++look) {
      sift(Run(o, from, d.count));
      if (look == 0 && p.rule == kChi2) place();
      from = d.count;
      seek(Run(o, from, from).first());
      // One of them tells the team what the consumers have read, and waits for the telling in their place.
      uint32_t before = 0;
      if (warp == 0) {
        mbar_wait(smem_u32(&sh.read), look & 1);
        if (lane == 0 && o.team > 1) before = fetch_add_release(counter + kHeardWord, 1);
      }
      mbar_wait(smem_u32(&sh.decided), look & 1);
      d = sh.decision;
      mbar_arrive(smem_u32(&sh.heeded));
      // Who is the last to have read the last look clears what the team met by. That of a list which is then read whole is waited
      // for until the end.
      if (tid == 0 && d.state == kSampled && before == (look + 1) * o.team - 1)
        *reinterpret_cast<uint64_t*>(counter + kMetWord) = 0, counter[kHeardWord] = 0;
    }
    cp_async_wait_all();
  }
};

}  // namespace taper
