// Prefill attention: the warpgroups that compute scores, softmax and output.
#pragma once

#include <stddef.h>

#include "tiles.cuh"

namespace taper {

template <class T, int D, bool COLUMNS>
struct PrefillConsumer {
  using L = PrefillLayout<D>;
  static constexpr float kFloor = -1e30f;  // Stands for "no key seen"; finite, so it subtracts.
  static constexpr float kSumMax = 1024.f;
  const PrefillParams& p;
  PrefillShared<L::kStages>& sh;
  const uint32_t bars, q_s, k_s, v_s;  // shared-memory addresses
  const uint64_t q_desc, k_desc, v_desc;
  const int wg, tid, warp, lane;
  const float scale2;
  float s[kTileKeys / 2], o[D / 2];
  uint32_t prob[kTileKeys / 16][4];
  float m[2], l[2], fix[2];
  uint32_t pos[2];
  uint32_t q_at;  // byte offset of the tile's query buffer

  __device__ __forceinline__ void scores(uint32_t stage) {
    const uint64_t k = k_desc + stage * (L::kTile >> 4), q = q_desc + (q_at >> 4);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t at = ((kk / 4) * L::kPanel + (kk % 4) * 32) >> 4;
      wgmma_ss<T, kTileKeys, false>(s, q + at, k + at, kk > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void values(uint32_t stage) {
    const uint64_t v = v_desc + stage * (L::kTile >> 4);
#pragma unroll
    for (int kk = 0; kk < kTileKeys / 16; ++kk)
      wgmma_rs<T, D>(o, prob[kk], v + kk * (2048 >> 4), 1);
    wgmma_commit();
  }
  static constexpr uint32_t kFull = offsetof(PrefillShared<L::kStages>, k_full);
  static constexpr uint32_t kEmpty = offsetof(PrefillShared<L::kStages>, k_empty);
  static constexpr uint32_t vFull = offsetof(PrefillShared<L::kStages>, v_full);
  static constexpr uint32_t vEmpty = offsetof(PrefillShared<L::kStages>, v_empty);
  static constexpr uint32_t qFull = offsetof(PrefillShared<L::kStages>, q_full);
  static constexpr uint32_t qEmpty = offsetof(PrefillShared<L::kStages>, q_empty);
  // Read by the lane that will release the stage, so the read is ordered before that.
  __device__ __forceinline__ uint2 blocks(uint32_t stage) {
    uint2 b = make_uint2(0, 0);
    if (lane == 0) b = sh.blocks[stage];
    return make_uint2(__shfl_sync(~0u, b.x, 0), __shfl_sync(~0u, b.y, 0));
  }
  __device__ __forceinline__ void release(uint32_t bar) {
    __syncwarp();
    if (lane == 0) mbar_arrive(bars + bar);
  }

  // Columns are written and read by ordinary instructions of all lanes, so all announce
  // them; else one does for its warp. The outline, which all lanes read, goes the same way: racecheck does not see
  // a __syncwarp() before one lane's arrival.
  __device__ __forceinline__ void done_with(uint32_t bar) {
    if constexpr (COLUMNS) mbar_arrive(bars + bar);
    else release(bar);
  }

  // Single tokens are copied by ordinary instructions, which wgmma does not see without it.
  __device__ __forceinline__ void copied() const {
    if constexpr (COLUMNS) fence_async_smem();
  }

  // The scores of this warp's rows alone: its neighbours may have had no need, so the
  // warpgroup's instruction is out of reach. The fragments are laid out alike.
  __device__ __forceinline__ void scores_again(uint32_t stage) {
    const uint32_t q = q_s + q_at + (wg * 64 + warp * 16) * 128, k = k_s + stage * L::kTile;
    const uint32_t r = lane / 4, in_chunk = (lane & 3) * 4;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
      float c[4] = {};
#pragma unroll 1
      for (int kk = 0; kk < D / 16; ++kk) {
        const uint32_t panel = (kk / 4) * L::kPanel, chunk = (kk % 4) * 2;
        const uint32_t a0 = q + panel + in_chunk, b0 = k + panel + in_chunk;
        mma_16x8x16<T>(c, ld_shared_u32(a0 + swizzled(r, chunk)),
                       ld_shared_u32(a0 + swizzled(r + 8, chunk)),
                       ld_shared_u32(a0 + swizzled(r, chunk + 1)),
                       ld_shared_u32(a0 + swizzled(r + 8, chunk + 1)),
                       ld_shared_u32(b0 + swizzled(8 * j + r, chunk)),
                       ld_shared_u32(b0 + swizzled(8 * j + r, chunk + 1)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] = c[i];
    }
  }

  // Rows of V past the sequence's end may hold anything; probability 0 does not hide a NaN.
  __device__ __forceinline__ void clear_tail(uint32_t stage, uint2 b, uint32_t kv_len) {
    if (COLUMNS && b.x == kColumns) return;  // Filled up with zeros.
    const uint32_t last = unmarked(b.y == kNoBlock ? b.x : b.y);
    if ((last + 1) * kBlock <= kv_len) return;
    const uint32_t v = v_s + stage * L::kTile, keep = kv_len - last * kBlock;
    for (uint32_t i = tid; i < kTileKeys * (D / 8); i += 128) {
      const uint32_t r = i / (D / 8), chunk = i % (D / 8);
      const bool in_last = r / kBlock == 1 || b.y == kNoBlock;
      if (in_last && r % kBlock >= keep)
        st_shared_v4(v + (chunk / 8) * L::kPanel + swizzled(r, chunk % 8),
                     make_uint4(0, 0, 0, 0));
    }
    fence_async_smem();
    bar_sync(3 + wg, 128);
  }

  // Marked for the other warpgroup's rows alone.
  __device__ __forceinline__ bool hidden(uint32_t id) const { return id >> (30 + wg) & 1; }
  __device__ __forceinline__ bool needs_mask(uint2 b, const PrefillTile& t) const {
    const uint32_t last = max(unmarked(b.x), unmarked(b.y)) * kBlock + kBlock - 1;
    if (last > t.pos_min || hidden(b.x | b.y)) return true;
    if (p.window == 0) return false;
    bool cut = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t lo = (i ? b.y : b.x) * kBlock;
      cut |= lo + kBlock > (uint32_t)p.sink && lo + (uint32_t)p.window <= t.pos_max;
    }
    return cut;
  }
  __device__ __forceinline__ bool seen(uint32_t id, uint32_t at) const {
    return unmarked(id) <= at && !hidden(id);
  }
  // A row sees keys up to its own position: those below `sink` and the last `window`.
  // Bounds are taken relative to a block's first key of this lane, so that every
  // element compares with a constant.
  __device__ __forceinline__ void mask(uint2 b, uint32_t stage) {
    if constexpr (COLUMNS) {
      if (b.x == kColumns) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 8; ++j) {
          const uint2 id =
              *reinterpret_cast<const uint2*>(&sh.columns[stage][8 * j + (lane & 3) * 2]);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[4 * j + i] = seen(i & 1 ? id.y : id.x, pos[i / 2]) ? s[4 * j + i] : -INFINITY;
        }
        return;
      }
    }
    int last[2][2], first[2][2], sink[2];  // by block and row
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t id = h ? b.y : b.x;
      const int key = (int)(unmarked(id) * kBlock) + (lane & 3) * 2;
      sink[h] = p.sink - key;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        last[h][r] = hidden(id) ? -1 : max((int)pos[r] - key, -(1 << 30));
        first[h][r] = last[h][r] - p.window;
      }
    }
    if (p.window == 0) {
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (j % 8) * 8 + (i & 1);
          s[4 * j + i] = at <= last[j / 8][i / 2] ? s[4 * j + i] : -INFINITY;
        }
    } else {
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (j % 8) * 8 + (i & 1), h = j / 8, r = i / 2;
          const bool seen = (at <= last[h][r]) & ((at > first[h][r]) | (at < sink[h]));
          s[4 * j + i] = seen ? s[4 * j + i] : -INFINITY;
        }
    }
  }

  // Scores to probabilities in place against the running maximum as it is. True if a
  // sum shows that the maximum must rise, and the caller has to start over.
  __device__ __forceinline__ bool exponentiate(float (&sum)[2]) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = exp2_fast(fmaf(s[4 * j + i], scale2, -m[i / 2]));
      sum[0] += s[4 * j] + s[4 * j + 1];
      sum[1] += s[4 * j + 2] + s[4 * j + 3];
    }
    return __any_sync(~0u, sum[0] > kSumMax || sum[1] > kSumMax);
  }
  __device__ __forceinline__ void raise_maximum() {
    float top[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int j = 1; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i / 2][i & 1] = fmaxf(top[i / 2][i & 1], s[4 * j + i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = fmaxf(top[r][0], top[r][1]);
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      now = fmaxf(m[r], now * scale2);
      fix[r] = exp2_fast(m[r] - now);
      m[r] = now;
      l[r] *= fix[r];
    }
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      o[4 * j] *= fix[0];
      o[4 * j + 1] *= fix[0];
      o[4 * j + 2] *= fix[1];
      o[4 * j + 3] *= fix[1];
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < kTileKeys / 16; ++kk)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        prob[kk][i] = pack2<T>(s[8 * kk + 2 * i], s[8 * kk + 2 * i + 1]);
  }

  __device__ __forceinline__ void store(const PrefillTile& t, int head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = l[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inv = sum == 0.f ? 0.f : 1.f / sum;
      const uint32_t in_tile = row_of(p, wg * 64 + warp * 16 + lane / 4 + 8 * r);
      const bool live = in_tile < t.rows;
      const uint32_t row = t.row_begin + in_tile;
      int64_t slot = (int64_t)row * p.q_heads + head;
      if (p.splits > 0) slot = slot * p.splits + t.part;
      if (live && p.lse && (lane & 3) == 0)
        p.lse[slot] = sum == 0.f ? -INFINITY : m[r] * kLn2 + logf(sum);
      store_row(p.out + slot * D, r, inv, live);
    }
  }
  // Neighbouring lanes have two columns each of eight and of the next eight: they trade, so that each stores four in a row.
  __device__ __forceinline__ void store_row(float* out, int r, float inv, bool live) {
    const bool odd = lane & 1;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      const float *here = o + 4 * j + 2 * r, *next = here + 4;
      const float2 give = odd ? make_float2(here[0], here[1]) : make_float2(next[0], next[1]);
      const float2 keep = odd ? make_float2(next[0], next[1]) : make_float2(here[0], here[1]);
      const float2 got = make_float2(__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1));
      const float2 a = odd ? got : keep, b = odd ? keep : got;
      if (live)
        *reinterpret_cast<float4*>(out + (j + odd) * 8 + (lane & 2) * 2) =
            make_float4(a.x * inv, a.y * inv, b.x * inv, b.y * inv);
    }
  }

  __device__ __forceinline__ void run() {
    const int total = items(p);
    uint32_t count = 0;  // pairs of this thread block so far
    if (wg == 1) bar_arrive(1, 256);
    for (int round = 0, w; (w = work_item(round)) < total; ++round) {
      const int slot = round & 1;
      mbar_wait(bars + qFull + slot * 8, (round >> 1) & 1);
      const PrefillTile t = sh.outline[slot].tile;
      const uint32_t n = sh.outline[slot].pairs;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pos[r] = sh.outline[slot].positions[wg * 64 + warp * 16 + lane / 4 + 8 * r];
        m[r] = kFloor, l[r] = 0.f, fix[r] = 1.f;
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
      if (n == 0) done_with(qEmpty + slot * 8);
      else attend(t, n, count, slot);
      count += n;
      store(t, head_at(p, item_place(p, w)) + (p.head_pairs ? wg : 0));
    }
  }

  __device__ __forceinline__ void attend(const PrefillTile& t, uint32_t n, uint32_t count,
                                         int slot) {
    q_at = slot * L::kTile;
    float sum[2];
    uint32_t stage = count % L::kStages, parity = (count / L::kStages) & 1;
    mbar_wait(bars + kFull + stage * 8, parity);
    uint2 b = blocks(stage);
    copied();
    scores(stage);
    wgmma_wait<0>();
    pin(s);
    if (!COLUMNS) done_with(kEmpty + stage * 8);
    if (needs_mask(b, t)) mask(b, stage);
    if (COLUMNS) done_with(kEmpty + stage * 8);
    raise_maximum();
    exponentiate(sum);
    l[0] = sum[0], l[1] = sum[1];
    pack();
    for (uint32_t i = 1; i < n; ++i) {
      const uint32_t next = (count + i) % L::kStages, next_parity = ((count + i) / L::kStages) & 1;
      mbar_wait(bars + kFull + next * 8, next_parity);
      mbar_wait(bars + vFull + stage * 8, parity);
      copied();
      if (i <= 2) clear_tail(stage, b, t.kv_len);  // The last block is in the second step.
      bar_sync(1 + wg, 256);
      pin(o);
      scores(next);
      values(stage);
      bar_arrive(2 - wg, 256);
      b = blocks(next);
      const bool masked = needs_mask(b, t);
      wgmma_wait<1>();
      pin(s);
      bool raised = false;
      if (masked) {
        mask(b, next);
        // A row that saw no key until now has no maximum to compare with.
        raised = __any_sync(~0u, m[0] == kFloor || m[1] == kFloor);
        if (raised) raise_maximum();
      }
      const bool over = exponentiate(sum);
      pin(s);  // Keeps the exponentials before the wait, beside the value product.
      wgmma_wait<0>();
      pin(o);
      done_with(vEmpty + stage * 8);
      if (raised) rescale();
      if (over) {
        // Rare: a score is far above all before it. The keys are still there, so the
        // scores are computed once more and taken against the new maximum.
        scores_again(next);
        if (masked) mask(b, next);
        raise_maximum();
        exponentiate(sum);
        rescale();
      }
      done_with(kEmpty + next * 8);
      l[0] += sum[0], l[1] += sum[1];
      pack();
      stage = next;
      parity = next_parity;
    }
    done_with(qEmpty + slot * 8);
    mbar_wait(bars + vFull + stage * 8, parity);
    copied();
    if (n <= 2) clear_tail(stage, b, t.kv_len);
    pin(o);
    wgmma_fence();
    values(stage);
    wgmma_wait<0>();
    pin(o);
    done_with(vEmpty + stage * 8);
  }
};

}  // namespace taper
