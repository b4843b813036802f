// The consumers of a sampled decode step, and its kernel.
#pragma once

#include "feed.cuh"
#include "judge.cuh"
#include "sieve.cuh"

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
  enum Phase { kLead, kExact, kSample, kAll };

  __device__ __forceinline__ void run() {
    const int tid = judge.tid;
    Decision decision{kDense, 0};
    Phase phase = kLead;
    uint32_t pos = 0, parts = 0, looks = 0, noisy = 0, from = 0, to = o.points, sifted = 0, passed = 0, drawn = 0;
    float lead_m[C], lead_l[C], lead_o[D / 64][N / 2];
    typename Judge<T, D, N>::Ahead ahead;
    ahead.first = 0;
    this->clear();
#pragma unroll
    for (int c = 0; c < C; ++c) limit[c] = ~0u, this->ln_weight[c] = 0.f;
    mbar_wait(smem_u32(&st.q_full[0]), 0);
#pragma unroll 1
    for (;;) {
      const bool judging = phase == kSample;
      // Tiles that were asked for early and are not the sample's come before all others, and are nothing.
      const uint32_t skip = phase != kLead || o.hold(st.early_len) ? 0 : st.early;
      uint32_t n = phase == kLead    ? skip + o.lead
                   : phase == kExact ? o.share_of(list_tiles(o.w), o.exact)
                                     : o.share_of(range_tiles(0, o.w.len), o.rank);
      if (judging) n = Run(o, from, to).tiles() - (looks == 0 ? o.lead : 0);
      if (phase == kExact || (judging && looks > 0)) judge.look_up(to, ahead);
      float* scores = p.scores + (int64_t)o.slot * p.capacity * group;
      // Each warpgroup takes every other tile.
#pragma unroll 1
      for (uint32_t i = (wg ^ pos) & 1; i < n; i += 2) {
        const uint32_t stage = (pos + i) % L::kStages;
        mbar_wait(smem_u32(&st.full[stage]), (pos + i) / L::kStages & 1);
        const uint32_t sampled = st.meta[stage].sampled;
        const uint32_t last = sampled != kNotSampled ? to : 0;
        if (last > 0) passed += sift(stage, sifted + i - skip);
        this->template tile<true>(stage, q_s, [=](int row, int head, float score) {
          const uint32_t draw = sampled + row;
          if (draw >= from && draw < last && head < group) scores[(int64_t)draw * group + head] = score;
        });
        if (last > 0 && o.near) bring(stage, sampled);
        __syncwarp();
        if (lane == 0) mbar_arrive(smem_u32(&st.empty[stage]));
      }
      pos += n;
      if (judging || phase == kLead) sifted += n - skip;
      // The sums of the sample's first tiles wait for the exact part's.
      if (phase == kLead) {
        put(lead_m, lead_l, lead_o, this->m, l, Sums::o);
        this->clear();
        phase = o.dense ? kAll : kExact;
        continue;
      }
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
        put(this->m, l, Sums::o, lead_m, lead_l, lead_o);
        phase = kSample;
        continue;
      }
      // Either the team meets to judge, or its last block merges. A scout that others have caught up with is done.
      if (o.scout && caught_up()) {
        if (tid == 0) {
          st.decision = {kSampled, 0};
          mbar_arrive(smem_u32(&st.decided));
        }
        return;
      }
      if (judging) {
        judge.tell(passed);
        passed = 0;
        if (!o.few_near) judge.prepare(pos, ahead);
        drawn = judge.hear();
        if (o.few_near) judge.prepare(pos, ahead);
        if (judge.takes_few(pos, ahead)) judge.fetch_scores(ahead);
      } else if (!leave()) {
        return;
      }
      judge.combine(drawn > 0 ? over((float)o.residual, (float)drawn) : 1.f, judging);
      if (judging) {
        decision = judge.decide(to, drawn, looks, noisy, ahead, pos);
        if (o.scout) decision = {kSampled, drawn};
        if (tid == 0) {
          if (looks > 0) mbar_wait(smem_u32(&st.heeded), (looks - 1) & 1);
          st.decision = decision;
          mbar_arrive(smem_u32(&st.decided));  // Tells producers and sifting warps.
        }
        ++looks;
        if (decision.state == 0) {
          from = to, to = decision.count;
          continue;
        }
        if (decision.state == kDense) {
          this->clear();
          drawn = 0;
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

  static __device__ __forceinline__ void put(float (&to_m)[C], float (&to_l)[C], float (&to_o)[D / 64][N / 2],
                                             const float (&from_m)[C], const float (&from_l)[C],
                                             const float (&from_o)[D / 64][N / 2]) {
#pragma unroll
    for (int c = 0; c < C; ++c) to_m[c] = from_m[c], to_l[c] = from_l[c];
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) to_o[h][i] = from_o[h][i];
  }
  // Keys of the stage's tile that are not the sample's weigh nothing; returns how many are. `at` counts the rank's tiles.
  __device__ __forceinline__ uint32_t sift(uint32_t stage, uint32_t at) const {
    const uint32_t slot = at % kSieved;
    mbar_wait(smem_u32(&st.sieved[slot]), at / kSieved & 1);
    const uint64_t passes = (uint64_t)st.passes[slot][1] << 32 | st.passes[slot][0];
    // Each warp looks at its own rows' weights alone.
    const int row = this->warp * 16 + (lane & 15);
    if (lane < 16) st.weight[stage][row] = passes >> row & 1 ? 0.f : -INFINITY;
    __syncwarp();
    if (lane == 0) mbar_arrive(smem_u32(&st.used[slot]));
    const StageMeta& meta = st.meta[stage];
    return __popcll(passes >> meta.lo & ~0ull >> (kBlock - (meta.hi - meta.lo)));
  }

  // Leaves a tile's values where looks find them: those of this run's points, the others' rows are cleared.
  __device__ __forceinline__ void bring(uint32_t stage, uint32_t first) const {
    const uint32_t v_s = judge.stages + stage * L::kStage + L::kTile;
    const StageMeta meta = st.meta[stage];
    T* to = const_cast<T*>(static_cast<const T*>(o.near));
#pragma unroll 1
    for (uint32_t i = this->tid; i < kBlock * (D / 8); i += 128) {
      const uint32_t row = i / (D / 8), chunk = i % (D / 8);
      const uint4 x = ld_shared_v4(v_s + (chunk / 8) * L::kPanel + swizzled(row, chunk % 8));
      if (row >= meta.lo && row < meta.hi && first + row < p.near_points)
        reinterpret_cast<uint4*>(to + (int64_t)(first + row) * D)[chunk] = x;
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
    if (tid == 0) *judge.meeting() = 0, judge.counter()[kLeftWord] = judge.counter()[kHeardWord] = 0;
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
  o.residual = residual, o.limit = limit, o.most = limit > 0 ? ceil(limit) : 0;
  o.dense = residual <= pilot || pilot >= limit;
  o.points = o.dense ? 0 : o.points_of(pilot);
  o.dense |= o.points > (uint32_t)p.capacity;
  o.lead = o.dense ? 0 : min(Run(o, 0, o.points).tiles(), kLeadTiles);
  // The list's tiles are dealt out from where the first look's end.
  o.exact = (o.rank + o.team - Run(o, 0, o.points).end() % o.team) % o.team;
  o.near = p.near_values ? static_cast<const uint8_t*>(p.near_values) + (int64_t)o.list * p.near_points * p.d.head_dim * 2
                         : nullptr;
  o.few_near = o.near && p.near_points >= kFewPoints;
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
  o.rank = o.exact = o.row = o.head = o.kv_head = 0;
  o.table = p.d.block_table + (uint64_t)(p.d.row_table ? p.d.row_table[0] : 0) * p.d.table_stride;
  o.seed = p.seeds[0], o.position = 0;
  o.residual = kTokens - kBlock, o.points = o.points_of(kPilot), o.lead = kLeadTiles;
  o.near = nullptr, o.few_near = false;
  o.limit = o.residual, o.most = o.residual, o.dense = false, o.scout = true;
  return true;
}

// Two warpgroups of consumers, one of producers, and one that sifts.
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
    for (uint32_t i = 0; i < kSieved; ++i) {
      mbar_init(smem_u32(&sh.sieved[i]), 2);
      mbar_init(smem_u32(&sh.used[i]), 4);
    }
    mbar_init(smem_u32(&sh.decided), 1);
    mbar_init(smem_u32(&sh.heeded), kSieveThreads + 128);
    mbar_init(smem_u32(&sh.placed), kSieveThreads);
    mbar_init(smem_u32(&sh.heard), min(p.d.q_heads / p.d.list_heads, 8));
    mbar_init(smem_u32(&sh.sieve_gate), kSieveThreads);
    mbar_init(smem_u32(&sh.gate), 256);
    mbar_init(smem_u32(&sh.brought), 256);
    mbar_init_fence();
  }
  // The first thread block may be a scout, which needs nothing of the launch ahead.
  const bool scout = p.scouts > 0 && blockIdx.x == 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Early early;
  Permutation permutation{};
  if (warp >= 8) {
    if (p.ahead && !scout) early = ask_early<T, D, N>(p, stages, permutation, lane, warp - 8);
    if (threadIdx.x == 256) sh.early = early.tiles, sh.early_len = early.len;
  }
  if (!scout) wait_for_predecessor();
  // Teams that may not all be on the device at once form in the order of starting.
  bool any = true;
  if (threadIdx.x == 0) {
    if (scout) any = set_scout_outline(p, sh.outline);
    else any = set_sampled_outline(p, p.d.unit_capacity ? team_place(p.sync) : blockIdx.x - p.scouts, sh.outline);
  }
  if (!__syncthreads_and(any)) {
    cp_async_wait_all();
    return;
  }
  const Outline& o = sh.outline;
  const int group = p.d.q_heads / p.d.list_heads;
  if (warp >= 8) {
    if (sh.early_len == 0) permutation = Permutation(o.w.len, {o.seed, (uint32_t)p.layer, o.head, o.position});
    permutation.n = o.w.len;
  }
  if (warp >= 12) {
    regs_shrink<64>();
    Gate gate{smem_u32(&sh.sieve_gate), kSieveGate, kSieveThreads};
    Sieve<SampledShared<D, N>>{p, sh, o, gate, (int)threadIdx.x - 384, warp - 12, lane, permutation}.run();
    return;
  }
  if (warp >= 8) {
    regs_shrink<72>();
    SampledFeed<T, D, N>{{maps, p.d, sh, o, stages, q_at, lane, warp - 8}, p, early, permutation}.run();
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
