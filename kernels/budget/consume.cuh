// The consumers of a sampled decode step, and its kernel.
#pragma once

#include "feed.cuh"
#include "judge.cuh"

namespace taper {

template <class T, int D, int N>
struct SampledConsumer : TileSums<T, D, N, kSampledStages<D, N>> {
  using Sums = TileSums<T, D, N, kSampledStages<D, N>>;
  using L = typename Sums::L;
  using Sums::C, Sums::group, Sums::l, Sums::lane, Sums::limit, Sums::wg;
  const SampledParams& p;
  SampledShared<D, N>& st;
  const Outline& o;
  const uint32_t q_s;
  Gate& gate;
  Judge<T, D, N> judge;

  // The steps in their order; a loop over them keeps one copy of the code of a tile.
  enum Phase { kExact, kSample, kAll };

  __device__ __forceinline__ void run() {
    const int tid = judge.tid;
    Decision decision{kDense, 0};
    Phase phase = o.dense ? kAll : kExact;
    uint32_t pos = 0, parts = 0, looks = 0, noisy = 0, from = 0, to = o.pilot;
    typename Judge<T, D, N>::Ahead ahead;
    ahead.first = 0;
    this->clear();
#pragma unroll
    for (int c = 0; c < C; ++c) limit[c] = ~0u, this->ln_weight[c] = 0.f;
    mbar_wait(smem_u32(&st.q_full[0]), 0);
#pragma unroll 1
    for (;;) {
      const bool judging = phase == kSample;
      const uint32_t last = judging ? to : 0;
      uint32_t n;
      if (judging) {
        n = Run(o, from, to).tiles();
        judge.look_up(to, ahead);
      } else {
        n = o.share_of(phase == kExact ? list_tiles(o.w) : range_tiles(0, o.w.len), o.rank);
      }
      float* scores = p.scores + (int64_t)o.slot * p.capacity * group;
      // Each warpgroup takes every other tile.
#pragma unroll 1
      for (uint32_t i = (wg ^ pos) & 1; i < n; i += 2) {
        const uint32_t stage = (pos + i) % L::kStages;
        mbar_wait(smem_u32(&st.full[stage]), (pos + i) / L::kStages & 1);
        const uint32_t sampled = st.meta[stage].sampled;
        this->template tile<true>(stage, q_s, [=](int row, int head, float score) {
          const uint32_t draw = sampled + row;
          if (draw >= from && draw < last && head < group) scores[(int64_t)draw * group + head] = score;
        });
        if (judging && o.near) bring(stage, sampled);
        __syncwarp();
        if (lane == 0) mbar_arrive(smem_u32(&st.empty[stage]));
      }
      pos += n;
      if (judging && o.near) mbar_arrive(smem_u32(&st.brought));
      // A sample's sums go on to be the larger sample's.
      float keep[C];
#pragma unroll
      for (int c = 0; c < C; ++c) keep[c] = l[c];
      const int64_t at = judge.part(phase != kExact, o.rank, 0);
      this->store(p.d.part_o + at * D, p.d.part_lse + at, parts++);
#pragma unroll
      for (int c = 0; c < C; ++c) l[c] = keep[c];
      if (phase == kExact) {
        // A single row's products are one launch with a thread block on each multiprocessor, which may now come as these leave.
        // Those of more rows would get in where the first ones end, two at a time, and leave the last ones' multiprocessors empty.
        if (p.d.rows == 1 && tid == 0) launch_dependents();
        this->clear();
        phase = kSample;
        continue;
      }
      // Either the team meets to judge, or its last block merges. A scout that others have caught up with is done.
      if (o.scout && caught_up()) {
        if (tid == 0) {
          st.decision = {kSampled, to};
          mbar_arrive(smem_u32(&st.decided));
        }
        return;
      }
      if (judging) {
        judge.tell();
        if (!o.near) judge.prepare(to, pos, ahead);
        judge.hear();
        if (o.near) judge.prepare(to, pos, ahead);
        if (judge.takes_few(to, pos, ahead)) judge.fetch_scores(ahead.few, judge.few_of(to));
      } else if (!leave()) {
        return;
      }
      judge.combine(judging ? over((float)o.residual, (float)to) : 1.f, judging);
      if (judging) {
        decision = judge.decide(to, looks, noisy, ahead, pos);
        if (o.scout) decision = {kSampled, to};
        if (tid == 0) {
          if (looks > 0) mbar_wait(smem_u32(&st.heeded), (looks - 1) & 1);
          st.decision = decision;
          mbar_arrive(smem_u32(&st.decided));  // Tells producers and drawing warps.
        }
        ++looks;
        if (decision.state == 0) {
          from = to, to = decision.count;
          continue;
        }
        if (decision.state == kDense) {
          this->clear();
          phase = kAll;
          continue;
        }
      }
      // Of a sample that is large enough every block has the output, and no block needs another.
      if ((!judging || o.rank == 0) && !o.scout) write(decision);
      if (!judging || judge.was_last()) clean();
      return;
    }
  }

