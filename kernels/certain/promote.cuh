// What is read whatever is sampled: the keys of the list, a few that were drawn to guess each head's output
// from, and the pages that could weigh most.
#pragma once

#include "pages.cuh"

namespace taper {

struct PromoteShared {
  union {
    SortShared sort;
    struct {
      uint64_t rows[kGuessMost];                // where the keys drawn lie
      float weights[kGroupMost][kGuessMost];    // their scores, then weights
      double squares[kGroupMost][4];            // of the guessed output, 32 elements each
    } guess;
    float most[kPromoteWarps][kGroupMost + 1];  // of scores, and behind them of norms
    struct {
      double cost[kPromoteWarps];
      uint32_t rank[kPromoteWarps];
    } cut;
  };
  uint32_t scan[33];
  // Of each head what the keys drawn suggest: what weights are relative to, their sum, the share of the
  // known, the output's norm, and one over sum times norm.
  double top[kGroupMost], sum[kGroupMost], known[kGroupMost], norm[kGroupMost], scale[kGroupMost];
  double cost;  // of the best cut
  uint32_t rank, read;
};

// The cheapest of the block's cuts, the first of equals, by all threads.
__device__ __forceinline__ void cheapest(double cost, uint32_t rank, uint32_t read, PromoteShared& sh) {
  const uint32_t own = rank;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto reduce = [&] {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const double other = __shfl_xor_sync(~0u, cost, d);
      const uint32_t at = __shfl_xor_sync(~0u, rank, d);
      if (other < cost || (other == cost && at < rank)) cost = other, rank = at;
    }
  };
  reduce();
  if (lane == 0) sh.cut.cost[warp] = cost, sh.cut.rank[warp] = rank;
  __syncthreads();
  cost = sh.cut.cost[lane], rank = sh.cut.rank[lane];
  reduce();
  // Whoever found it, and no other, knows what is read before it.
  if (own == rank && own != ~0u) sh.read = read;
  if (threadIdx.x == 0) sh.cost = cost, sh.rank = rank;
  __syncthreads();
}

// One thread block a list.
template <class T, int D>
struct Promote {
  const CertainParams& p;
  PromoteShared& sh;
  const int list, row, kv_head, group;
  const WorkList w;
  const ReadBits bits;
  const int tid, lane, warp;

  __device__ __forceinline__ int64_t head(int g) const { return (int64_t)row * p.q_heads + kv_head * group + g; }
  __device__ __forceinline__ uint32_t page_size() const { return kBlock / p.per_block; }
  __device__ __forceinline__ uint32_t pages() const { return (w.len + page_size() - 1) / page_size(); }
  __device__ __forceinline__ float page_norm(uint32_t page) const {
    const uint64_t at = cache_row(p, row, kv_head, page * page_size());
    return p.page_norms[at / page_size()];
  }
  __device__ __forceinline__ float page_score(int g, uint32_t page) const {
    return p.page_scores[head(g) * p.score_stride + page];
  }

  // What of the list is not read.
  __device__ __forceinline__ uint32_t residual() const {
    uint32_t read = 0, total;
    for (uint32_t i = tid; i < bits.count(); i += kPromoteThreads) read += __popc(bits.words[i]);
    block_exclusive_sum(read, sh.scan, total);
    return w.len - total;
  }

  // By one thread: the list as it is to be looked at, or one that reads nothing until the last launch.
  __device__ __forceinline__ void settle(uint32_t state, uint32_t residual, const WorkList& work, uint32_t rest,
                                         uint32_t want) const {
    p.state[list] = state;
    p.residual[list] = residual;
    p.counts[list] = 0;
    p.work[list] = work;
    p.rest[list] = rest;
    p.wants[list] = want;
  }
  __device__ __forceinline__ void read_all(uint32_t state, uint32_t residual) const {
    WorkList none{};
    none.len = w.len;
    if (tid == 0) settle(state, residual, none, 0, 0);
  }

