// The best entries of each list of scores, as ascending ids: a given number of them, or
// the fewest whose mass reaches a given share (top-p, find_k).
//
// A radix search over an order-preserving integer form of the score finds the last
// value to take, 8 bits a pass. A cluster of thread blocks a list counts side by side and
// sends its counts to one another's shared memory; scores are read once and kept in
// shared memory, but for what a very long list has too much. Loops are short on purpose:
// unrolled over registers they made up to 60 KB of code, which a cold launch has to fetch.
// Ties go to the lower id and masses are summed as integers, so the
// result is a function of the scores alone. The lists that go on to the decode
// attention are patched in place, without the host.
#pragma once

#include <type_traits>

#include "../common/ptx.cuh"
#include "../common/scan.cuh"
#include "../common/worklist.cuh"
#include "cluster.cuh"
#include "ordered.cuh"
#include "paying.cuh"

namespace taper {

enum SelectReduce : int32_t { kMaxOfGroup = TAPER_MAX_OF_GROUP, kSumOfGroup = TAPER_SUM_OF_GROUP };
// What an entry weighs: nothing (the count decides), or its score.
enum SelectMass : int32_t { kByCount = TAPER_BY_COUNT, kByScore = TAPER_BY_SCORE };

using SelectParams = TaperSelectParams;
using GroupSelectParams = TaperGroupSelectParams;

constexpr int kSelectThreads = 1024, kSelectBins = 256;
constexpr int kClusterMost = 16, kSelectSmem = 220 * 1024;
constexpr uint32_t kSelectKept = 32768;  // scores that a block keeps in any case
constexpr float kMassUnit = 274877906944.f;  // 2^38: 2^25 entries cannot overflow 63 bits

template <class Sum, bool MASSES>
struct SelectShared {
  // Counts of the even and the odd passes; masses by their low and high halves.
  alignas(16) uint32_t bins[2][MASSES ? 2 : 1][kSelectBins];
  uint64_t bars[6], blocks[kClusterMost], tops[kClusterMost];  // one barrier a message round
  Sum warp_sums[kSelectBins / 32];
  Sum found_need, found_size;
  uint32_t found_bin;
  uint2 warps[32];
  PayShared paying;
};

// Four keys of a lane, 32 entries apart, straight from device memory: sixteen loads of four heads on their way at a time.
__device__ __noinline__ uint4 load_keys(const GroupSelectParams& p, const float* scores,
                                        const float* lse, uint32_t at, uint32_t count) {
  float x[4] = {};
#pragma unroll 1
  for (int g = 0; g < p.group; g += 4) {
    const float* row = scores + (int64_t)g * p.base.stride;
    const int heads = min(p.group - g, 4);
    float y[4][4];
#pragma unroll
    for (int h = 0; h < 4; ++h)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        y[h][j] = h < heads && at + 32 * j < count ? row[h * (int64_t)p.base.stride + at + 32 * j] : -INFINITY;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (h >= heads) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (lse) y[h][j] = exp2_fast((y[h][j] - lse[g + h]) * kLog2e);
        x[j] = g + h == 0 ? y[h][j] : p.reduce == kMaxOfGroup ? fmaxf(x[j], y[h][j]) : x[j] + y[h][j];
      }
    }
  }
  return make_uint4(at < count ? ordered(x[0]) : 0, at + 32 < count ? ordered(x[1]) : 0,
                    at + 64 < count ? ordered(x[2]) : 0, at + 96 < count ? ordered(x[3]) : 0);
}

// The mass of an entry in units of the list's heaviest / 2^38.
__device__ __forceinline__ uint64_t mass_of(uint32_t u, float top) {
  const float x = value_of(u);
  return x > 0.f ? (uint64_t)(__fdividef(x, top) * kMassUnit) : 0;
}

