// The producers of a decode step in one launch: four warps that fill the ring.
#pragma once

#include "draw.cuh"

namespace taper {

constexpr uint32_t kOnTheirWay = 4;  // tiles that are asked for and not there yet

// What lists name.
template <class T, int D, int N, class Shared>
struct ListFeed {
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  const DecodeMaps& maps;
  const DecodeParams& d;
  Shared& sh;
  const Outline& o;
  const uint32_t stages, q_at;
  const int lane, warp;
  const uint64_t once = read_once(d);
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t place(uint32_t pos) const {
    return (o.table[pos / kBlock] * d.kv_heads + o.kv_head) * kBlock + pos % kBlock;
  }
  // Few tiles are on their way at a time: more would not come faster, and what the team
  // says to itself queues behind them.
  __device__ __forceinline__ uint32_t claim(uint32_t most = kOnTheirWay) {
    if (count >= most) {
      const uint32_t i = count - most;
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
    __syncwarp();
    if (lane == 0) mbar_arrive(full);
  }
  // Lane i < 16 holds the place and weight of the warp's i-th row.
  __device__ __forceinline__ void tokens(uint32_t at, float weight, uint32_t lo, uint32_t hi,
                                         uint32_t sampled, uint32_t most = kOnTheirWay) {
    const uint32_t stage = claim(most), full = smem_u32(&sh.full[stage]);
    if (warp == 0 && lane == 0) sh.meta[stage] = {lo, hi, 0.f, 1, sampled, 0};
    if (lane < 16) sh.weight[stage][warp * 16 + lane] = weight;
    // Values of a sample are read again.
    copy_rows<T, D>(stages + stage * L::kStage, static_cast<const T*>(d.k), static_cast<const T*>(d.v), at,
                    sampled == kNotSampled ? once : evict_normal());
    cp_async_arrive(full);
    __syncwarp();
    if (lane == 0) mbar_arrive(full);
  }
  // Tiles of ranges and blocks: every lane looks one up, then all are issued.
  __device__ __forceinline__ void blocks(const WorkList& w, uint32_t tiles) {
    for (uint32_t t0 = o.rank; t0 < tiles; t0 += 32 * o.team) {
      BlockTile mine{0, 0, 0, 0.f};
      uint32_t row = 0;
      if (t0 + lane * o.team < tiles) {
        mine = block_tile(w, d.block_ids, t0 + lane * o.team);
        row = place(mine.block * kBlock);
      }
      const uint32_t n = min(32u, o.share_of(tiles, t0));
      for (uint32_t i = 0; i < n; ++i)
        block(__shfl_sync(~0u, row, i), __shfl_sync(~0u, mine.lo, i), __shfl_sync(~0u, mine.hi, i),
              __shfl_sync(~0u, mine.ln_weight, i));
    }
  }
  // The queries of the block's list.
  __device__ __forceinline__ void queries() {
    if (warp == 0 && lane == 0) {
      mbar_expect_tx(smem_u32(&sh.q_full[0]), L::kQuery);
      for (int h = 0; h < D / 64; ++h)
        tma_load_2d(q_at + h * (N * 128), &maps.q, smem_u32(&sh.q_full[0]), h * 64,
                    o.list * (d.q_heads / d.list_heads));
    }
    __syncwarp();
  }
  __device__ __forceinline__ uint32_t block_tiles() const {
    return list_tiles(o.w) - (o.w.token_count + kBlock - 1) / kBlock;
  }
  // The list's ranges, blocks and tokens.
  __device__ __forceinline__ void exact() {
    const WorkList& w = o.w;
    blocks(w, block_tiles());
    auto at = [&](uint32_t i) { return (uint64_t)w.token_first + i; };
    tokens_of([&](uint32_t i) { return token_at(d.token_ids, d.token_shift, at(i)); },
              [&](uint32_t i) { return w.token_ln_weight + (d.token_ln_weight ? d.token_ln_weight[at(i)] : 0.f); });
  }
  // The list's tokens, the i-th of which are of(i), of log weight weight(i).
  template <class Of, class Weight>
  __device__ __forceinline__ void tokens_of(Of of, Weight weight) {
    const WorkList& w = o.w;
    const uint32_t tiles = list_tiles(w), first = block_tiles();
    uint32_t t = o.rank;
    t += o.share_of(first, t) * o.team;
    if (t >= tiles) return;
    auto index = [&](uint32_t t) { return min((t - first) * kBlock + warp * 16 + (lane & 15), w.token_count - 1); };
    auto id = [&](uint32_t t) { return of(index(lane < 16 ? t : t + o.team)); };
    Rows rows = look_up(t, id);
    for (; t < tiles; t += o.team) {
      const float ln_weight = weight(index(t));
      tokens(take(rows), ln_weight, 0, min(w.token_count - (t - first) * kBlock, (uint32_t)kBlock), kNotSampled);
      advance(rows, t, id);
    }
  }

  // The places of coming tiles' rows: half the lanes hold a tile's, the others those of
  // the next one, and ids are read two such pairs ahead.
  struct Rows {
    uint32_t now, next, later, odd;
  };
  template <class Id>
  __device__ __forceinline__ Rows look_up(uint32_t t, Id id) const {
    const uint32_t a = id(t), b = id(t + 2 * o.team), c = id(t + 4 * o.team);
    return {place(a), place(b), c, 0};
  }
  __device__ __forceinline__ uint32_t take(const Rows& r) const {
    return __shfl_sync(~0u, r.now, r.odd * 16 + (lane & 15));
  }
  template <class Id>
  __device__ __forceinline__ void advance(Rows& r, uint32_t t, Id id) const {
    if (r.odd) r.now = r.next, r.next = place(r.later), r.later = id(t + 5 * o.team);
    r.odd ^= 1;
  }
};

// And a sample of the rest.
template <class T, int D, int N>
struct SampledFeed : ListFeed<T, D, N, SampledShared<D, N>> {
  using Base = ListFeed<T, D, N, SampledShared<D, N>>;
  using typename Base::L, typename Base::Rows;
  using Base::lane, Base::o, Base::sh, Base::stages, Base::warp;
  const SampledParams& p;
  Draws<SampledShared<D, N>> draws;

