// The producers of a decode step in one launch: four warps that fill the ring.
//
// A block of a single row does not wait for its outline, which one thread makes: it asks for the first tiles of its sample
// before the launch ahead has ended, which may still make the list, and looks up where the list's first rows lie as soon as that
// is there.
#pragma once

#include "parts.cuh"

namespace taper {

constexpr uint32_t kOnTheirWay = 4;  // tiles that are asked for and not there yet

// Lane `from` + i < from + 16 holds the place of the warp's i-th row of a tile, ~0: that one is not copied.
template <class T, int D>
__device__ __forceinline__ void copy_some(uint32_t dst, const T* k, const T* v, uint32_t at, int from) {
  constexpr int kChunks = D / 8, kRows = 32 / kChunks, kPanel = kBlock * 128, kTile = kPanel * (D / 64);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i) {
    const int r = i * kRows + lane / kChunks, chunk = lane % kChunks;
    const uint32_t row = __shfl_sync(~0u, at, from + r);
    const uint32_t to = dst + (chunk / 8) * kPanel + swizzled(warp * 16 + r, chunk % 8);
    if (row == ~0u) continue;
    cp_async16(to, k + (int64_t)row * D + chunk * 8, evict_normal());
    cp_async16(to + kTile, v + (int64_t)row * D + chunk * 8, evict_normal());
  }
}

// What a block of a launch that asks early takes its list for, before it knows more than the positions: that of a sequence with
// as many tokens as these say, of the place that it would have.
struct Guess {
  uint32_t len = 0, list = 0, head = 0;  // len 0: it cannot be said
  uint32_t lead = 0;                     // tiles of the sample that are asked for
};
__device__ __forceinline__ Guess guess(const SampledParams& p, Seat& seat, Permutation& permutation) {
  const DecodeParams& d = p.d;
  const uint32_t place = blockIdx.x - p.scouts;
  Guess g;
  g.list = place / d.team;
  const uint32_t row = g.list / d.list_heads, n = p.positions[row] + 1;
  g.head = g.list % d.list_heads;
  if (n == 0 || n > (uint32_t)d.table_stride * kBlock) return g;
  g.len = n;
  permutation = Permutation(n, {p.seeds[row], (uint32_t)p.layer, g.head, n - 1});
  seat.set_team(sampled_team(d.list_heads, n));
  seat.rank = place % d.team;
  seat.kv_head = g.head * d.kv_heads / d.list_heads;
  seat.table = d.block_table + (uint64_t)row * d.table_stride;
  if (seat.rank >= seat.team) g.len = 0;  // The list's team has no such place.
  else g.lead = min(seat.share_of(lead_end(p, n), seat.rank), kLeadTiles);
  return g;
}

template <class T, int D, int N>
struct SampledFeed {
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  const DecodeMaps& maps;
  const SampledParams& p;
  SampledShared<D, N>& sh;
  const uint32_t stages, q_at;
  const int lane, warp;
  const Outline& o = sh.outline;
  const uint64_t once = read_once(p.d);
  uint32_t count = 0;
  Seat seat{};
  Permutation permutation{};

  __device__ __forceinline__ const T* keys() const { return static_cast<const T*>(p.d.k); }
  __device__ __forceinline__ const T* values() const { return static_cast<const T*>(p.d.v); }
  __device__ __forceinline__ uint32_t place(uint32_t pos) const {
    return (seat.table[pos / kBlock] * p.d.kv_heads + seat.kv_head) * kBlock + pos % kBlock;
  }
  // Few tiles are on their way at a time: more would not come faster, and what the team
  // says to itself queues behind them.
  __device__ __forceinline__ uint32_t claim() {
    if (count >= kOnTheirWay) {
      const uint32_t i = count - kOnTheirWay;
      mbar_wait(smem_u32(&sh.full[i % L::kStages]), i / L::kStages & 1);
    }
    mbar_wait(smem_u32(&sh.empty[count % L::kStages]), (count / L::kStages & 1) ^ 1);
    return count++ % L::kStages;
  }
  __device__ __forceinline__ void block(uint32_t row, uint32_t lo, uint32_t hi, float ln_weight) {
    const uint32_t stage = claim(), full = smem_u32(&sh.full[stage]);
    if (warp == 0 && lane == 0) {
      sh.meta[stage] = {lo, hi, ln_weight, 0, kNotSampled, 0};
      load_block<D, N>(maps, stages + stage * L::kStage, full, row, once);
    } else {
      mbar_arrive(full);
    }
    mbar_arrive_warp(full, lane);
  }
  // Lane i < 16 holds the place and weight of the warp's i-th row.
  __device__ __forceinline__ void tokens(uint32_t at, float weight, uint32_t lo, uint32_t hi, uint32_t sampled) {
    const uint32_t stage = claim(), full = smem_u32(&sh.full[stage]);
    if (warp == 0 && lane == 0) sh.meta[stage] = {lo, hi, 0.f, 1, sampled, 0};
    if (lane < 16) sh.weight[stage][warp * 16 + lane] = weight;
    copy_rows<T, D>(stages + stage * L::kStage, keys(), values(), at, once);
    cp_async_arrive(full);
    mbar_arrive_warp(full, lane);
  }
  // Tiles of ranges and blocks from `from` on: every lane looks one up, then all are issued. Returns the first one beyond.
  __device__ __forceinline__ uint32_t blocks(const WorkList& w, uint32_t from, uint32_t tiles) {
#pragma unroll 1
    for (uint32_t left = seat.share_of(tiles, from); left > 0;) {
      BlockTile mine{0, 0, 0, 0.f};
      uint32_t row = 0;
      if (from + lane * seat.team < tiles) {
        mine = block_tile(w, p.d.block_ids, from + lane * seat.team);
        row = place(mine.block * kBlock);
      }
      const uint32_t n = min(32u, left);
#pragma unroll 1
      for (uint32_t i = 0; i < n; ++i)
        block(__shfl_sync(~0u, row, i), __shfl_sync(~0u, mine.lo, i), __shfl_sync(~0u, mine.hi, i),
              __shfl_sync(~0u, mine.ln_weight, i));
      from += n * seat.team, left -= n;
    }
    return from;
  }
  __device__ __forceinline__ void queries(uint32_t list) {
    if (warp == 0 && lane == 0) {
      mbar_expect_tx(smem_u32(&sh.q_full[0]), L::kQuery);
      for (int h = 0; h < D / 64; ++h)
        tma_load_2d(q_at + h * (N * 128), &maps.q, smem_u32(&sh.q_full[0]), h * 64,
                    list * (p.d.q_heads / p.d.list_heads));
    }
    __syncwarp();
  }

