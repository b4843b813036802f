// Warpgroup matrix instructions (wgmma, sm_90a) in the shapes that the kernels
// use, and their shared-memory descriptors. All operands are bf16 or f16 with
// fp32 accumulators; shared memory holds 128-byte rows under the 128-byte swizzle.
#pragma once

#include "ptx.cuh"

namespace taper {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving reads or writes of an accumulator across the
// asynchronous region.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Descriptor of a tile whose rows are 128 bytes, swizzled in groups of 8 rows
// (1024 bytes). `lead` is the byte distance between 128-byte column panels and
// matters only where the panel direction is the M or N one (transposed operands).
__device__ __forceinline__ uint64_t smem_desc(uint32_t addr, uint32_t lead = 16) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(lead >> 4) << 16) |
         ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 62);
}

// Byte offset of 16-byte chunk `chunk` (0..7) of row `row` under the swizzle.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// D[64 x 8] (+)= A (shared) * B (shared); TA, TB: the operand is stored transposed.
#define TAPER_WGMMA_SS_8(TYPE, TA, TB)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {"\
               "%0, %1, %2, %3"\
               "}, %4, %5, p, 1, 1, " #TA ", " #TB ";\n}"\
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])\
               : "l"(a), "l"(b), "r"(acc))

// D[64 x 16] (+)= A (shared) * B (shared); TA, TB: the operand is stored transposed.
#define TAPER_WGMMA_SS_16(TYPE, TA, TB)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {"\
               "%0, %1, %2, %3, %4, %5, %6, %7"\
               "}, %8, %9, p, 1, 1, " #TA ", " #TB ";\n}"\
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),\
                 "+f"(d[6]), "+f"(d[7])\
               : "l"(a), "l"(b), "r"(acc))

// Accumulators d[i] and on as operands, and their names.
#define TAPER_D8(i)\
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),\
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TAPER_D32(i) TAPER_D8(i), TAPER_D8(i + 8), TAPER_D8(i + 16), TAPER_D8(i + 24)
#define TAPER_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TAPER_NAMES_32\
  TAPER_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TAPER_NAMES_64\
  TAPER_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "\
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// D[64 x 32] and D[64 x 64] (+)= A (shared) * B (shared); TA: A is stored transposed.
#define TAPER_WGMMA_SS_32(TYPE, TA)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" TAPER_NAMES_16\
               "}, %16, %17, p, 1, 1, " #TA ", 0;\n}"\
               : TAPER_D8(0), TAPER_D8(8)\
               : "l"(a), "l"(b), "r"(acc))
#define TAPER_WGMMA_SS_64(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" TAPER_NAMES_32\
               "}, %32, %33, p, 1, 1, 0, 0;\n}"\
               : TAPER_D32(0)\
               : "l"(a), "l"(b), "r"(acc))

// D[64 x 128] (+)= A (shared) * B (shared); TA, TB: the operand is stored transposed.
#define TAPER_WGMMA_SS_128(TYPE, TA, TB)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" TAPER_NAMES_64\
               "}, %64, %65, p, 1, 1, " #TA ", " #TB ";\n}"\
               : TAPER_D32(0), TAPER_D32(32)\
               : "l"(a), "l"(b), "r"(acc))

// D[64 x 64] (+)= A (registers) * B (shared, stored transposed).
#define TAPER_WGMMA_RS_64(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" TAPER_NAMES_32\
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"\
               : TAPER_D32(0)\
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc))

// D[64 x 128] (+)= A (registers) * B (shared, stored transposed).
#define TAPER_WGMMA_RS_128(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" TAPER_NAMES_64\
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"\
               : TAPER_D32(0), TAPER_D32(32)\
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc))

template <class T>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<__nv_bfloat16> = true;

// A and B both from shared memory. TA: A is stored with M contiguous.
template <class T, int N, bool TA>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int acc) {
  if constexpr (N == 8) {
    if constexpr (kIsBf16<T>) {
      if constexpr (TA) TAPER_WGMMA_SS_8("bf16", 1, 0);
      else TAPER_WGMMA_SS_8("bf16", 0, 0);
    } else {
      if constexpr (TA) TAPER_WGMMA_SS_8("f16", 1, 0);
      else TAPER_WGMMA_SS_8("f16", 0, 0);
    }
  } else if constexpr (N == 16) {
    if constexpr (kIsBf16<T>) {
      if constexpr (TA) TAPER_WGMMA_SS_16("bf16", 1, 0);
      else TAPER_WGMMA_SS_16("bf16", 0, 0);
    } else {
      if constexpr (TA) TAPER_WGMMA_SS_16("f16", 1, 0);
      else TAPER_WGMMA_SS_16("f16", 0, 0);
    }
  } else if constexpr (N == 32) {
    if constexpr (kIsBf16<T>) {
      if constexpr (TA) TAPER_WGMMA_SS_32("bf16", 1);
      else TAPER_WGMMA_SS_32("bf16", 0);
    } else {
      if constexpr (TA) TAPER_WGMMA_SS_32("f16", 1);
      else TAPER_WGMMA_SS_32("f16", 0);
    }
  } else if constexpr (N == 64 && !TA) {
    if constexpr (kIsBf16<T>) TAPER_WGMMA_SS_64("bf16");
    else TAPER_WGMMA_SS_64("f16");
  } else {
    static_assert(N == 128 && !TA, "shape not in use");
    if constexpr (kIsBf16<T>) TAPER_WGMMA_SS_128("bf16", 0, 0);
    else TAPER_WGMMA_SS_128("f16", 0, 0);
  }
}

// A from registers, B from shared memory with N contiguous.
template <class T, int N>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                         int acc) {
  if constexpr (N == 64) {
    if constexpr (kIsBf16<T>) TAPER_WGMMA_RS_64("bf16");
    else TAPER_WGMMA_RS_64("f16");
  } else {
    static_assert(N == 128, "shape not in use");
    if constexpr (kIsBf16<T>) TAPER_WGMMA_RS_128("bf16");
    else TAPER_WGMMA_RS_128("f16");
  }
}

// Products of 64 rows with N others, such as keys with queries, both [.., D] in shared memory as tensor copies leave
// them, in panels of 64 elements, so many bytes apart. Done when it returns.
template <class T, int D, int N, int KEYS_APART = 64 * 128, int QUERIES_APART = N * 128>
__device__ __forceinline__ void score_tile(float (&s)[N / 2], uint32_t keys, uint32_t queries) {
  const uint64_t k_desc = smem_desc(keys), q_desc = smem_desc(queries);
  __syncwarp();  // Lanes may have left a wait one by one; the products want whole warps.
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk)
    wgmma_ss<T, N, false>(s, k_desc + (((kk / 4) * KEYS_APART + (kk % 4) * 32) >> 4),
                          q_desc + (((kk / 4) * QUERIES_APART + (kk % 4) * 32) >> 4), kk > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(s);
}

}  // namespace taper