  // Leaves a tile's values where looks find them: those of this run's draws, the others' rows are cleared.
  __device__ __forceinline__ void bring(uint32_t stage, uint32_t first) const {
    const uint32_t v_s = judge.stages + stage * L::kStage + L::kTile;
    const StageMeta meta = st.meta[stage];
    T* to = const_cast<T*>(static_cast<const T*>(o.near));
#pragma unroll 1
    for (uint32_t i = this->tid; i < kBlock * (D / 8); i += 128) {
      const uint32_t row = i / (D / 8), chunk = i % (D / 8);
      const uint4 x = ld_shared_v4(v_s + (chunk / 8) * L::kPanel + swizzled(row, chunk % 8));
      if (row >= meta.lo && row < meta.hi && first + row < p.near_draws) reinterpret_cast<uint4*>(to + (int64_t)(first + row) * D)[chunk] = x;
    }
  }

  // All of a scout's consumers: whether a block of the first list's team has come as far.
  __device__ __forceinline__ bool caught_up() {
    if (judge.tid == 0) st.last = load_acquire(p.sync + kTeamLine + kMetWord) > 0;
    gate.meet();
    return st.last;
  }
  // All consumers, when the block needs nothing more of the team: whether it is the last.
  __device__ __forceinline__ bool leave() {
    gate.meet();
    if (judge.tid == 0) st.last = add_acq_rel(judge.counter() + kLeftWord, 1) == o.team - 1;
    gate.meet();
    return st.last;
  }

