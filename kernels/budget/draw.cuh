// Drawing without replacement, shared out over a team: the points of the stream's
// permutation in order, less the keys that the list reads already. The first b of them
// are the sample of size b.
//
// Four warps of a thread block do nothing else, so that drawing goes on beside the exact part.
// A turn is a run of points for every drawing warp of the team, which keeps those that pass in
// a segment of its own; once all have told how many they kept, a draw's number is looked up in
// those counts instead of being packed. The last turn takes whatever is left of the permutation.
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

// The list's i-th draw; i is below what was drawn.
template <class Shared>
__device__ __forceinline__ uint32_t drawn_id(const SampledParams& p, const Shared& sh, uint32_t i) {
  const Outline& o = sh.outline;
  int turn = 0;
  while (turn + 1 < kDrawTurns && i >= sh.drawn[turn]) ++turn;
  uint32_t lo = 0, hi = o.team * kDrawWarps;  // before[lo] <= i, and i < before[hi]
  while (hi - lo > 1) {
    const uint32_t mid = (lo + hi) / 2;
    if (sh.before[turn][mid] <= i) lo = mid;
    else hi = mid;
  }
  return __ldcg(p.draws + o.slot * p.draw_stride + sh.turn_at[turn] + lo * sh.turn_points[turn] +
                (i - sh.before[turn][lo]));
}

// Waits for draws; all threads that ask keep their own count of turns.
template <class Shared>
struct Draws {
  Shared& sh;
  uint32_t turns = 0;
  __device__ __forceinline__ uint32_t next() {
    mbar_wait(smem_u32(&sh.drew[turns]), 0);
    return sh.drawn[turns++];
  }
  // By a whole warp: how many there are by now, the first turn's at least.
  __device__ __forceinline__ uint32_t so_far() {
    if (turns == 0) next();
    while (turns < kDrawTurns && __any_sync(~0u, mbar_done(smem_u32(&sh.drew[turns]), 0))) next();
    return sh.drawn[turns - 1];
  }
  // How many there are once there are `until`, or all.
  __device__ __forceinline__ uint32_t await(uint32_t until) {
    while (turns == 0 || (sh.drawn[turns - 1] < until && turns < kDrawTurns)) next();
    return sh.drawn[turns - 1];
  }
};

template <class Shared>
struct Drawer {
  const SampledParams& p;
  Shared& sh;
  const Outline& o;
  Gate& gate;
  const int tid, warp, lane;  // of the drawing warps
  uint32_t turn = 0, drawn = 0;
  // What the list reads by blocks or by pages of 2^shift tokens: their ids, and tokens that the bitmap covers. Of a list that
  // reads tokens alone every so many-th id, `apart`, stands where the bitmap does.
  const uint32_t* ids = nullptr;
  uint32_t count = 0, shift = 6, covered = 0, apart = 0;