  // The lane's row of the sample's tile s, or of this rank's tile after it.
  __device__ __forceinline__ uint32_t sampled_index(uint32_t s, uint32_t count) const {
    return min((lane < 16 ? s : s + o.team) * kBlock + warp * 16 + (lane & 15), count - 1);
  }
  __device__ __forceinline__ uint32_t sampled_id(uint32_t s, uint32_t count) const {
    return drawn_id(p, sh, sampled_index(s, count));
  }
  // Rows of the sample's tiles from `ahead_at` on, looked up when `known` were drawn.
  Rows ahead;
  uint32_t ahead_at = ~0u, known = 0;
  // Makes them those of tile s and on, which draws up to `until` are asked of.
  __device__ __forceinline__ void seek(uint32_t s, uint32_t until, uint32_t drawn) {
    if (s == ahead_at && until <= known) return;
    ahead_at = s, known = drawn;
    ahead = this->look_up(s, [&](uint32_t s) { return sampled_id(s, known); });
  }
  // While a look at `from` draws is decided: where the next rows lie.
  __device__ __forceinline__ void foresee(uint32_t from) {
    const uint32_t drawn = draws.so_far(), s = Run(o, from, from).first();
    if (s * kBlock < drawn) seek(s, min(grown(from), drawn), drawn);
  }
  // A run of the sample.
  __device__ __forceinline__ void sample(const Run& g) {
    const uint32_t drawn = draws.await(g.to), s = g.first();
    if (s >= g.end()) return;
    seek(s, g.to, drawn);
    // A tile or two more need not wait for the list's own to be there: the team has nothing to say before they are.
    const uint32_t most = g.from == 0 && g.tiles() <= 2 ? min(kOnTheirWay + 2, (uint32_t)L::kStages) : kOnTheirWay;
    while (ahead_at < g.end()) {
      const uint32_t start = ahead_at * kBlock;
      this->tokens(this->take(ahead), 0.f, max(g.from, start) - start, min(g.to - start, (uint32_t)kBlock), start,
                   most);
      if (start + kBlock > g.to) return;  // The rest of the tile is the next run's.
      this->advance(ahead, ahead_at, [&](uint32_t s) { return sampled_id(s, known); });
      ahead_at += o.team;
    }
  }
  // The values of a whole sample, two tiles a stage.
  __device__ __forceinline__ void values(uint32_t count) {
    const Run g(o, 0, count);
    uint32_t s = o.first;
    if (s >= g.end()) return;
    const uint32_t step = 2 * o.team;
    // What is near lies by its number.
    const bool near = o.near && count <= p.near_draws;
    const T* v = static_cast<const T*>(near ? o.near : p.d.v);
    auto id = [&](uint32_t s) { return near ? sampled_index(s, count) : sampled_id(s, count); };
    auto place = [&](uint32_t id) { return near ? id : this->place(id); };
    uint32_t now = place(id(s)), next = id(s + step);
    for (; s < g.end(); s += step) {
      const uint32_t later = id(s + 2 * step), at = place(next);
      const uint32_t stage = this->claim(), full = smem_u32(&sh.full[stage]);
      copy_rows<T, D>(stages + stage * L::kStage, v, v, now, evict_normal(), 16);
      cp_async_arrive(full);
      __syncwarp();
      if (lane == 0) mbar_arrive(full);
      now = at, next = later;
    }
  }

  __device__ __forceinline__ void run() {
    this->queries();
    bool dense = o.dense;
    if (!dense) {
      this->exact();
      Decision d{0, o.pilot};
#pragma unroll 1
      for (uint32_t look = 0, from = 0; d.state == 0; ++look) {
        const uint32_t to = d.count;
        sample(Run(o, from, to));
        if (o.near) mbar_wait(smem_u32(&sh.brought), look & 1);
        values(to);
        foresee(to);
        from = to;
        mbar_wait(smem_u32(&sh.decided), look & 1);
        d = sh.decision;
        mbar_arrive(smem_u32(&sh.heeded));
      }
      dense = d.state == kDense;
    }
    if (dense) {
      WorkList all{};
      all.len = all.end[0] = o.w.len;
      this->blocks(all, list_tiles(all));
    }
    cp_async_wait_all();
  }
};

}  // namespace taper