  // The list's ranges, blocks and tokens. Of coming tiles of tokens half the lanes hold the ids of one, the others those of the
  // next; they are read two such pairs ahead, and where their rows lie one.
  struct Exact {
    uint32_t t, first, tiles;  // the next tile, the first one of tokens, all
    uint32_t now, next, later;
  };
  __device__ __forceinline__ uint64_t token_of(const Exact& e, const WorkList& w, uint32_t t) const {
    return (uint64_t)w.token_first + min((t - e.first) * kBlock + warp * 16 + (lane & 15), w.token_count - 1);
  }
  __device__ __forceinline__ uint32_t id_of(const Exact& e, const WorkList& w, uint32_t t) const {
    return token_at(p.d.token_ids, p.d.token_shift, token_of(e, w, lane < 16 ? t : t + seat.team));
  }
  __device__ __forceinline__ void look_up(Exact& e, const WorkList& w, uint32_t from) const {
    e.t = from, e.tiles = list_tiles(w), e.first = e.tiles - (w.token_count + kBlock - 1) / kBlock;
    const uint32_t t = from + seat.share_of(e.first, from) * seat.team;
    if (t >= e.tiles) return;
    const uint32_t a = id_of(e, w, t), b = id_of(e, w, t + 2 * seat.team);
    e.later = id_of(e, w, t + 4 * seat.team), e.now = place(a), e.next = place(b);
  }
  __device__ __forceinline__ void exact(Exact& e, const WorkList& w) {
    uint32_t odd = 0;
#pragma unroll 1
    for (uint32_t t = blocks(w, e.t, e.first); t < e.tiles; t += seat.team) {
      const float ln_weight = w.token_ln_weight + (p.d.token_ln_weight ? p.d.token_ln_weight[token_of(e, w, t)] : 0.f);
      tokens(__shfl_sync(~0u, e.now, odd * 16 + (lane & 15)), ln_weight, 0,
             min(w.token_count - (t - e.first) * kBlock, (uint32_t)kBlock), kNotSampled);
      if (odd) e.now = e.next, e.next = place(e.later), e.later = id_of(e, w, t + 5 * seat.team);
      odd ^= 1;
    }
  }

  // Tiles of the sample that were asked for before the outline was known; of their rows the lane has a token, of the first tile,
  // or of the next from lane 16 on, and whether its row could be asked for.
  uint32_t lead = 0, token = 0;
  bool asked = false;

  // The first tiles of the sample, of a sequence of n tokens. Rows that this step writes may not be there yet: of a sequence with
  // several rows in it those are at most so many tokens before the position.
  __device__ __forceinline__ void ask_early(uint32_t n) {
    if (lead == 0) return;
    token = permutation.point((lane < 16 ? seat.rank : seat.rank + seat.team) * kBlock + warp * 16 + (lane & 15));
    const uint32_t block = seat.table[token / kBlock];
    asked = token + p.d.rows < n && block < p.d.blocks;
    const uint32_t at = asked ? (block * p.d.kv_heads + seat.kv_head) * kBlock + token % kBlock : ~0u;
    for (; count < lead; ++count) {
      copy_some<T, D>(stages + count * L::kStage, keys(), values(), at, count * 16);
      cp_async_arrive(smem_u32(&sh.full[count]));
    }
  }
  // Says of the tiles that were asked for what they are, and asks for the rows that were not there to ask for. If the list is
  // not the one that was guessed nothing of them is read.
  __device__ __forceinline__ void settle(bool hold) {
    const uint32_t at = hold && lead > 0 && !asked ? place(token) : ~0u;
    const bool late = __any_sync(~0u, at != ~0u);
#pragma unroll 1
    for (uint32_t i = 0; i < lead; ++i) {
      const uint32_t start = (seat.rank + i * seat.team) * kBlock;
      if (warp == 0 && lane == 0)
        sh.meta[i] = {0, hold ? min(o.points - start, (uint32_t)kBlock) : 0, 0.f, 1, hold ? start : kNotSampled, 0};
      if (late) {
        copy_some<T, D>(stages + i * L::kStage, keys(), values(), at, i * 16);
        cp_async_wait_all();
      }
      mbar_arrive_warp(smem_u32(&sh.full[i]), lane);
    }
  }

