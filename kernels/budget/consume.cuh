// The consumers of a sampled decode step, and its kernel.
#pragma once

#include "feed.cuh"
#include "judge.cuh"
#include "sieve.cuh"

namespace taper {

template <class T, int D, int N>
struct SampledConsumer : TileSums<T, D, N, kSampledStages<D, N>, true> {
  using Sums = TileSums<T, D, N, kSampledStages<D, N>, true>;
  using L = typename Sums::L;
  using Sums::C, Sums::group, Sums::l, Sums::lane, Sums::limit, Sums::m, Sums::warp, Sums::wg;
  const SampledParams& p;
  SampledShared<D, N>& st;
  const Outline& o;
  const uint32_t q_s;
  uint8_t* const ring;
  Gate& gate;
  Judge<T, D, N> judge;

  // The steps in their order; a loop over them keeps one copy of the code of a tile.
  enum Phase { kLead, kExact, kSample, kAll };

  __device__ __forceinline__ void run() {
    const int tid = judge.tid;
    Decision decision{kDense, 0};
    Phase phase = kLead;
    uint32_t pos = 0, looks = 0, noisy = 0, from = 0, to = o.points, sifted = 0, passed = 0, drawn = 0;
    Aside aside;
    this->clear();
    swap(aside);
    this->clear();
#pragma unroll
    for (int c = 0; c < C; ++c) {
      limit[c] = ~0u, this->ln_weight[c] = 0.f;
      this->e2[c] = this->e2v2[c] = this->most[c] = this->most_v[c] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
#pragma unroll
      for (int i = N / 2; i < N; ++i) Sums::o[h][i] = 0.f;
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
      if (phase < kSample) this->no_squares();
      // Tiles are on their way meanwhile.
      if (looks > 0 && tid == 0) judge.wait_for_slowest();
      float* scores = p.scores + o.slot * kFewPoints * group;
      // Each warpgroup takes every other tile.
#pragma unroll 1
      for (uint32_t i = (wg ^ pos) & 1; i < n; i += 2) {
        const uint32_t stage = (pos + i) % L::kStages;
        mbar_wait(smem_u32(&st.full[stage]), (pos + i) / L::kStages & 1);
        const uint32_t sampled = st.meta[stage].sampled;
        const uint32_t last = sampled != kNotSampled ? min(to, kFewPoints) : 0;
        if (last > 0) passed += sift(stage, sifted + i - skip);
        this->template tile<true>(stage, q_s, [=](int row, int head, float score) {
          const uint32_t point = sampled + row;
          if (point >= from && point < last && head < group) scores[point * group + head] = score;
        });
        mbar_arrive_warp(smem_u32(&st.empty[stage]), lane);
      }
      pos += n;
      if (judging || phase == kLead) sifted += n - skip;
      // The sums of the sample's first tiles wait for the exact part's, and these for the sample's.
      if (phase < kSample) {
        swap(aside);
        // A single row's products are one launch with a thread block on each multiprocessor, which may now come as
        // these leave. Those of more rows would get in where the first ones end, two at a time, and leave the last
        // ones' multiprocessors empty.
        if (phase == kExact && p.d.rows == 1 && tid == 0) launch_dependents();
        phase = o.dense ? kAll : phase == kLead ? kExact : kSample;
        continue;
      }
      store(aside, looks == 0 || !judging);
      aside = {};
      // Either the team meets to judge, or its last block merges. A scout that others have caught up with is done;
      // those that are alone do not tell it.
      if (o.scout && caught_up()) {
        mbar_arrive_warp(smem_u32(&st.read), lane);
        if (tid == 0) {
          st.decision = {kSampled, 0};
          mbar_arrive(smem_u32(&st.decided));
        }
        return;
      }
      if (judging) {
        judge.tell(passed);
        passed = 0;
        if (judge.holds()) judge.multiply();
        drawn = judge.hear();
        judge.fetch();
        if (looks == 0 && o.rank == 0 && tid == 0 && !o.scout) p.first[o.list] = drawn;
      } else if (!leave()) {
        return;
      }
      judge.combine(drawn > 0 ? over((float)o.residual, (float)drawn) : 1.f);
      if (judging) {
        // It may be that this is the last look, and there is time for its outputs now. Others come where they are.
        decision = judge.decide(to, drawn, noisy, [&] {
          if (o.rank == 0 && !o.scout) write(128);
        });
        if (o.scout) decision = {kSampled, drawn};
        if (decision.state == 0) {
          recall();
          gate.meet();
        }
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
      if (!judging) write(256);
      if ((!judging || o.rank == 0) && !o.scout && tid == 0) tell(decision);
      // What a sampled list's team met by is the sifting warps' to clear.
      if (!judging && tid == 0) *judge.meeting() = 0, judge.counter()[kLeftWord] = judge.counter()[kHeardWord] = 0;
      return;
    }
  }

  // Sums that wait while others are added up, in whose place they come.
  struct Aside {
    float m[C], l[C], o[D / 64][N / 2];
  };
  __device__ __forceinline__ void swap(Aside& a) {
    auto each = [](float& x, float& y) {
      const float z = x;
      x = y, y = z;
    };
#pragma unroll
    for (int c = 0; c < C; ++c) each(a.m[c], m[c]), each(a.l[c], l[c]);
#pragma unroll
    for (int h = 0; h < D / 64; ++h)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) each(a.o[h][i], Sums::o[h][i]);
  }