  __device__ __forceinline__ void mark() {
    const WorkList& w = o.w;
    if (p.d.token_shift == 0 && w.block_count == 0 && w.token_count > 0) {
      ids = p.d.token_ids + w.token_first, count = w.token_count, apart = (count + kMarkWords - 1) / kMarkWords;
#pragma unroll 8
      for (uint32_t i = tid; i < kMarkWords; i += kDrawThreads) sh.chosen[i] = i * apart < count ? ids[i * apart] : ~0u;
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
    for (int i = tid; i < kMarkWords; i += kDrawThreads) sh.chosen[i] = 0;
    gate.meet();
#pragma unroll 4
    for (uint32_t i = tid; i < count; i += kDrawThreads) {
      const uint32_t b = ids[i];
      if (b < kMarkWords * 32) atomicOr(&sh.chosen[b / 32], 1u << (b % 32));
    }
    gate.meet();
  }
  // By `apart`: tokens that the list reads do not pass. All are looked for side by side.
  template <int K>
  __device__ __forceinline__ void leave_out(const uint32_t (&x)[K], bool (&pass)[K]) const {
    uint32_t at[K] = {}, end[K];
#pragma unroll
    for (uint32_t d = kMarkWords / 2; d; d /= 2)
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (sh.chosen[at[k] + d] <= x[k]) at[k] += d;
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] *= apart, end[k] = min(at[k] + apart, count);
    for (uint32_t n = apart; n > 4; n = (n + 1) / 2)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const uint32_t mid = at[k] + (end[k] - at[k]) / 2;
        (ids[mid] <= x[k] ? at[k] : end[k]) = mid;
      }
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) pass[k] &= ids[min(at[k] + i, count - 1)] != x[k];
  }
  // What the bitmap does not hold.
  __device__ __forceinline__ bool is_listed(uint32_t t) const {
    const WorkList& w = o.w;
    return (t >= covered && holds(ids, count, t >> shift)) ||
           (p.d.token_shift == 0 && holds(p.d.token_ids + w.token_first, w.token_count, t));
  }
  // This warp's points of the permutation, from `first` on: those that pass go to the list's
  // scratch where they fall. Returns how many passed.
  __device__ __forceinline__ uint32_t walk(uint32_t first, uint32_t points) const {
    const Permutation permutation(o.w.len, Stream{o.seed, (uint32_t)p.layer, o.head, o.position});
    const uint32_t domain = permutation.domain(), len = o.w.len;
    const uint32_t begin0 = o.w.begin[0], end0 = o.w.end[0], begin1 = o.w.begin[1], end1 = o.w.end[1];
    const bool searches = (p.d.token_shift == 0 && o.w.token_count > 0) || (count > 0 && len > covered);
    uint32_t* to = p.draws + o.slot * p.draw_stride + first;
    uint32_t kept = 0;
    // Two at a time without branches. More would take longer in a cold launch: these
    // instructions are fetched behind the first tiles.
    constexpr int kAhead = 2;
    const uint32_t last = first < domain ? min(points, domain - first) : 0;
#pragma unroll 1
    for (uint32_t j = lane; j < last + lane; j += 32 * kAhead) {
      uint32_t x[kAhead];
      bool pass[kAhead];
      permutation.points(first + j, 32, x);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const uint32_t i = j + 32 * k;
        const uint32_t bits = sh.chosen[min(x[k] >> (shift + 5), kMarkWords - 1)];
        const bool block = x[k] < covered && (bits >> (x[k] >> shift & 31) & 1);
        pass[k] = (i < last) & (x[k] < len) & !block & !((x[k] >= begin0) & (x[k] < end0)) &
                  !((x[k] >= begin1) & (x[k] < end1));
      }
      if (apart > 0) {
        leave_out(x, pass);
      } else if (searches) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k)
          if (pass[k] && is_listed(x[k])) pass[k] = false;
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const uint32_t all = __ballot_sync(~0u, pass[k]);
        if (pass[k]) to[kept + __popc(all & ((1u << lane) - 1))] = x[k];
        kept += __popc(all);
      }
    }
    __syncwarp();
    return kept;
  }
  // Writes down where each segment's draws begin; thread t < segments brings segment t's count.
  // Tells the producers.
  __device__ __forceinline__ void number(uint32_t mine, uint32_t segments) {
    uint32_t upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t x = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += x;
    }
    if (lane == 31) sh.warp_kept[warp] = upto;
    gate.meet();
    uint32_t sum = drawn, all = drawn;
