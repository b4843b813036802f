// A search by halves through a hierarchy of chunks: which keys the rows of a run read (HiP Attention).
//
// Means of neighbouring queries look for keys. A chunk is halved by way of the half whose middle key scores higher, its
// score is the best that was seen; the best chunks of a stage are cut into the next one's. Tokens that are searched are
// whole blocks and chunks are falling powers of two, so a chunk is a number that says where it begins, and only the one
// that ends where the search ends may be shorter. Chunks do not depend on each other within a stage, so that a
// warpgroup takes 32 of them all the way down, by itself: their keys, as fragments of matrix products in registers,
// meet all lines of mean queries, which lie in shared memory. A thread block takes one run and KV head at a time, all
// KV heads one after the other, whose keys then stay in L2, whose rate is the bound. Nothing depends on which block or
// warp does what: maxima, counts and a stable choice.
#pragma once

#include "../common/eight.cuh"
#include "../common/launch.cuh"
#include "../common/scan.cuh"
#include "../common/wgmma.cuh"
#include "../select/ordered.cuh"

namespace taper {

using SearchParams = TaperSearchParams;
using SearchRun = TaperSearchRun;

static_assert(sizeof(SearchRun) == 80, "shared with the caller");

constexpr int kSearchThreads = 384, kSearchWarps = kSearchThreads / 32;
constexpr int kWarpChunks = 8;    // that a warp halves at a time: 16 keys
constexpr int kProductTiles = 4;  // tiles of 8 lines that a product takes
constexpr int kPassTiles = 16;    // and that shared memory holds
constexpr int kScoreRoom = 1024;  // scores that shared memory holds
constexpr int kDigits = 7;        // of five bits that a score has

// D[64 x 32] (+)= A (registers) * B (shared, K contiguous). With 64 columns registers would do for eight warps of a thread
// block, not for twelve, and more warps have more keys on their way.
#define TAPER_WGMMA_LINES(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" TAPER_NAMES_16\
               "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"\
               : TAPER_D8(0), TAPER_D8(8)\
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(acc))

