// Columns and slashes to lists of key blocks: the form that the prefill attention reads.
//
// Blocks are of 64 tokens, or of a multiple, B. A slash b stands for the diagonals B b .. B b + B - 1 (row less key), which
// cross the key blocks qb - b and qb - b - 1 of query block qb. Both kinds of choice become
// bitmaps first, one pair for each list head; a tile's blocks are then the
// union over its query blocks of the columns up to the diagonal and of the slashes'
// bitmap read backwards. The diagonal always belongs, and block 0 where slashes are of two blocks. Lists have room
// for all blocks up to the diagonal at offsets that the host knows, so nothing is scanned.
#pragma once

#include "../common/launch.cuh"
#include "../common/scan.cuh"
#include "../prefill/tiles.cuh"

namespace taper {

using StripesParams = TaperStripesParams;

// Bits of the chosen columns, and of the blocks back that chosen slashes touch.
__global__ void __launch_bounds__(256) stripe_bits_kernel(const StripesParams p) {
  extern __shared__ uint32_t bits[];
  wait_for_predecessor();
  launch_dependents();
  const uint32_t most = 32u * p.words;
  auto set = [&](uint32_t b) {
    if (b < most) atomicOr(&bits[b / 32], 1u << (b % 32));
  };
  for (int kind = 0; kind < 2; ++kind) {
    const uint32_t* ids = kind == 0 ? p.columns + (int64_t)blockIdx.x * p.column_stride
                                    : p.slashes + (int64_t)blockIdx.x * p.slash_stride;
    const uint32_t room = kind == 0 ? p.column_stride : p.slash_stride;
    const uint32_t* counts = kind == 0 ? p.column_counts : p.slash_counts;
    const uint32_t n = kind == 0 && !p.columns ? 0 : min(counts[blockIdx.x], room);
    for (int i = threadIdx.x; i < p.words; i += 256) bits[i] = 0;
    __syncthreads();
    if (kind == 0 && p.slash == TAPER_TWO_BLOCKS && threadIdx.x == 0) set(0);
    for (uint32_t i = threadIdx.x; i < n; i += 256) {
      const uint32_t b = ids[i];
      if (kind == 1 && p.slash == TAPER_DIAGONALS) {
        set(b / kBlock), set((b + kBlock - 1) / kBlock);
      } else {
        set(b);
        if (kind == 1 && p.slash == TAPER_TWO_BLOCKS) set(b + 1);
      }
    }
    __syncthreads();
    uint32_t* to = p.bitmaps + ((int64_t)blockIdx.x * 2 + kind) * p.words;
    for (int i = threadIdx.x; i < p.words; i += 256) to[i] = bits[i];
    __syncthreads();
  }
}

// Which of the blocks 32 word and on, up to its own, the rows of query block qb read by `columns` and `slashes` [words].
__device__ __forceinline__ uint32_t blocks_read(const uint32_t* columns, const uint32_t* slashes, uint32_t qb,
                                                uint32_t word) {
  if (word * 32 > qb) return 0;
  // Bit i: is slash qb - (32 word + i) chosen? A run of 32 bits ending at `high`.
  const uint32_t high = qb - word * 32, w = high / 32, s = high % 32;
  const uint32_t upper = slashes[w], lower = w > 0 ? slashes[w - 1] : 0;
  uint32_t y = columns[word] | __brev(__funnelshift_l(lower, upper, 31 - s));
  if (w == 0) y = (y | 1u << s) & (s < 31 ? (2u << s) - 1 : ~0u);
  return y;
}

// The same in blocks of 64 tokens, of which each of the bitmaps' has `each`.
__device__ __forceinline__ uint32_t blocks_read_of(const uint32_t* columns, const uint32_t* slashes, uint32_t qb,
                                                   uint32_t word, uint32_t each) {
  if (each == 1) return blocks_read(columns, slashes, qb, word);
  const uint32_t base = word * 32, end = min(base + 32, qb + 1), own = qb / each;
  auto bit = [](const uint32_t* bits, uint32_t at) { return bits[at / 32] >> (at % 32) & 1; };
  uint32_t y = 0;
  for (uint32_t at = base; at < end;) {
    const uint32_t block = at / each, next = min((block + 1) * each, end);
    if (block == own || bit(columns, block) || bit(slashes, own - block)) y |= ~0u >> (32 - (next - at)) << (at - base);
    at = next;
  }
  return y;
}

// One warp a head and tile.
__global__ void __launch_bounds__(128) stripe_lists_kernel(const StripesParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t item = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
  wait_for_predecessor();
  launch_dependents();
  if (item >= (int64_t)p.heads * p.tile_count) return;
  const int head = (int)(item % p.heads);
  const PrefillTile t = p.tiles[item / p.heads];
  const uint32_t first = t.pos_min / kBlock, last = t.pos_max / kBlock;
  const int64_t at = (int64_t)head * p.tile_count + t.id;
  const uint32_t *columns = p.bitmaps + (int64_t)head * 2 * p.words, *slashes = columns + p.words;
  uint32_t* out = p.blocks + p.list_begin[at];
  uint32_t count = 0;
  const bool halves = p.halves && first < last;
  for (uint32_t base = 0; base * 32 <= last; base += 32) {
    const uint32_t word = base + lane;
    uint32_t x = 0, ours = ~0u, others = ~0u;  // of the first query block, of the last
    for (uint32_t qb = first; qb <= last; ++qb) {
      const uint32_t y = blocks_read_of(columns, slashes, qb, word, p.each);
      x |= y;
      if (halves) (qb == first ? ours : others) = y;
    }
    const uint32_t mine = __popc(x), sum = warp_upto(mine);
    for (uint32_t to = count + sum - mine; x; x &= x - 1) {
      const uint32_t bit = __ffs(x) - 1;
      const uint32_t mark = !(others >> bit & 1) ? kFirstRows : !(ours >> bit & 1) ? kOtherRows : 0;
      out[to++] = (word * 32 + bit) | mark;
    }
    count += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) p.counts[at] = count;
}

using BeforeParams = TaperBeforeParams;

// One warp a head and run.
__global__ void __launch_bounds__(128) before_kernel(const BeforeParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t item = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
  wait_for_predecessor();
  launch_dependents();
  if (item >= (int64_t)p.heads * p.runs) return;
  const int head = (int)(item / p.runs);
  const uint32_t own = p.own[item % p.runs];
  const uint32_t *columns = p.bitmaps + (int64_t)head * 2 * p.words, *slashes = columns + p.words;
  uint32_t keys = 0;
  for (uint32_t word = lane; word * 32 < own; word += 32) {
    uint32_t read = blocks_read(columns, slashes, own, word);
    if (own / 32 == word) read &= (1u << (own % 32)) - 1;
    keys += __popc(read) * p.block_tokens;
  }
  const uint32_t n = p.tokens ? min(p.token_counts[head], (uint32_t)p.token_stride) : 0;
  const uint32_t* tokens = p.tokens + (int64_t)head * p.token_stride;
  for (uint32_t i = lane; i < n; i += 32) {
    const uint32_t block = tokens[i] / p.block_tokens;
    if (block < own) keys += ~blocks_read(columns, slashes, own, block / 32) >> (block % 32) & 1;
  }
  keys = __reduce_add_sync(~0u, keys);
  if (lane == 0) p.before[item] = keys;
}

using ColumnsParams = TaperColumnsParams;

// One warp a head and tile.
__global__ void __launch_bounds__(128) drop_columns_kernel(const ColumnsParams p) {
  const int lane = threadIdx.x & 31;
  const int64_t item = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
  wait_for_predecessor();
  launch_dependents();
  if (item >= (int64_t)p.heads * p.tile_count) return;
  const int head = (int)(item % p.heads);
  const PrefillTile t = p.tiles[item / p.heads];
  const int64_t at = (int64_t)head * p.tile_count + t.id;
  const int64_t list = (int64_t)(head * p.list_heads / p.heads) * p.tile_count + t.id;
  const uint32_t* blocks = p.blocks + p.list_begin[list];
  const uint32_t held = p.list_counts[list], n = min(p.counts[head], (uint32_t)p.column_stride);
  uint32_t* out = p.column_ids + p.column_begin[at];
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; i += 32) {
    const uint32_t id = i + lane < n ? p.columns[(int64_t)head * p.column_stride + i + lane] : UINT32_MAX;
    bool keep = id <= t.pos_max;
    uint32_t mark = 0;
    if (keep) {
      uint32_t lo = 0, hi = held;  // the first block not before the column's
      while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (unmarked(blocks[mid]) < id / kBlock) lo = mid + 1;
        else hi = mid;
      }
      if (lo < held && unmarked(blocks[lo]) == id / kBlock) {
        // What only some rows read with its block is there for the others.
        const uint32_t of = blocks[lo] & ~kUnmarked;
        keep = of != 0;
        mark = of ^ ~kUnmarked;
      }
    }
    const uint32_t kept = __ballot_sync(~0u, keep);
    if (keep) out[count + __popc(kept & ((1u << lane) - 1))] = id | mark;
    count += __popc(kept);
  }
  if (lane == 0) p.column_counts[at] = count;
}

}  // namespace taper