#pragma unroll
    for (int w = 0; w < kDrawWarps; ++w) {
      const uint32_t x = sh.warp_kept[w];
      sum += w < warp ? x : 0;
      all += x;
    }
    if (tid < segments) sh.before[turn][tid] = sum + upto - mine;
    if (tid == 0) sh.drawn[turn] = all;
    gate.meet();
    drawn = all;
    mbar_arrive(smem_u32(&sh.drew[turn]));
    ++turn;
  }

  __device__ __forceinline__ uint32_t* counts() const {
    return p.draw_counts + ((int64_t)o.slot * kDrawTurns + turn) * (o.room * kDrawWarps);
  }
  // Takes the next turn, until about `aim` are drawn.
  __device__ __forceinline__ void take(uint32_t aim) {
    const uint32_t n = Permutation(o.w.len).domain(), segments = o.team * kDrawWarps;
    const uint32_t at = turn ? sh.turn_at[turn - 1] + sh.turn_points[turn - 1] * segments : 0;
    uint32_t points = n > at ? (n - at + segments - 1) / segments : 0;  // a warp's
    if (turn + 1 < kDrawTurns) {
      const float want = aim - drawn, spare = turn ? 0.f : 4.f * sqrtf(want) + 8.f;
      points = min(points, (uint32_t)((want + spare) * n / o.residual / segments) + 1);
    }
    points = (points + 31) / 32 * 32;
    const uint32_t segment = o.rank * kDrawWarps + warp;
    const uint32_t kept = walk(at + segment * points, points);
    if (tid == 0) sh.turn_at[turn] = at, sh.turn_points[turn] = points;
    // A count and one more in place of a flag; one thread waits for a segment's.
    uint32_t* counts = this->counts();
    uint32_t mine = 0;
    if (lane == 0) store_release(counts + segment, kept + 1);
    if (tid < segments) {
      while (mine == 0) mine = load_acquire(counts + tid);
      --mine;
    }
    __syncwarp();
    number(mine, segments);
    // Who is the last of the team to know them clears them: no one else will read them.
    if (warp != 0) return;
    uint32_t* known = p.sync + (1 + o.slot) * kTeamLine + kKnownWord + turn - 1;
    uint32_t before = 0;
    if (lane == 0) before = atomicAdd(known, 1u);
    if (__shfl_sync(~0u, before, 0) != o.team - 1) return;
    for (uint32_t i = lane; i < segments; i += 32) counts[i] = 0;
    if (lane == 0) *known = 0;
  }

  // Once the first turn is numbered: where the list's first few draws lie, for the judge, which has no time to look them up
  // between tiles.
  __device__ __forceinline__ void place() {
    const uint32_t few = min(drawn, (uint32_t)kCovarianceKeys);
    if (tid == 0) sh.few_placed = few;
    if (tid < few) {
      const uint32_t id = drawn_id(p, sh, tid);
      sh.few_rows[tid] = o.near ? tid : (o.table[id / kBlock] * p.d.kv_heads + o.kv_head) * kBlock + id % kBlock;
    }
    mbar_arrive(smem_u32(&sh.placed));
  }

  __device__ __forceinline__ void run() {
    if (!o.dense) {
      // What the team will say to itself, before the tiles' bytes queue up in front of it.
      const uint32_t told = kDrawTurns * o.room * kDrawWarps, sums = o.room * (p.d.q_heads / p.d.list_heads) * 4;
      if (tid * 32 < told) prefetch_l2(p.draw_counts + o.slot * told + tid * 32);
      if (tid * 16 < sums) prefetch_l2(p.sums + (int64_t)o.slot * sums + tid * 16);
      mark();
      uint32_t until = o.pilot, look = 0;
      bool far = o.aim == o.far;
#pragma unroll 1
      for (;;) {
        uint32_t want = 0;
        if (turn == 0) want = until;
        else if (look == 0 && turn == 1 && drawn < o.aim) want = o.aim;
        else if (look == 1 && !far && drawn < max(o.far, until)) want = max(o.far, until), far = true;
        else if (drawn < until) want = min(2 * until, o.residual);
        if (want > 0 && turn < kDrawTurns) {
          take(want);
          if (turn == 1) place();
          continue;
        }
        mbar_wait(smem_u32(&sh.decided), look++ & 1);
        const Decision d = sh.decision;
        mbar_arrive(smem_u32(&sh.heeded));
        if (d.state != 0) break;
        until = d.count;
      }
    }
  }
};

}  // namespace taper