template <bool kMasses>
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ GroupSelectParams p, uint32_t room) {
  using Sum = typename std::conditional<kMasses, uint64_t, uint32_t>::type;
  constexpr int kBins = kSelectBins * (kMasses ? 2 : 1);
  // [2][size][kBins] as the blocks sent them, then keys [room], a multiple of 128 a warp.
  extern __shared__ __align__(16) uint32_t inbox[];
  __shared__ SelectShared<Sum, kMasses> sh;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t size = cluster_size(), rank = cluster_rank();
  uint32_t* keys = inbox + (size > 1 ? 2 * size * kBins : 0);
  const uint32_t list = blockIdx.x / size;
  const SelectParams& b = p.base;
  for (int i = tid; i < 2 * kBins; i += kSelectThreads) (&sh.bins[0][0][0])[i] = 0;
  if (size > 1) {
    if (tid == 0) {
      for (int i = 0; i < 6; ++i) mbar_init(smem_u32(&sh.bars[i]), 1);
      mbar_init_fence();
    }
    __syncthreads();
    cluster_arrive();
  }
  wait_for_predecessor();
  launch_dependents();
  const uint32_t begin = b.begins ? b.begins[list] : 0;
  const uint32_t end = b.ends ? b.ends[list] : (uint32_t)b.entries;
  const uint32_t n = end > begin ? end - begin : 0;
  const float* scores = b.scores + (int64_t)list * p.group * b.stride + begin;
  const float* lse = p.lse ? p.lse + (int64_t)list * p.group : nullptr;

  // A warp owns a run of entries, its lanes every 32nd of them.
  const uint32_t share = ((n + size * 32 - 1) / (size * 32) + 127) & ~127u;
  const uint32_t first = min((rank * 32 + warp) * share, n), last = min(first + share, n);
  const uint32_t kept = min(share, room / 32);  // of them in shared memory
  uint32_t* mine = keys + warp * kept;
  uint32_t most = 0;
  // By count the first pass goes with the load: all keys take part in it.
  Sum need = min(min(b.ks ? b.ks[list] : (uint32_t)b.k, n), (uint32_t)b.capacity);
  const bool paying = !kMasses && b.noise > 0.f;
  bool search = paying || (need > 0 && need < n);
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = 0; first + i < last && (!kMasses || i < kept); i += 128) {
    const uint4 x = load_keys(p, scores, lse, first + i + lane, last);
    if (i < kept) {
      mine[i + lane] = x.x, mine[i + 32 + lane] = x.y;
      mine[i + 64 + lane] = x.z, mine[i + 96 + lane] = x.w;
    }
    if (!kMasses && paying) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (pay_counts((&x.x)[j])) atomicAdd(&sh.bins[0][0][pay_bin((&x.x)[j])], 1u);
    } else if (!kMasses && search) {
      atomicAdd(&sh.bins[0][0][x.x >> 24], 1u), atomicAdd(&sh.bins[0][0][x.y >> 24], 1u);
      atomicAdd(&sh.bins[0][0][x.z >> 24], 1u), atomicAdd(&sh.bins[0][0][x.w >> 24], 1u);
    }
  }
  // f(key, index) by whole warps in ascending order.
  auto each = [&](auto f) {
#pragma unroll 1
    for (uint32_t i = 0; first + i < last; i += 128) {
      uint4 x;
      if (i < kept) x = make_uint4(mine[i + lane], mine[i + 32 + lane], mine[i + 64 + lane],
                                   mine[i + 96 + lane]);
      else x = load_keys(p, scores, lse, first + i + lane, last);
      const uint32_t at = first + i + lane;
      f(x.x, at);
      f(x.y, at + 32);
      f(x.z, at + 64);
      f(x.w, at + 96);
    }
  };

  if (size > 1) cluster_wait();  // No block is written to before it has started.
  // One word to every block of the cluster, and theirs.
  auto tell = [&](int round, uint64_t* words, uint64_t value) {
    const uint32_t bar = smem_u32(&sh.bars[round]);
    if (tid == 0) mbar_expect_tx(bar, size * 8);
    if (tid < size) send_word(in_block(smem_u32(words + rank), tid), value, in_block(bar, tid));
    mbar_wait(bar, 0);
  };

  float top = 0.f;
  if constexpr (kMasses) {
    // What is no number is more than any.
    each([&](uint32_t u, uint32_t) { most = max(most, u == 1 ? ~0u : u); });
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) sh.warps[warp].x = most;
    __syncthreads();
    most = __reduce_max_sync(~0u, sh.warps[lane].x);
    if (size > 1) {
      tell(4, sh.tops, most);
      for (uint32_t r = 0; r < size; ++r) most = max(most, (uint32_t)sh.tops[r]);
    }
    top = value_of(most);
  }

  // The key whose first `fixed` bits are `prefix` is the last to take; `need` of those
  // that share them are taken, all above are. By mass `need` counts units until the end.
  uint32_t prefix = 0, fixed = 0;
  float wanted = 0.f;
  if constexpr (kMasses) {
    wanted = p.shares ? p.shares[list] : p.share;
    search = n > 0 && wanted > 0.f && wanted < 1.f && top > 0.f;
    need = n;
    if (!search) {
      // Nothing, all that weighs anything, or everything where not all are numbers.
      fixed = 32, need = 0;
      prefix = wanted <= 0.f ? 0xFFFFFFFFu : most == ~0u ? 0 : ordered(0.f);
    }
  }
  // The lowest key with that prefix; shifts by 32 would not clear the word.
  auto lowest = [&] { return fixed == 0 ? 0u : prefix << (32 - fixed); };
  __syncthreads();