  __device__ __forceinline__ Joined<D, N>& joined(int wg) const { return *reinterpret_cast<Joined<D, N>*>(ring + wg * L::kStage); }
  // Sums of a sample that grows go on from what is joined: registers are scarce while the team looks.
  __device__ __forceinline__ void recall() {
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int h = 0; h < D / 64; ++h)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int hd = this->head(c), j = this->acc(c) + 2 * i, d = h * 64 + warp * 16 + lane / 4 + 8 * i;
          Sums::o[h][j] = joined(wg)[1][hd][d], Sums::o[h][N / 2 + j] = joined(wg)[2][hd][d];
        }
  }
  // Joins the two warpgroups' samples, and their exact parts unless that is done, and leaves them where the team reads them.
  __device__ __forceinline__ void store(const Aside& exact, bool first) const {
    const int dim = warp * 16 + lane / 4;
    bar_sync(1 + wg, 128);  // Another warp's product may still read the last tile, which may be where sums are joined.
    auto& sums = st.warp_sums[wg][warp];
#pragma unroll
    for (int c = 0; c < C; c += 2) {
      float x[8] = {exact.l[c],     l[c],     this->e2[c],     this->e2v2[c],
                    exact.l[c + 1], l[c + 1], this->e2[c + 1], this->e2v2[c + 1]};
      const float one = sums_apart(x);
      sums[this->head(c + lane / 16)][lane / 4 % 4] = one;
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float most = this->most[c], most_v = this->most_v[c];
      const int hd = this->head(c);
#pragma unroll
      for (int d = 4; d < 32; d *= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, d)), most_v = fmaxf(most_v, __shfl_xor_sync(~0u, most_v, d));
      if (lane < 4) sums[hd][4] = most, sums[hd][5] = most_v, sums[hd][6] = exact.m[c], sums[hd][7] = m[c];
#pragma unroll
      for (int h = 0; h < D / 64; ++h)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = this->acc(c) + 2 * i, d = h * 64 + dim + 8 * i;
          joined(wg)[0][hd][d] = exact.o[h][j], joined(wg)[1][hd][d] = Sums::o[h][j], joined(wg)[2][hd][d] = Sums::o[h][N / 2 + j];
        }
    }
    gate.meet();
    constexpr int V = D / 32;
    using Vec = typename Member<D>::Vec;