  // The lane's point of the sample's tile s, or of this rank's tile after it.
  __device__ __forceinline__ uint32_t point(uint32_t s) const {
    return (lane < 16 ? s : s + seat.team) * kBlock + warp * 16 + (lane & 15);
  }
  // And the place of its row, of tile `ahead_at`.
  uint32_t ahead = 0, ahead_at = ~0u;
  __device__ __forceinline__ void seek(uint32_t s) {
    if (s != ahead_at) ahead_at = s, ahead = place(permutation.point(point(s)));
  }
  // Tile s of the sample, of which points [from, to) are read: the `half`-th of the two whose places are known.
  __device__ __forceinline__ void tile(uint32_t s, uint32_t half, uint32_t from, uint32_t to) {
    const uint32_t start = s * kBlock;
    tokens(__shfl_sync(~0u, ahead, half * 16 + (lane & 15)), 0.f, max(from, start) - start,
           min(to - start, (uint32_t)kBlock), start);
  }

  // `early`: of a list that may be guessed; `behind`: a launch that is waited for.
  __device__ __forceinline__ void run(bool early, bool behind) {
    Guess g;
    if (early) g = guess(p, seat, permutation);
    lead = g.lead;
    ask_early(g.len);
    if (behind) wait_for_predecessor();
    WorkList& w = sh.lists[warp];
    bool is = false, hold = false;  // whether the list is as long as was guessed; and has a sample
    Exact e{};
    // Twice the same look-ups in one place: of the list that was guessed, and of another.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      uint32_t from;
      if (pass == 0) {
        if (g.len == 0) continue;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(p.d.lists + g.list);
        if (lane < sizeof(WorkList) / 4) reinterpret_cast<uint32_t*>(&w)[lane] = __ldcg(words + lane);
        __syncwarp();
        is = w.len == g.len;
        if (!is) continue;
        queries(g.list);
        from = seat.first_behind(lead_end(p, w.len));
      } else {
        mbar_wait(smem_u32(&sh.outlined), 0);
        if (!sh.any) {
          cp_async_wait_all();
          return;
        }
        if (!is) queries(o.list);
        hold = o.hold(g.len);
        settle(hold);
        if (hold) break;
        seat = o;
        if (g.len == 0) permutation = Permutation(o.w.len, {o.seed, (uint32_t)p.layer, o.head, o.position});
        permutation.n = o.w.len;
        if (o.dense) break;
        if (lane == 0) w = o.w;
        __syncwarp();
        // The tiles of the sample that come first.
        if (o.lead > 0) seek(o.rank);
#pragma unroll 1
        for (uint32_t i = 0; i < o.lead; ++i) tile(o.rank + i * o.team, i, 0, o.points);
        from = o.exact;
      }
      look_up(e, w, from);
    }
    if (!o.dense) exact(e, w);
    // Then for each look at points [from, to) the other tiles, and, while the look is decided, where the next rows lie: in one
    // loop, so that there is one copy of the code.
    Decision d{o.dense ? (uint32_t)kDense : 0, o.points};
    uint32_t number = 0, from = 0;
    bool next = false;
#pragma unroll 1
    while (d.state == 0) {
      const uint32_t to = d.count;
      const Run r = next ? Run(o, to, to) : Run(o, from, to);
      uint32_t s = r.first();
      const uint32_t end = next ? s + 1 : r.end();
      if (!next && number == 0) s += o.lead * o.team;
#pragma unroll 1
      for (; s < end; s += 2 * o.team) {
        seek(s);
#pragma unroll 1
        for (uint32_t half = 0; half < 2 && s + half * o.team < end && !next; ++half) tile(s + half * o.team, half, from, to);
      }
      next = !next;
      if (next) continue;
      from = to;
      mbar_wait(smem_u32(&sh.decided), number++ & 1);
      d = sh.decision;
      mbar_arrive(smem_u32(&sh.heeded));
    }
    if (d.state == kDense) {
      WorkList all{};
      all.len = all.end[0] = o.w.len;
      blocks(all, o.rank, list_tiles(all));
    }
    cp_async_wait_all();
  }
};

}  // namespace taper