#pragma unroll 1
  for (int pass = 0; pass < 4 && search; ++pass) {
    uint32_t* bins = &sh.bins[pass & 1][0][0];
    const uint32_t shift = 24 - fixed, low = lowest(), span = ~0u >> fixed;
    if (kMasses || pass > 0) each([&](uint32_t u, uint32_t) {
      if (u - low <= span) {
        const uint32_t bin = (u - low) >> shift;
        if constexpr (!kMasses) {
          atomicAdd(&bins[bin], 1u);
        } else {
          const uint64_t m = mass_of(u, top);
          const uint32_t old = atomicAdd(&bins[bin], (uint32_t)m);
          const uint32_t up = (uint32_t)(m >> 32) + (old + (uint32_t)m < old);
          if (up) atomicAdd(&bins[kSelectBins + bin], up);
        }
      }
    });
    __syncthreads();
    if (size > 1) {
      const uint32_t bar = smem_u32(&sh.bars[pass]);
      uint32_t* in = inbox + (pass & 1) * size * kBins;
      if (tid == 0) mbar_expect_tx(bar, size * kBins * 4);
      for (uint32_t i = tid; i < size * (kBins / 4); i += kSelectThreads) {
        const uint32_t to = i / (kBins / 4), four = i % (kBins / 4);
        send_four(in_block(smem_u32(in + rank * kBins + four * 4), to),
                  reinterpret_cast<const uint4*>(bins)[four], in_block(bar, to));
      }
      mbar_wait(bar, 0);
      bins = in;
    }
    if (!kMasses && paying) {
      uint32_t count = 0;
      if (tid < kPayBins)
        for (uint32_t r = 0; r < size; ++r) count += bins[r * kBins + kPayBins - 1 - tid];
      // All from there on: what is equal to the last, too.
      prefix = least_paying(count, n, (uint32_t)need, b.noise, sh.paying);
      fixed = 32, need = n;
      break;
    }
    // Thread t sums bin 255 - t, so that sums run from the top.
    const int bin = kSelectBins - 1 - tid;
    Sum sum = 0, above = 0;
    if (tid < kSelectBins) {
#pragma unroll 4
      for (uint32_t r = 0; r < size; ++r) {
        sum += bins[r * kBins + bin];
        if constexpr (kMasses) sum += (Sum)bins[r * kBins + kSelectBins + bin] << 32;
      }
      above = warp_upto(sum);
      if (lane == 31) sh.warp_sums[warp] = above;
    } else if (pass > 0 && tid < kSelectBins + kBins) {
      // All blocks have these: they sent this pass's after they got them.
      (&sh.bins[~pass & 1][0][0])[tid - kSelectBins] = 0;
    }
    __syncthreads();
    if (tid < kSelectBins) {
      above -= sum;
      Sum total = 0;
#pragma unroll
      for (int w = 0; w < kSelectBins / 32; ++w) {
        const Sum x = sh.warp_sums[w];
        if (w < warp) above += x;
        total += x;
      }
      if constexpr (kMasses) {
        if (pass == 0) {
          const double goal = ceil((double)wanted * (double)total);
          need = goal < 1. ? 1 : (uint64_t)goal;
        }
      }
      if (above < need && need <= above + sum)
        sh.found_bin = bin, sh.found_need = need - above, sh.found_size = sum;
    }
    __syncthreads();
    prefix = (prefix << 8) | sh.found_bin;
    need = sh.found_need;
    fixed += 8;
    // The whole bin is taken: its lower bits do not matter.
    if (!kMasses && need == sh.found_size) break;
  }
  if constexpr (kMasses) {
    if (search) {
      const uint64_t one = mass_of(prefix, top);
      need = one == 0 ? n : (need + one - 1) / one;
    }
  }

  // All above the last value, and the first `need` equal to it. With nothing fixed all
  // keys are equal.
  const uint32_t low = lowest(), high = fixed == 32 ? low : low + (~0u >> fixed);
  uint32_t gt = 0, eq = 0;
  each([&](uint32_t u, uint32_t) { gt += u > high, eq += u >= low; });
  gt = __reduce_add_sync(~0u, gt);
  eq = __reduce_add_sync(~0u, eq) - gt;
  if (lane == 0) sh.warps[warp] = make_uint2(gt, eq);
  __syncthreads();
  uint2 run = sh.warps[lane];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t x = __shfl_up_sync(~0u, run.x, d), y = __shfl_up_sync(~0u, run.y, d);
    if (lane >= d) run.x += x, run.y += y;
  }
  uint2 total = make_uint2(__shfl_sync(~0u, run.x, 31), __shfl_sync(~0u, run.y, 31));
  gt = __shfl_sync(~0u, run.x, warp) - gt;
  eq = __shfl_sync(~0u, run.y, warp) - eq;
  if (size > 1) {
    tell(5, sh.blocks, total.x | (uint64_t)total.y << 32);
    total = make_uint2(0, 0);
    for (uint32_t r = 0; r < size; ++r) {
      const uint2 x = make_uint2((uint32_t)sh.blocks[r], (uint32_t)(sh.blocks[r] >> 32));
      if (r < rank) gt += x.x, eq += x.y;
      total.x += x.x, total.y += x.y;
    }
  }
  const uint32_t capacity = b.capacity;
  const uint32_t equals = (uint32_t)min((uint64_t)need, (uint64_t)total.y);
  const uint32_t k = total.x + equals;
  uint32_t* ids = b.ids + (int64_t)list * capacity;
  each([&](uint32_t u, uint32_t i) {
    const uint32_t below = (1u << lane) - 1, ge = __ballot_sync(~0u, u >= low);
    if (ge == 0) return;
    const uint32_t a = __ballot_sync(~0u, u > high), e = ge & ~a;
    const uint32_t my_eq = eq + __popc(e & below), my_gt = gt + __popc(a & below);
    if (u > high || (u >= low && my_eq < equals)) {
      const uint32_t at = my_gt + min(my_eq, equals);
      if (at < capacity) ids[at] = begin + i;
    }
    gt += __popc(a);
    eq += __popc(e);
  });
  if (tid == 0 && rank == 0) {
    if (b.counts) b.counts[list] = k;
    if (b.work) {
      WorkList w = b.given[list];
      const bool fits = k <= capacity;
      // More than fit: the list reads everything. Its second range ends with the row, as any list's.
      if (!fits) w.begin[0] = 0, w.end[0] = w.begin[1] = w.end[1] = w.len;
      w.token_first = list * capacity;
      w.token_count = fits ? k : 0;
      b.work[list] = w;
    }
  }
}