#pragma unroll 1
    for (int item = judge.warp + (first ? 0 : group); item < 3 * group; item += 8) {
      const int kind = item < group ? 0 : item < 2 * group ? 1 : 2, hd = item - kind * group, of = kind > 0;
      // Both warpgroups' sum k, each in its units.
      auto both = [&](int k, float (&x)[2]) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          x[g] = 0.f;
#pragma unroll
          for (int w = 0; w < 4; ++w) x[g] += st.warp_sums[g][w][hd][k];
        }
      };
      float x[2], f[2];
      both(of, x);
      const float m0 = st.warp_sums[0][0][hd][6 + of], m1 = st.warp_sums[1][0][hd][6 + of], top = fmaxf(m0, m1);
      f[0] = m0 == -INFINITY ? 0.f : exp2_fast(m0 - top), f[1] = m1 == -INFINITY ? 0.f : exp2_fast(m1 - top);
      const float sum = this->mix(x[0], f[0], x[1], f[1]);
      float inv = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      const uint32_t at = judge.part(kind, o.rank, hd);
      if (kind < 2) {
        if (lane == 0) p.d.part_lse[at] = sum == 0.f ? -INFINITY : top * kLn2 + __logf(sum);
      } else {
        inv *= 4.f * inv, f[0] *= f[0], f[1] *= f[1];
        float e2[2], v2[2], most[2] = {}, most_v[2] = {};
        both(2, e2), both(3, v2);
#pragma unroll
        for (int g = 0; g < 2; ++g)
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            most[g] = fmaxf(most[g], st.warp_sums[g][w][hd][4]);
            most_v[g] = fmaxf(most_v[g], st.warp_sums[g][w][hd][5]);
          }
        if (lane == 0)
          *judge.squares(o.rank, hd) = make_float4(this->mix(e2[0], f[0], e2[1], f[1]) * inv, this->mix(v2[0], f[0], v2[1], f[1]) * inv,
                                                   fmaxf(most[0] * f[0], most[1] * f[1]) * inv,
                                                   fmaxf(most_v[0] * f[0], most_v[1] * f[1]) * inv);
      }
      const Vec a = *reinterpret_cast<const Vec*>(&joined(0)[kind][hd][lane * V]);
      const Vec b = *reinterpret_cast<const Vec*>(&joined(1)[kind][hd][lane * V]);
      Vec out;
#pragma unroll
      for (int v = 0; v < V; ++v)
        reinterpret_cast<float*>(&out)[v] =
            this->mix(reinterpret_cast<const float*>(&a)[v], f[0], reinterpret_cast<const float*>(&b)[v], f[1]) * inv;
      *reinterpret_cast<Vec*>(p.d.part_o + (int64_t)at * D + lane * V) = out;
    }
  }

  // Keys of the stage's tile that are not the sample's weigh nothing; returns how many are. `at` counts the rank's tiles.
  __device__ __forceinline__ uint32_t sift(uint32_t stage, uint32_t at) const {
    const uint32_t slot = at % kSieved;
    mbar_wait(smem_u32(&st.sieved[slot]), at / kSieved & 1);
    const uint64_t passes = (uint64_t)st.passes[slot][1] << 32 | st.passes[slot][0];
    // Each warp looks at its own rows' weights alone.
    const int row = this->warp * 16 + (lane & 15);
    if (lane < 16) st.weight[stage][row] = passes >> row & 1 ? 0.f : -INFINITY;
    mbar_arrive_warp(smem_u32(&st.used[slot]), lane);
    const StageMeta& meta = st.meta[stage];
    return __popcll(passes >> meta.lo & ~0ull >> (kBlock - (meta.hi - meta.lo)));
  }

  // All of a scout's consumers: whether a block of the first list's team has told that it has come as far.
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

  // What the parts came to, once they are combined; by the first so many threads.
  __device__ __forceinline__ void write(int threads) const {
    const int tid = judge.tid;
    const int64_t head = (int64_t)o.list * group;
#pragma unroll 1
    for (int i = 2 * tid; i < group * D; i += 2 * threads) {
      const uint32_t high = ld_shared_u32(judge.split + split_at<D, N>(i / D, i % D));
      if (!p.out_f32) {
        static_cast<uint32_t*>(p.out)[(head * D + i) / 2] = high;
        continue;
      }
      const uint32_t low = ld_shared_u32(judge.split + split_at<D, N>(N + i / D, i % D));
      const T *h = reinterpret_cast<const T*>(&high), *l = reinterpret_cast<const T*>(&low);
      static_cast<float2*>(p.out)[(head * D + i) / 2] =
          make_float2(to_float(h[0]) + to_float(l[0]), to_float(h[1]) + to_float(l[1]));
    }
    if (p.lse && tid < group) p.lse[head + tid] = st.stat[0][tid].all;
  }
  // And what the list has read. By one thread.
  __device__ __forceinline__ void tell(const Decision& d) const {
    p.state[o.list] = o.dense ? (uint32_t)kWhole : d.state;
    p.residual[o.list] = o.residual;
    p.counts[o.list] = d.count;
    if (o.dense) p.first[o.list] = 0;
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
  const uint32_t lead = o.dense ? 0 : lead_end(p, w.len);
  o.lead = min(o.share_of(lead, o.rank), kLeadTiles);
  // The list's tiles are dealt out from where those end.
  o.exact = o.first_behind(lead);
  return true;
}

