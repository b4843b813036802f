// The producers of a decode step in one launch: four warps that fill the ring.
#pragma once

#include "parts.cuh"

namespace taper {

constexpr uint32_t kOnTheirWay = 4;  // tiles that are asked for and not there yet

// What lists name.
template <class T, int D, int N>
struct ListFeed {
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  const DecodeMaps& maps;
  const DecodeParams& d;
  SampledShared<D, N>& sh;
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
    copy_rows<T, D>(stages + stage * L::kStage, static_cast<const T*>(d.k), static_cast<const T*>(d.v), at, once);
    cp_async_arrive(full);
    mbar_arrive_warp(full, lane);
  }
  // Tiles of ranges and blocks from `first` on: every lane looks one up, then all are issued.
  __device__ __forceinline__ void blocks(const WorkList& w, uint32_t first, uint32_t tiles) {
    for (uint32_t t0 = first; t0 < tiles; t0 += 32 * o.team) {
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
  // The list's ranges, blocks and tokens. Of coming tiles of tokens half the lanes hold the ids of one, the others those of the
  // next; they are read two such pairs ahead, and where their rows lie one.
  __device__ __forceinline__ void exact() {
    const WorkList& w = o.w;
    const uint32_t tiles = list_tiles(w), first = tiles - (w.token_count + kBlock - 1) / kBlock;
    blocks(w, o.exact, first);
    uint32_t t = o.exact, odd = 0;
    t += o.share_of(first, t) * o.team;
    if (t >= tiles) return;
    auto index = [&](uint32_t t) { return min((t - first) * kBlock + warp * 16 + (lane & 15), w.token_count - 1); };
    auto at = [&](uint32_t t) { return (uint64_t)w.token_first + index(t); };
    auto id = [&](uint32_t t) { return token_at(d.token_ids, d.token_shift, at(lane < 16 ? t : t + o.team)); };
    const uint32_t a = id(t), b = id(t + 2 * o.team);
    uint32_t later = id(t + 4 * o.team), now = place(a), next = place(b);
    for (; t < tiles; t += o.team) {
      const float ln_weight = w.token_ln_weight + (d.token_ln_weight ? d.token_ln_weight[at(t)] : 0.f);
      tokens(__shfl_sync(~0u, now, odd * 16 + (lane & 15)), ln_weight, 0,
             min(w.token_count - (t - first) * kBlock, (uint32_t)kBlock), kNotSampled);
      if (odd) now = next, next = place(later), later = id(t + 5 * o.team);
      odd ^= 1;
    }
  }
};

// The first tiles of a rank's sample: which rows they have depends on no list, so that a launch asks for them before the one
// ahead, which may still make the lists, has ended.
struct Early {
  uint32_t tiles = 0, len = 0;  // asked for, and the tokens that the sequence was taken to have
  uint32_t id = 0;              // the lane's token: of the first tile, or of the next from lane 16 on
  bool asked = false;           // for its row
};

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

// And a sample of the rest.
template <class T, int D, int N>
struct SampledFeed : ListFeed<T, D, N> {
  using Base = ListFeed<T, D, N>;
  using typename Base::L;
  using Base::count, Base::lane, Base::o, Base::sh, Base::stages, Base::warp;
  const SampledParams& p;
  const Early& early;
  const Permutation permutation;

  // Says of the tiles that were asked for what they are, and asks for the rows that were not there to ask for. If they are no
  // tiles of the sample nothing of them is read.
  __device__ __forceinline__ void settle(bool hold) {
    const uint32_t at = hold && !early.asked ? this->place(early.id) : ~0u;
    const bool some = __any_sync(~0u, at != ~0u);
    for (; count < sh.early; ++count) {
      const uint32_t start = (o.rank + count * o.team) * kBlock, full = smem_u32(&sh.full[count]);
      if (warp == 0 && lane == 0)
        sh.meta[count] = {0, hold ? min(o.points - start, (uint32_t)kBlock) : 0, 0.f, 1, hold ? start : kNotSampled, 0};
      if (some)
        copy_some<T, D>(stages + count * L::kStage, static_cast<const T*>(p.d.k), static_cast<const T*>(p.d.v), at, count * 16);
      cp_async_arrive(full);
      mbar_arrive_warp(full, lane);
    }
  }

  // The lane's point of the sample's tile s, or of this rank's tile after it.
  __device__ __forceinline__ uint32_t point(uint32_t s) const {
    return (lane < 16 ? s : s + o.team) * kBlock + warp * 16 + (lane & 15);
  }
  // And the place of its row, of tile `ahead_at`.
  uint32_t ahead = 0, ahead_at = ~0u;
  __device__ __forceinline__ void seek(uint32_t s) {
    if (s != ahead_at) ahead_at = s, ahead = this->place(permutation.point(point(s)));
  }
  // Tile s of the sample, of which points [from, to) are read: the `half`-th of the two whose places are known.
  __device__ __forceinline__ void tile(uint32_t s, uint32_t half, uint32_t from, uint32_t to) {
    const uint32_t start = s * kBlock;
    this->tokens(__shfl_sync(~0u, ahead, half * 16 + (lane & 15)), 0.f, max(from, start) - start,
                 min(to - start, (uint32_t)kBlock), start);
  }

  __device__ __forceinline__ void run() {
    this->queries();
    const bool hold = o.hold(sh.early_len);
    settle(hold);
    // The tiles of the sample that come first, and the list's own.
    uint32_t lead = hold ? sh.early : 0;
    if (lead < o.lead) seek(o.rank);
#pragma unroll 1
    for (; lead < o.lead; ++lead) tile(o.rank + lead * o.team, lead, 0, o.points);
    if (!o.dense) this->exact();
    // Then for each look at points [from, to) the other tiles, and, while the look is decided, where the next rows lie: in one
    // loop, so that there is one copy of the code.
    Decision d{o.dense ? (uint32_t)kDense : 0, o.points};
    uint32_t number = 0, from = 0;
    bool next = false;
#pragma unroll 1
    while (d.state == 0) {
      const uint32_t to = d.count;
      const Run g = next ? Run(o, to, to) : Run(o, from, to);
      uint32_t s = g.first();
      const uint32_t end = next ? s + 1 : g.end();
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
      this->blocks(all, o.rank, list_tiles(all));
    }
    cp_async_wait_all();
  }
};

// By those who need a permutation, before the launch ahead has ended: makes it, and producers, the first four warps, ask for the
// first tiles of the block's sample. It is that of a sequence that has as many tokens as its position says. Rows that this step
// writes may not be there yet: of a sequence with several rows in it those are at most so many tokens before the position.
template <class T, int D, int N>
__device__ __forceinline__ Early ask_early(const SampledParams& p, uint32_t stages, Permutation& permutation, int lane, int warp) {
  using L = DecodeLayout<D, N, kSampledStages<D, N>>;
  const DecodeParams& d = p.d;
  const uint32_t place = blockIdx.x - p.scouts, list = place / d.team, row = list / d.list_heads, rank = place % d.team;
  const uint32_t head = list % d.list_heads, kv_head = head * d.kv_heads / d.list_heads;
  const uint32_t n = p.positions[row] + 1;
  if (n == 0 || n > (uint32_t)d.table_stride * kBlock) return {};
  permutation = Permutation(n, {p.seeds[row], (uint32_t)p.layer, head, n - 1});
  Early early;
  early.len = n;
  if (warp >= 4) return early;
  const uint32_t team = sampled_team(d.list_heads, n);
  // A first look takes no fewer points, whatever the list reads.
  const uint32_t least = max((uint32_t)max(p.pilot_tokens, 2), (uint32_t)(p.pilot_share * n));
  const uint32_t end = min((least + kBlock - 1) / kBlock, n / kBlock);
  early.tiles = rank < min(end, team) ? min((end - rank + team - 1) / team, kLeadTiles) : 0;
  if (early.tiles == 0) return early;
  const uint32_t* table = d.block_table + (uint64_t)row * d.table_stride;
  early.id = permutation.point((lane < 16 ? rank : rank + team) * kBlock + warp * 16 + (lane & 15));
  const uint32_t block = table[early.id / kBlock];
  early.asked = early.id + d.rows < n && block < d.blocks;
  const uint32_t at = early.asked ? (block * d.kv_heads + kv_head) * kBlock + early.id % kBlock : ~0u;
  for (uint32_t i = 0; i < early.tiles; ++i)
    copy_some<T, D>(stages + i * L::kStage, static_cast<const T*>(d.k), static_cast<const T*>(d.v), at, i * 16);
  return early;
}

}  // namespace taper
