// Rows of a view and the products of one group's queries with them, for one warp.
//
// A tile is 16 rows; the products' inner dimension is permuted so that every lane reads 16
// consecutive bytes straight into its matrix fragment.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

__device__ __forceinline__ uint32_t positive2(uint32_t x, bool keep_positive) {
  // Two 16-bit floats: zero those of the other sign.
  const uint32_t neg = (x >> 15) & 0x00010001u;
  const uint32_t mask = neg * 0xFFFFu;
  return keep_positive ? x & ~mask : x & mask;
}

template <class T, int W, int NT, bool BOUNDS>
struct ViewRows {
  // A lane reads 16 consecutive bytes a load; of 16 labels only 8, and half a fragment.
  static constexpr int kLoads = W < 32 ? 1 : W / 32;
  static constexpr bool kHalf = W == 16;
  static constexpr int kColumns = 8 * NT;  // heads, of which the group's are the first
  const uint32_t* table;
  uint32_t entries, kv_head, kv_heads, per_block, pitch;
  int lane;
  uint4 q[NT][kLoads];

  struct Rows {
    uint4 x[kLoads], y[kLoads];
  };

  static __device__ __forceinline__ uint4 piece(const T* line, int i) {
    if constexpr (kHalf) {
      const uint2 x = reinterpret_cast<const uint2*>(line)[i];
      return make_uint4(x.x, x.y, 0, 0);
    } else {
      return reinterpret_cast<const uint4*>(line)[i];
    }
  }
  // `first`: the group's first query row of W elements.
  __device__ __forceinline__ void load_queries(const void* first, int group) {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const int h = t * 8 + lane / 4;
      const T* src = static_cast<const T*>(first) + (int64_t)(h < group ? h : 0) * W;
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        q[t][i] = h < group ? piece(src, (lane & 3) + 4 * i) : make_uint4(0, 0, 0, 0);
    }
  }
  // Which line of the view an entry is.
  __device__ __forceinline__ uint64_t place(uint32_t e) const {
    e = min(e, entries - 1);
    return ((uint64_t)table[e / per_block] * kv_heads + kv_head) * per_block + e % per_block;
  }
  // The tile that begins at entry `first`.
  __device__ __forceinline__ void fetch(Rows& to, const void* view, uint32_t first) const {
    fetch_lines(to, view, place(first + lane / 4), place(first + lane / 4 + 8));
  }
  // The tile whose rows lane / 4 and lane / 4 + 8 are these lines.
  __device__ __forceinline__ void fetch_lines(Rows& to, const void* view, uint64_t first, uint64_t second) const {
    const T* lo = static_cast<const T*>(view) + first * pitch;
    const T* hi = static_cast<const T*>(view) + second * pitch;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to.x[i] = piece(lo, (lane & 3) + 4 * i);
      to.y[i] = piece(hi, (lane & 3) + 4 * i);
    }
  }
  // Accumulator i of column tile t belongs to head t * 8 + 2 * (lane & 3) + (i & 1) and row
  // lane / 4 + 8 * (i / 2). Bounds: `part` is true for the upper ones.
  __device__ __forceinline__ void multiply(float (&c)[NT][4], const Rows& rows, bool part) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint4 x = rows.x[i], y = rows.y[i];
        uint4 b = q[t][i];
        if (BOUNDS) {
          b = make_uint4(positive2(b.x, part), positive2(b.y, part), positive2(b.z, part),
                         positive2(b.w, part));
        }
        mma_16x8x16<T>(c[t], x.x, y.x, x.y, y.y, b.x, b.y);
        if constexpr (!kHalf) mma_16x8x16<T>(c[t], x.z, y.z, x.w, y.w, b.z, b.w);
      }
  }
};

}  // namespace taper
