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

// D[64 x 128] (+)= A (shared) * B (shared); TA, TB: the operand is stored transposed.
#define TAPER_WGMMA_SS_128(TYPE, TA, TB)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"\
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "\
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "\
               "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "\
               "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "\
               "%58, %59, %60, %61, %62, %63"\
               "}, %64, %65, p, 1, 1, " #TA ", " #TB ";\n}"\
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),\
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),\
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),\
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),\
                 "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),\
                 "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),\
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),\
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),\
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),\
                 "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),\
                 "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),\
                 "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),\
                 "+f"(d[62]), "+f"(d[63])\
               : "l"(a), "l"(b), "r"(acc))

// D[64 x 64] (+)= A (registers) * B (shared, stored transposed).
#define TAPER_WGMMA_RS_64(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"\
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "\
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "\
               "%30, %31"\
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"\
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),\
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),\
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),\
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),\
                 "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),\
                 "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])\
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc))

// D[64 x 128] (+)= A (registers) * B (shared, stored transposed).
#define TAPER_WGMMA_RS_128(TYPE)\
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"\
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"\
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "\
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "\
               "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "\
               "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "\
               "%58, %59, %60, %61, %62, %63"\
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"\
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),\
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),\
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),\
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),\
                 "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),\
                 "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),\
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),\
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),\
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),\
                 "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),\
                 "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),\
                 "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),\
                 "+f"(d[62]), "+f"(d[63])\
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

}  // namespace taper