using SharesParams = TaperSharesParams;
using PagesParams = TaperPagesParams;

// Thread blocks of a list side by side, a thread a token. What the first and the last page have beyond the ranges
// lies at the ends of the list, so that the slice leaves it out.
__global__ void __launch_bounds__(256) pages_kernel(const PagesParams p) {
  wait_for_predecessor();
  launch_dependents();
  const uint32_t list = blockIdx.y, page = p.page, capacity = p.capacity;
  const uint32_t count = min(p.counts[list], capacity);
  const uint32_t* pages = p.pages + (uint64_t)list * capacity;
  uint32_t* ids = p.ids + (uint64_t)list * capacity * page;
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < count * page; i += gridDim.x * 256)
    ids[i] = pages[i / page] * page + i % page;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  WorkList w = p.given[list];
  const uint32_t from = w.end[0], to = w.begin[1];
  uint32_t front = 0, back = 0;
  if (count > 0) {
    const uint32_t first = pages[0] * page, last = (pages[count - 1] + 1) * page;
    front = from > first ? from - first : 0;
    back = last > to ? last - to : 0;
  }
  w.token_first = list * capacity * page + front;
  w.token_count = count > 0 && from < to ? count * page - front - back : 0;
  p.work[list] = w;
}

// A thread a list.
__global__ void __launch_bounds__(256) shares_kernel(const SharesParams p) {
  const int list = blockIdx.x * 256 + threadIdx.x, group = p.q_heads / p.kv_heads;
  launch_dependents();
  wait_for_predecessor();
  if (list >= p.rows * p.kv_heads) return;
  float rest = (float)group;
  for (int head = list * group; head < (list + 1) * group; ++head) rest -= expf(p.held[head] - p.lse[head]);
  rest = fmaxf(rest, 1e-30f);
  p.shares[list] = fmaxf(1.0f - (1.0f - p.p) * group / rest, 0.0f);
}

}  // namespace taper