  // What the parts came to, once they are combined.
  __device__ __forceinline__ void write(const Decision& d) const {
    const int tid = judge.tid;
    const int64_t head = (int64_t)o.list * group;
#pragma unroll 1
    for (int i = 2 * tid; i < group * D; i += 512) {
      const uint32_t high = ld_shared_u32(judge.split + split_at<D, N>(0, i / D, i % D));
      if (!p.out_f32) {
        static_cast<uint32_t*>(p.out)[(head * D + i) / 2] = high;
        continue;
      }
      const uint32_t low = ld_shared_u32(judge.split + split_at<D, N>(0, N + i / D, i % D));
      const T *h = reinterpret_cast<const T*>(&high), *l = reinterpret_cast<const T*>(&low);
      static_cast<float2*>(p.out)[(head * D + i) / 2] =
          make_float2(to_float(h[0]) + to_float(l[0]), to_float(h[1]) + to_float(l[1]));
    }
    if (p.lse && tid < group) p.lse[head + tid] = st.stat[tid].all;
    if (tid == 0) {
      p.state[o.list] = o.dense ? (uint32_t)kWhole : d.state;
      p.residual[o.list] = o.residual;
      p.counts[o.list] = d.count;
    }
  }
  // The thread block that is the last to need the team.
  __device__ __forceinline__ void clean() const {
    const int tid = judge.tid;
    const uint32_t words = o.dense ? 0 : o.team * group * 4;
#pragma unroll 1
    for (uint32_t i = tid; i < words; i += 256) p.sums[(int64_t)o.slot * o.room * group * 4 + i] = 0;
    if (tid == 0) judge.counter()[kMetWord] = judge.counter()[kLeftWord] = judge.counter()[kHeardWord] = 0;
  }
};

// One thread writes it for all; false: the list's team has no such place.
__device__ __forceinline__ bool set_sampled_outline(const SampledParams& p, uint32_t place, Outline& o) {
  const WorkList& list = p.d.lists[place / p.d.team];
  const uint32_t team = sampled_team(p.d.list_heads, list.len);
  if (place % p.d.team >= team) return false;
  set_outline(p.d, list, place, team, o);
  o.w.sample_count = 0;
  o.seed = p.seeds[o.row], o.position = p.positions[o.row];
  const WorkList& w = o.w;
  const uint32_t fixed = fixed_keys(w, p.d.block_ids), residual = w.len - fixed;
  const uint32_t pilot = max(max((uint32_t)p.pilot_tokens, 2u), (uint32_t)ceil(p.pilot_share * residual));
  const double limit = fmin(p.dense_share * w.len, (double)w.len) - fixed;
  o.fixed = fixed, o.residual = residual, o.pilot = pilot, o.limit = limit, o.most = limit > 0 ? ceil(limit) : 0;
  // The first look's draws and the next one's come beside the exact part. A sample that a second look is taken of is likely to
  // grow to several times its first size, but drawing so many slows down what goes on beside it: so that comes after the
  // first look, unless the exact part is long.
  o.far = min(max(min(12 * pilot, residual / 8), grown(pilot) + pilot / 8), residual);
  o.aim = o.share_of(list_tiles(w), 0) < kLongExact ? min(grown(pilot), residual) : o.far;
  // The sample's tiles are dealt out from where the list's own end.
  o.first = (o.rank + o.team - list_tiles(w) % o.team) % o.team;
  o.near = p.near_values ? static_cast<const uint8_t*>(p.near_values) + (int64_t)o.list * p.near_draws * p.d.head_dim * 2
                         : nullptr;
  o.dense = residual <= pilot || pilot >= limit || pilot > (uint32_t)p.capacity;
  return true;
}

// A list for a thread block that goes ahead of the others, on a multiprocessor that none of them has: what a look does is
// some 60 KB of code that runs once, one part after the other, and memory would be waited for at every few hundred bytes of
// it. It is there once somebody has run it. One thread writes the outline; false: there is too little to make it of.
__device__ __forceinline__ bool set_scout_outline(const SampledParams& p, Outline& o) {
  constexpr uint32_t kTokens = 1024, kPilot = 64;
  const uint32_t lists = p.d.rows * p.d.list_heads;
  if (p.positions[0] + 1 < kTokens || p.capacity < 4 * (int)kPilot) return false;
  WorkList w{};
  w.end[0] = kBlock, w.len = kTokens;
  o.w = w;
  o.set_team(1);
  // The scratch of one list more; queries beyond the last are zeros.
  o.list = o.slot = lists, o.room = team_size(p.d.list_heads);
  o.rank = o.row = o.head = o.kv_head = 0;
  o.table = p.d.block_table + (uint64_t)(p.d.row_table ? p.d.row_table[0] : 0) * p.d.table_stride;
  o.seed = p.seeds[0], o.position = 0;
  o.fixed = kBlock, o.residual = kTokens - kBlock, o.pilot = kPilot;
  o.aim = o.far = kPilot, o.first = 0;
  o.near = nullptr;
  o.limit = o.residual, o.most = o.residual, o.dense = false, o.scout = true;
  return true;
}

// Two warpgroups of consumers, one of producers, and one that draws.
constexpr int kSampledThreads = 512;

template <class T, int D, int N>
__global__ void __launch_bounds__(kSampledThreads, 1)
    sampled_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ SampledParams p) {
  constexpr int S = kSampledStages<D, N>;
  using L = DecodeLayout<D, N, S>;
  extern __shared__ uint8_t raw[];
  __shared__ SampledShared<D, N> sh;
  const uint32_t stages = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t q_at = stages + S * L::kStage;
  if (threadIdx.x == 0) {
    init_ring(sh, maps);
    mbar_init(smem_u32(&sh.join_full), 128);
    mbar_init(smem_u32(&sh.join_empty), 128);
    for (int i = 0; i < kDrawTurns; ++i) mbar_init(smem_u32(&sh.drew[i]), kDrawThreads);
    mbar_init(smem_u32(&sh.decided), 1);
    mbar_init(smem_u32(&sh.heeded), kDrawThreads + 128);
    mbar_init(smem_u32(&sh.placed), kDrawThreads);
    mbar_init(smem_u32(&sh.heard), min(p.d.q_heads / p.d.list_heads, 8));
    mbar_init(smem_u32(&sh.draw_gate), kDrawThreads);
    mbar_init(smem_u32(&sh.gate), 256);
    mbar_init(smem_u32(&sh.brought), 256);
    mbar_init_fence();
  }
  // The first thread block may be a scout, which needs nothing of the launch ahead.
  const bool scout = p.scouts > 0 && blockIdx.x == 0;
  if (!scout) wait_for_predecessor();
  // Teams that may not all be on the device at once form in the order of starting.
  bool any = true;
  if (threadIdx.x == 0) {
    if (scout) any = set_scout_outline(p, sh.outline);
    else any = set_sampled_outline(p, p.d.unit_capacity ? team_place(p.sync) : blockIdx.x - p.scouts, sh.outline);
  }
  if (!__syncthreads_and(any)) return;
  const Outline& o = sh.outline;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = p.d.q_heads / p.d.list_heads;
  if (warp >= 12) {
    regs_shrink<80>();
    Gate gate{smem_u32(&sh.draw_gate), kDrawersGate, kDrawThreads};
    Drawer<SampledShared<D, N>>{p, sh, o, gate, (int)threadIdx.x - 384, warp - 12, lane}.run();
    return;
  }
  if (warp >= 8) {
    regs_shrink<56>();
    SampledFeed<T, D, N>{{maps, p.d, sh, o, stages, q_at, lane, warp - 8}, p, {sh}}.run();
    return;
  }
  regs_grow<184>();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
  Gate gate{smem_u32(&sh.gate), kConsumersGate, 256};
  SampledConsumer<T, D, N> c{
      {sh, p.d.scale * kLog2e, stages, q_at + L::kQuery + wg * L::kProb, wg, tid, tid / 32, lane, group},
      p, sh, o, q_at, gate,
      {{{p, o, gate, (int)threadIdx.x, warp, lane, group}, sh, stages, q_at + L::kQuery + 2 * L::kProb}}};
  c.run();
}

}  // namespace taper