  // Takes the keys drawn to those read exactly, and guesses from them, a warp a key and then a warp a head.
  __device__ __forceinline__ void guess(uint32_t residual) {
    auto& few = sh.guess;
    const int keys = p.draw_stride;
    const double stands_for = (double)residual / keys;
    if (warp < keys) {
      const uint32_t token = p.draws[(int64_t)list * keys + warp];
      const uint64_t at = cache_row(p, row, kv_head, token);
      Piece<T, D> k, q;
      k.load(p.k, at);
      if (lane == 0) few.rows[warp] = at, bits.mark(token);
      for (int g = 0; g < group; ++g) {
        q.load(p.q, head(g));
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < D / 32; ++i) dot += q[i] * k[i];
        dot = warp_sum(dot);
        if (lane == 0) few.weights[g][warp] = dot * p.scale;
      }
    }
    __syncthreads();
    if (warp < group) {
      const float known = p.known_lse[head(warp)];
      const float score = lane < keys ? few.weights[warp][lane] : -INFINITY;
      const float top = fmaxf(warp_max(score), known);
      const float e = lane < keys ? expf(score - top) : 0.f;
      const double sum = warp_sum((double)e), share = (double)expf(known - top);
      few.weights[warp][lane] = e;
      if (lane == 0) sh.top[warp] = top, sh.known[warp] = share, sh.sum[warp] = share + stands_for * sum;
    }
    __syncthreads();
    // Whole warps: D is a multiple of 32.
    for (int i = tid; i < group * D; i += kPromoteThreads) {
      const int g = i / D, c = i % D;
      float drawn = 0.f;
      for (int key = 0; key < keys; ++key)
        drawn += few.weights[g][key] * to_float(static_cast<const T*>(p.v)[few.rows[key] * D + c]);
      const double known = (double)p.known_o[head(g) * D + c] * sh.known[g];
      const float out = (float)((known + stands_for * (double)drawn) / sh.sum[g]);
      p.centre[head(g) * D + c] = out;
      const double square = warp_sum((double)out * out);
      if (lane == 0) few.squares[g][c / 32] = square;
    }
    __syncthreads();
    if (tid < group) {
      double square = 0.;
      for (int i = 0; i < D / 32; ++i) square += few.squares[tid][i];
      sh.norm[tid] = sqrt(square);
      sh.scale[tid] = 1. / (sh.sum[tid] * fmax(sh.norm[tid], DBL_MIN));
    }
    __syncthreads();
  }

  // The pages in order of what they could weigh, the heaviest first and of equals the first: the bits of the
  // weight turned round, and the page. Pages that are read already are among them. The promise does not rest on
  // weights, which floats are good enough for.
  __device__ __forceinline__ uint64_t* rank_pages() {
    uint64_t* order = p.pages + (int64_t)list * 2 * p.page_stride;
    for (uint32_t i = tid; i < pages(); i += kPromoteThreads) {
      const double norm = page_norm(i);
      double weight = 0.;
      for (int g = 0; g < group; ++g) {
        const double e = expf((float)((double)page_score(g, i) - sh.top[g]));
        weight = fmax(weight, e * (norm + sh.norm[g]) * sh.scale[g]);
      }
      order[i] = (uint64_t)~__float_as_uint((float)weight) << 32 | i;
    }
    __syncthreads();
    sort_pages(order, order + p.page_stride, pages(), sh.sort);
    return order;
  }

  // How many of them to read outright, so that those and a sample of the rest are fewest: `sh.rank` places of the
  // order, with `sh.read` tokens to read. `fixed` tokens are read already.
  __device__ __forceinline__ void cut(const uint64_t* order, uint32_t fixed) {
    const double limit = dense_limit(p, w.len), confidence = 4. / 3. * p.log_bounds;
    const uint32_t unread = w.len - fixed;
    double best = INFINITY;
    uint32_t rank = ~0u, read = 0, before = 0;
    for (uint32_t at = 0; at < pages(); at += kPromoteThreads) {
      const uint64_t x = at + tid < pages() ? order[at + tid] : 0;
      const uint32_t left = at + tid < pages() ? bits.unread((uint32_t)x, page_size()) : 0;
      const double weight = __uint_as_float(~(uint32_t)(x >> 32));
      uint32_t total;
      const uint32_t ahead = before + block_exclusive_sum(left, sh.scan, total);
      // The first is looked at whatever is read already.
      if (left > 0 && (ahead == 0 || (double)(ahead + fixed) < limit)) {
        const double cost = ahead + (double)(unread - ahead) * weight * confidence / p.epsilon;
        if (cost < best) best = cost, rank = at + tid, read = ahead;
      }
      before += total;
      if ((double)(before + fixed) >= limit) break;
    }
    cheapest(best, rank, read, sh);
  }

  // The most that a page with unread keys can weigh for each head: in score, and in the norm of its values.
  __device__ __forceinline__ void reach() {
    float most[kGroupMost], norm = -INFINITY;
#pragma unroll
    for (int g = 0; g < kGroupMost; ++g) most[g] = -INFINITY;
    for (uint32_t i = tid; i < pages(); i += kPromoteThreads) {
      if (bits.unread(i, page_size()) == 0) continue;
      norm = fmaxf(norm, page_norm(i));
#pragma unroll
      for (int g = 0; g < kGroupMost; ++g)
        if (g < group) most[g] = fmaxf(most[g], page_score(g, i));
    }
    norm = warp_max(norm);
    if (lane == 0) sh.most[warp][kGroupMost] = norm;
#pragma unroll
    for (int g = 0; g < kGroupMost; ++g) {
      most[g] = warp_max(most[g]);
      if (lane == 0) sh.most[warp][g] = most[g];
    }
    __syncthreads();
    if (warp < group) {
      const float score = warp_max(sh.most[lane][warp]), norm = warp_max(sh.most[lane][kGroupMost]);
      if (lane == 0) p.reach[head(warp) * 2] = score, p.reach[head(warp) * 2 + 1] = norm;
    }
  }

  // What is read beside the list's ranges, ascending; returns how many.
  __device__ __forceinline__ uint32_t list_tokens() {
    uint32_t* ids = p.ids + (int64_t)list * p.capacity;
    uint32_t before = 0;
    for (uint32_t at = 0; at < bits.count(); at += kPromoteThreads) {
      const uint32_t i = at + tid;
      uint32_t left = 0, total;
      if (i < bits.count())
        left = bits.words[i] & ~(range_bits(w.begin[0], w.end[0], i) | range_bits(w.begin[1], w.end[1], i));
      uint32_t to = before + block_exclusive_sum(__popc(left), sh.scan, total);
      for (; left; left &= left - 1, ++to)
        if (to < (uint32_t)p.capacity) ids[to] = i * 32 + __ffs(left) - 1;
      before += total;
    }
    return min(before, (uint32_t)p.capacity);
  }

  // The largest sample that is looked at of `rest` keys; 0 if none is.
  __device__ __forceinline__ uint32_t largest(uint32_t rest) const {
    const double limit = dense_limit(p, w.len);
    uint32_t wanted = max(p.pilot_tokens, 2), last = 0;
    for (int look = 0; look < p.looks; ++look, wanted *= 2) {
      wanted = min(wanted, rest);
      if ((double)(wanted + (w.len - rest)) >= limit) break;
      last = wanted;
    }
    return last;
  }

  __device__ __forceinline__ void run() {
    bits.start(p, w);
    const uint32_t left = residual();
    if (left <= (uint32_t)p.pilot_tokens + p.draw_stride) return read_all(TAPER_WHOLE, left);
    guess(left);
    uint64_t* order = rank_pages();
    const uint32_t fixed = w.len - left + p.draw_stride;
    cut(order, fixed);
    const uint32_t rank = sh.rank, rest = w.len - fixed - sh.read;
    if (!(sh.cost + fixed < dense_limit(p, w.len))) return read_all(TAPER_DENSE, left);
    const uint32_t want = largest(rest);
    if (want == 0) return read_all(TAPER_DENSE, left);
    for (uint32_t i = tid; i < rank; i += kPromoteThreads) bits.mark_page((uint32_t)order[i], page_size());
    __syncthreads();
    reach();
    const uint32_t tokens = list_tokens();
    if (tid > 0) return;
    WorkList work = w;
    work.block_first = work.block_count = 0;
    work.token_first = (uint32_t)list * p.capacity;
    work.token_count = tokens;
    settle(kToLookAt, left, work, rest, want);
  }
};

template <class T, int D>
__global__ void __launch_bounds__(kPromoteThreads) promote_kernel(const CertainParams p) {
  __shared__ PromoteShared sh;
  wait_for_predecessor();
  launch_dependents();
  const int list = blockIdx.x, group = p.q_heads / p.kv_heads;
  const WorkList w = p.lists[list];
  const ReadBits bits{p.bitmaps + (int64_t)list * p.words, w.len};
  Promote<T, D> of{p,    sh,   list, list / p.kv_heads, list % p.kv_heads, group, w, bits, (int)threadIdx.x,
                   (int)threadIdx.x & 31, (int)threadIdx.x >> 5};
  of.run();
}

}  // namespace taper