// A list for a thread block that goes ahead of the others, on a multiprocessor that none of them has: what a look does is
// some 33 KB of code that runs once, one part after the other, and memory would be waited for at every few hundred bytes of
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
  o.table = p.d.block_table;
  o.seed = p.seeds[0], o.position = 0;
  o.residual = kTokens - kBlock, o.points = o.points_of(kPilot), o.lead = kLeadTiles;
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
  const uint32_t q_at = stages + S * L::kStage, values = q_at + L::kQuery, prob_at = values + D / 64 * kFewPanel;
  if (threadIdx.x == 0) {
    init_ring(sh, maps);
    for (uint32_t i = 0; i < kSieved; ++i) {
      mbar_init(smem_u32(&sh.sieved[i]), 2);
      mbar_init(smem_u32(&sh.used[i]), 4 * kWarpArrivals);
    }
    mbar_init(smem_u32(&sh.decided), 1);
    mbar_init(smem_u32(&sh.heeded), kSieveThreads + 128);
    mbar_init(smem_u32(&sh.placed), kSieveThreads);
    mbar_init(smem_u32(&sh.read), 8 * kWarpArrivals);
    mbar_init(smem_u32(&sh.outlined), 1);
    mbar_init(smem_u32(&sh.sieve_gate), kSieveThreads);
    mbar_init(smem_u32(&sh.gate), 256);
    mbar_init_fence();
  }
  // The first thread block may be a scout, which needs nothing of the launch ahead.
  const bool scout = p.scouts > 0 && blockIdx.x == 0, early = p.ahead && !scout;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (warp >= 8 && warp < 12) {
    regs_shrink<80>();
    SampledFeed<T, D, N>{maps, p, sh, stages, q_at, lane, warp - 8}.run(early, !scout);
    return;
  }
  Permutation permutation{};
  Seat seat;
  Guess guessed;
  if (early && (warp == 0 || warp >= 12)) guessed = guess(p, seat, permutation);
  if (!scout) wait_for_predecessor();
  // Teams that may not all be on the device at once form in the order of starting.
  if (threadIdx.x == 0) {
    if (scout) sh.any = set_scout_outline(p, sh.outline);
    else sh.any = set_sampled_outline(p, p.d.unit_capacity ? team_place(p.sync) : blockIdx.x - p.scouts, sh.outline);
    sh.early_len = guessed.len, sh.early = guessed.lead;
    mbar_arrive(smem_u32(&sh.outlined));
  }
  mbar_wait(smem_u32(&sh.outlined), 0);
  if (!sh.any) return;
  const Outline& o = sh.outline;
  const int group = p.d.q_heads / p.d.list_heads;
  if (warp >= 12) {
    regs_shrink<64>();
    if (sh.early_len == 0) permutation = Permutation(o.w.len, {o.seed, (uint32_t)p.layer, o.head, o.position});
    permutation.n = o.w.len;
    Gate gate{smem_u32(&sh.sieve_gate), kSieveGate, kSieveThreads};
    Sieve<D, SampledShared<D, N>>{p, sh, o, gate, values, (int)threadIdx.x - 384, warp - 12, lane, permutation}.run();
    return;
  }
  regs_grow<184>();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), tid = threadIdx.x % 128;
  Gate gate{smem_u32(&sh.gate), kConsumersGate, 256};
  static_assert(sizeof(LookRoom<D, N>) <= (S - 2) * L::kStage && sizeof(Joined<D, N>) <= L::kStage);
  uint8_t* ring = raw + (stages - smem_u32(raw));
  auto& room = *reinterpret_cast<LookRoom<D, N>*>(ring + 2 * L::kStage);
  SampledConsumer<T, D, N> c{
      {sh, p.d.scale * kLog2e, stages, prob_at + wg * 2 * L::kProb, wg, tid, tid / 32, lane, group},
      p, sh, o, q_at, ring, gate,
      {{{p, o, gate, (int)threadIdx.x, warp, lane, group}, sh, room, values, smem_u32(room.split)}}};
  c.run();
}

}  // namespace taper