template <class T>
__device__ __forceinline__ void wgmma_lines(float (&d)[kProductTiles * 4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint64_t b, int acc) {
  if constexpr (kIsBf16<T>) TAPER_WGMMA_LINES("bf16");
  else TAPER_WGMMA_LINES("f16");
}

// A line for each mean and query head of the group, in tiles of 8. A lane that reads a key has 8 of its elements in a
// row, and the next 32 are other lanes', so that one product takes the first 4 of every 8 elements and the next one the
// others: 32 elements of a tile are four matrices, of which each has two elements in a row of every 8, for all lines.
// What fills up the last tile repeats its last line, which changes no maximum.
template <class T, int D>
__global__ void __launch_bounds__(256) search_lines_kernel(const __grid_constant__ SearchParams p) {
  constexpr uint32_t kPieces = D;  // of 8 elements, in a tile of 8 lines
  wait_for_predecessor();
  launch_dependents();
  const SearchRun& run = p.runs[blockIdx.x];
  const uint32_t head = blockIdx.y, group = p.q_heads / p.kv_heads;
  const uint32_t count = run.means * group, pieces = (count + 7) / 8 * kPieces;
  T* to = static_cast<T*>(p.lines) + ((uint64_t)head * p.tiles + run.first_tile) * (kPieces * 8);
  for (uint32_t i = threadIdx.x; i < pieces; i += 256) {
    const uint32_t lane = i % 32, part = i / 32 % (D / 32);
    const uint32_t line = min(i / kPieces * 8 + lane / 4, count - 1);
    const uint2 rows = reinterpret_cast<const uint2*>(p.means)[run.first_mean + line / group];
    const T* from = static_cast<const T*>(p.q) + ((uint64_t)rows.x * p.q_heads + head * group + line % group) * D +
                    (part * 4 + lane % 4) * 8;
    float mean[8] = {};
    for (uint32_t row = 0; row < rows.y; ++row) {
      float x[8];
      load8(from + (uint64_t)row * p.q_heads * D, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) mean[j] += x[j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] /= (float)rows.y;
    uint32_t* words = reinterpret_cast<uint32_t*>(to) + (uint64_t)(i - lane) * 4 + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[32 * j] = pack2<T>(mean[2 * j], mean[2 * j + 1]);
  }
}

// Sums over the warps of a thread block, which all threads ask for together. Two places by turns: whoever writes to one
// knows that all have read what stood there.
struct WarpSums {
  uint32_t (*places)[kSearchWarps];
  int turn;
  // What the warps before this one have, and all.
  __device__ __forceinline__ uint2 operator()(uint32_t own) {
    uint32_t* place = places[turn];
    turn ^= 1;
    if ((threadIdx.x & 31) == 0) place[threadIdx.x >> 5] = own;
    __syncthreads();
    uint2 sums = make_uint2(0, 0);
#pragma unroll
    for (int w = 0; w < kSearchWarps; ++w) {
      const uint32_t x = place[w];
      if (w < (int)(threadIdx.x >> 5)) sums.x += x;
      sums.y += x;
    }
    return sums;
  }
  __device__ __forceinline__ uint32_t all(uint32_t x) { return (*this)(__reduce_add_sync(~0u, x)).y; }
};

// How many threads before this one, and in all, hold one thing or another.
struct Ranks {
  uint32_t one, other, ones, others;
  __device__ __forceinline__ Ranks(WarpSums& sums, bool is_one, bool is_other) {
    const uint32_t below = (1u << (threadIdx.x & 31)) - 1;
    const uint32_t a = __ballot_sync(~0u, is_one), b = __ballot_sync(~0u, is_other);
    const uint2 warps = sums(__popc(a) | __popc(b) << 16);
    one = (warps.x & 0xFFFF) + __popc(a & below), other = (warps.x >> 16) + __popc(b & below);
    ones = warps.y & 0xFFFF, others = warps.y >> 16;
  }
};

// The chunks of a stage: all there are, or those that the chunks kept before it consist of.
struct Chunks {
  const uint32_t* kept;  // null: all
  int shift;             // log2 of how many of these make one of those
  uint32_t count;
  __device__ __forceinline__ uint32_t operator[](uint32_t i) const {
    return kept ? (kept[i >> shift] << shift) + (i & ((1u << shift) - 1)) : i;
  }
};

// One run and KV head.
template <class T, int D>
struct Search {
  static constexpr int kLoads = D / 32;
  const uint4* from;  // lines, in device memory
  uint4* lines;       // some of them, in shared memory
  uint32_t tiles;     // of 8 lines
  const T* keys;      // of the head in block 0
  uint64_t block;     // elements from a block to the next
  const uint32_t* table;
  uint32_t far, near;

  __device__ __forceinline__ uint32_t passes() const { return (tiles + kPassTiles - 1) / kPassTiles; }
  __device__ __forceinline__ void bring(uint32_t pass) {
    const uint4* piece = from + (uint64_t)pass * kPassTiles * kLoads * 32;
    constexpr uint32_t kTile = kLoads * 32;
    const uint32_t here = min(tiles - pass * kPassTiles, (uint32_t)kPassTiles), last = (here - 1) * kTile;
    // Up to a whole product with the last tile.
    const uint32_t end = (here + kProductTiles - 1) / kProductTiles * kProductTiles * kTile;
    for (uint32_t i = threadIdx.x; i < end; i += kSearchThreads)
      lines[i] = piece[i < last ? i : last + i % kTile];
    fence_async_smem();  // Products read them next.
    __syncthreads();
  }
  // Products read it without a swizzle: a matrix has 16 bytes of each of 8 lines, the next 8 lines' is a tile on.
  __device__ __forceinline__ uint64_t lines_desc(uint32_t tile) const {
    const uint64_t at = smem_u32(lines + tile * kLoads * 32);
    return ((at & 0x3FFFF) >> 4) | ((uint64_t)(128 >> 4) << 16) | ((uint64_t)(kLoads * 512 >> 4) << 32);
  }
  __device__ __forceinline__ void load(uint32_t token, uint4 (&key)[kLoads]) const {
    const uint4* at =
        reinterpret_cast<const uint4*>(keys + table[token / kBlock] * block + (uint64_t)(token % kBlock) * D);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) key[i] = __ldcg(at + (threadIdx.x & 3) + 4 * i);
  }
  // Scores of chunks of a size, as integers of the same order; returns how many keys this thread counts as looked at.
  // The first pass over the lines must be in shared memory where there is but one. All threads call it.
  __device__ __forceinline__ uint32_t score(const Chunks& chunks, uint32_t size, uint32_t* scores) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t rounds = passes();
    uint32_t looked = 0;
    for (uint32_t base = 0; base < chunks.count; base += kSearchWarps * kWarpChunks) {
      if (rounds == 1 && base + warp / 4 * 4 * kWarpChunks >= chunks.count) break;  // for a whole warpgroup
      // Lanes of four share a chunk: what is left of it, and the best so far.
      const uint32_t mine = base + warp * kWarpChunks + lane / 4;
      const bool is = mine < chunks.count;
      uint32_t at = far + (is ? chunks[mine] * size : 0), left = is ? min(size, near - at) : 0;
      float best = -INFINITY;
#pragma unroll 1
      for (uint32_t most = size; most > 1; most /= 2) {
        // Row lane / 4 of a warp's 16 is the middle of a chunk's lower half, row lane / 4 + 8 that of the upper one.
        uint4 low[kLoads], high[kLoads];
        float score[2] = {-INFINITY, -INFINITY};
        const uint32_t half = left / 2;
        load(at + half / 2, low);
        load(at + half + (left - half) / 2, high);
#pragma unroll 1
        for (uint32_t pass = 0; pass < rounds; ++pass) {
          if (rounds > 1) {
            __syncthreads();
            bring(pass);
          }
          const uint32_t here = min(tiles - pass * kPassTiles, (uint32_t)kPassTiles);
#pragma unroll 1
          for (uint32_t tile = 0; tile < here; tile += kProductTiles) {
            float c[kProductTiles * 4];
            const uint64_t desc = lines_desc(tile);
            __syncwarp();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
              wgmma_lines<T>(c, low[i].x, high[i].x, low[i].y, high[i].y, desc + (i * 512 >> 4), i > 0);
              wgmma_lines<T>(c, low[i].z, high[i].z, low[i].w, high[i].w, desc + ((i * 512 + 256) >> 4), 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(c);
            // A score that is not a number counts for nothing.
#pragma unroll
            for (int j = 0; j < kProductTiles * 4; ++j) score[j / 2 % 2] = fmaxf(score[j / 2 % 2], c[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int d = 1; d < 4; d *= 2) score[j] = fmaxf(score[j], __shfl_xor_sync(~0u, score[j], d));
        if (left > 1) {
          const bool upper = score[1] > score[0];
          at += upper ? half : 0;
          left = upper ? left - half : half;
          best = fmaxf(best, upper ? score[1] : score[0]);
          looked += (lane & 3) == 0 ? 2 : 0;
        }
      }
      if ((lane & 3) == 0 && is) scores[mine] = ordered(best);
    }
    return looked;
  }
};

// Writes which chunks have the `need` highest scores, ascending; of equals the first. All threads call it, after a
// barrier, and there is one at the end.
__device__ __forceinline__ void keep_best(WarpSums& sums, uint32_t (*digits)[32], const uint32_t* scores,
                                          const Chunks& chunks, uint32_t need, uint32_t* to) {
  for (int i = threadIdx.x; i < kDigits * 32; i += kSearchThreads) digits[0][i] = 0;
  __syncthreads();
  // The lowest that is kept, five bits at a time from the highest on: of the scores that begin as it does, some are kept.
  const uint32_t lane = threadIdx.x & 31;
  uint32_t lowest = 0, equals = need;
  for (int high = 32, low; high > 0; high = low) {
    low = max(high - 5, 0);
    uint32_t* counts = digits[high / 5];
    for (uint32_t i = threadIdx.x; i < chunks.count; i += kSearchThreads) {
      const uint32_t digit = (scores[i] ^ lowest) >> low;
      if (digit < 1u << (high - low)) atomicAdd(&counts[digit], 1);
    }
    __syncthreads();
    // Every warp adds them up for itself, the highest first.
    const uint32_t own = counts[31 - lane], sum = warp_upto(own);
    const int last = __ffs(__ballot_sync(~0u, sum >= equals)) - 1;
    const uint32_t upto = __shfl_sync(~0u, sum, last);
    lowest |= (uint32_t)(31 - last) << low;
    if (upto == equals) break;  // All that begin so are kept.
    equals -= upto - __shfl_sync(~0u, own, last);
  }
  uint32_t above = 0, equal = 0;
  for (uint32_t base = 0; base < chunks.count; base += kSearchThreads) {
    const uint32_t i = base + threadIdx.x, score = i < chunks.count ? scores[i] : 0;
    const bool more = score > lowest, same = i < chunks.count && score == lowest;
    const Ranks ranks(sums, more, same);
    const uint32_t mine = equal + ranks.other;
    if (more || (same && mine < equals)) to[above + ranks.one + min(mine, equals)] = chunks[i];
    above += ranks.ones, equal += ranks.others;
  }
  __syncthreads();
}

// Kept chunks of `size`, fewer tokens than a block has: blocks that are kept whole, and the tokens of all others.
// Returns how many of each. All threads call it.
__device__ __forceinline__ uint2 write_small(WarpSums& sums, const uint32_t* kept, uint32_t count, uint32_t size,
                                             uint32_t far, uint32_t* blocks, uint32_t* columns) {
  const uint32_t per = kBlock / size;
  uint2 written = make_uint2(0, 0);
  for (uint32_t base = 0; base < count; base += kSearchThreads) {
    const uint32_t i = base + threadIdx.x, chunk = i < count ? kept[i] : 0, within = chunk % per;
    bool whole = false;
    if (i < count && i >= within && i - within + per <= count) {
      const uint32_t* first = kept + (i - within);  // if all of the block is there
      whole = first[0] == chunk - within && first[per - 1] == chunk - within + per - 1;
    }
    const bool block = whole && within == 0, single = i < count && !whole;
    const Ranks ranks(sums, block, single);
    if (block) blocks[written.x + ranks.one] = far / kBlock + chunk / per;
    if (single) {
      uint32_t* to = columns + written.y + ranks.other * size;
      for (uint32_t j = 0; j < size; ++j) to[j] = far + chunk * size + j;
    }
    written.x += ranks.ones, written.y += ranks.others * size;
  }
  return written;
}

template <class T, int D>
__global__ void __launch_bounds__(kSearchThreads, 2) search_kernel(const __grid_constant__ SearchParams p) {
  __shared__ __align__(128) uint4 lines[kPassTiles * (D / 32) * 32];
  __shared__ uint32_t few_scores[kScoreRoom], places[2][kSearchWarps], digits[kDigits][32];
  wait_for_predecessor();
  launch_dependents();
  WarpSums sums{places, 0};
  uint32_t* many_scores = p.scratch + blockIdx.x * (p.chunk_room + 2ull * p.kept_room);
  const uint32_t units = (uint32_t)p.kv_heads * p.run_count;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t head = unit / p.run_count, at = p.run_count - 1 - unit % p.run_count;
    const SearchRun& run = p.runs[at];
    const uint32_t list = head * p.run_count + at, far = run.far, near = run.near;
    Search<T, D> search;
    search.lines = lines;
    search.tiles = (run.means * (p.q_heads / p.kv_heads) + 7) / 8;
    search.from = static_cast<const uint4*>(p.lines) + ((uint64_t)head * p.tiles + run.first_tile) * (D / 32 * 32);
    search.keys = static_cast<const T*>(p.k) + (uint64_t)head * kBlock * D;
    search.block = (uint64_t)p.kv_heads * kBlock * D;
    search.table = p.block_table;
    search.far = far, search.near = near;

    uint32_t tokens = near - far, size = 0, looked = 0;  // size 0: nothing was chosen, all is kept
    const uint32_t* kept = nullptr;
    uint32_t *next = many_scores + p.chunk_room, *other = next + p.kept_room;
    bool ready = false;
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      const uint32_t keep = run.keep[stage], chunk = p.chunk[stage];
      if (keep >= tokens) continue;
      if (!ready && search.passes() == 1) {
        __syncthreads();  // All are done with the unit before.
        search.bring(0);
      }
      ready = true;
      const Chunks chunks{kept, kept ? __clz(chunk) - __clz(size) : 0, (tokens + chunk - 1) / chunk};
      uint32_t* scores = chunks.count <= kScoreRoom ? few_scores : many_scores;
      looked += search.score(chunks, chunk, scores);
      __syncthreads();
      const uint32_t need = min(max(keep / chunk, 1u), chunks.count);
      keep_best(sums, digits, scores, chunks, need, next);
      const uint32_t end = far + (next[need - 1] + 1) * chunk;
      tokens = need * chunk - (end > near ? end - near : 0);
      size = chunk, kept = next;
      next = other, other = const_cast<uint32_t*>(kept);
    }

    uint32_t* blocks = p.blocks + p.block_begin[list];
    uint2 written = make_uint2(tokens / kBlock, 0);
    for (uint32_t i = threadIdx.x; i < run.sinks; i += kSearchThreads) blocks[i] = i;
    blocks += run.sinks;
    if (kept && size < kBlock) {
      written = write_small(sums, kept, tokens / size, size, far, blocks, p.columns + p.column_begin[list]);
    } else {
      const uint32_t per = kept ? size / kBlock : 1;
      for (uint32_t i = threadIdx.x; i < written.x; i += kSearchThreads)
        blocks[i] = far / kBlock + (kept ? kept[i / per] * per + i % per : i);
    }
    blocks += written.x;
    const uint32_t beside = run.last + 1 - near / kBlock;
    for (uint32_t i = threadIdx.x; i < beside; i += kSearchThreads) blocks[i] = near / kBlock + i;
    looked = sums.all(looked);
    if (threadIdx.x == 0) {
      p.block_counts[list] = run.sinks + written.x + beside;
      p.column_counts[list] = written.y;
      p.looked[list] = looked;
    }
  }
}

}  // namespace taper
