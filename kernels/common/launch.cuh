// Host-side helpers: tensor maps over the paged cache and kernel launches that
// may overlap the tail of their predecessor in the stream.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#ifdef TAPER_SLOW
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.cuh"
#endif

#include "../taper_gpu.h"

namespace taper {

enum Dtype : int32_t { kBf16 = TAPER_BF16, kF16 = TAPER_F16 };
constexpr int kBlock = 64;  // Tokens of one cache block, everywhere.

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, looked up at run time so that nothing links to libcuda.
inline EncodeTiled encode_tiled() {
  static EncodeTiled fn = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess)
      p = nullptr;
    return reinterpret_cast<EncodeTiled>(p);
  }();
  return fn;
}

// Rows of head_dim elements; one box is `box_rows` rows by 64 elements (128 bytes). A
// cache [blocks, kv_heads, 64, head_dim] is such rows, a block of one head head_dim / 64
// boxes. No L2 promotion: a box reads every other 128 bytes, and fetching wider lines
// for it cost 5% of the bandwidth.
inline cudaError_t row_map(CUtensorMap* map, const void* base, int dtype, int64_t rows,
                           int head_dim, int box_rows) {
  EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t dims[2] = {(cuuint64_t)head_dim, (cuuint64_t)rows};
  cuuint64_t strides[1] = {(cuuint64_t)head_dim * 2};
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows};
  cuuint32_t step[2] = {1, 1};
  CUresult r = encode(
      map, dtype == kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(base), dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Heads of rows [rows, heads, head_dim]; one box is a group of heads of some rows by 64 elements.
inline cudaError_t group_map(CUtensorMap* map, const void* base, int dtype, int64_t rows, int heads,
                             int head_dim, int group, int box_rows) {
  EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t dims[3] = {(cuuint64_t)head_dim, (cuuint64_t)heads, (cuuint64_t)rows};
  cuuint64_t strides[2] = {(cuuint64_t)head_dim * 2, (cuuint64_t)heads * head_dim * 2};
  cuuint32_t box[3] = {64, (cuuint32_t)group, (cuuint32_t)box_rows};
  cuuint32_t step[3] = {1, 1, 1};
  CUresult r = encode(
      map, dtype == kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
      const_cast<void*>(base), dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline int sm_count() {
  static int n = [] {
    int dev = 0, v = 0;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&v, cudaDevAttrMultiProcessorCount, dev);
    return v;
  }();
  return n;
}

// Whether the device lets a launch start before its predecessor ends: from sm_90 on.
inline bool launches_depend() {
  static const bool is = [] {
    int dev = 0, major = 0;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev);
    return major >= 9;
  }();
  return is;
}

#ifdef TAPER_SLOW
// For bench/gpu/slow.sh: kernels of the file that the environment names let others start, then do nothing for TAPER_SLOW us.
static inline cudaError_t slow_down() {
  static const cudaError_t set = [] {
    const char* file = getenv("TAPER_SLOW_FILE");
    if (!file || !strstr(__BASE_FILE__, file)) return cudaSuccess;
    fprintf(stderr, "slow: %s\n", __BASE_FILE__);
    const uint32_t us = TAPER_SLOW;
    return cudaMemcpyToSymbol(slow_us, &us, sizeof us);
  }();
  return set;
}
#endif

// Lets launches of a kernel take so many bytes of shared memory beside what it declares. What it may take already it keeps:
// another thread may be about to launch it with more.
inline cudaError_t allow_shared(const void* kernel, size_t bytes) {
  static std::mutex lock;
  static auto& allowed = *new std::map<std::pair<int, const void*>, size_t>;  // Threads may launch until the very end.
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const std::lock_guard<std::mutex> held(lock);
  size_t& most = allowed[{device, kernel}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
  if (e == cudaSuccess) most = bytes;
  return e;
}
// Nobody has to ask for so little: with what a kernel declares it is below the 48 KB that any may take.
constexpr size_t kSharedUnasked = 16 * 1024;

// Launches in clusters of `cluster` thread blocks along x, 0: in none; sizes above 8 are not portable, so
// cluster_fits() is asked first. The kernel may start before its predecessor ends and must call
// wait_for_predecessor() before it reads what that one wrote.
template <class... KArgs, class... Args>
static cudaError_t launch_cluster(void (*kernel)(KArgs...), dim3 grid, dim3 block, size_t smem, int cluster,
                                  cudaStream_t stream, Args&&... args) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t e = cudaSuccess;
#ifdef TAPER_SLOW
  e = slow_down();
#endif
  if (e == cudaSuccess && smem > kSharedUnasked) e = allow_shared(function, smem);
  if (e == cudaSuccess && cluster > 8)
    e = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attr[2];
  int count = 0;
  if (launches_depend()) {
    attr[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 0) {
    attr[count].id = cudaLaunchAttributeClusterDimension;
    attr[count++].val.clusterDim = {(unsigned)cluster, 1, 1};
  }
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = grid;
  cfg.blockDim = block;
  cfg.dynamicSmemBytes = smem;
  cfg.stream = stream;
  cfg.attrs = attr;
  cfg.numAttrs = count;
  return cudaLaunchKernelEx(&cfg, kernel, static_cast<KArgs>(args)...);
}
template <class... KArgs, class... Args>
static cudaError_t launch(void (*kernel)(KArgs...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream,
                          Args&&... args) {
  return launch_cluster(kernel, grid, block, smem, 0, stream, std::forward<Args>(args)...);
}

// f(element, size) for an element type and a head size, which are compiled in: `decltype(element)`,
// `decltype(size)::value`.
template <class F>
cudaError_t for_shape(int dtype, int head_dim, F f) {
  auto typed = [&](auto size) {
    return dtype == kBf16 ? f(__nv_bfloat16{}, size) : f(__half{}, size);
  };
  if (head_dim == 128) return typed(std::integral_constant<int, 128>{});
  if (head_dim == 64) return typed(std::integral_constant<int, 64>{});
  return cudaErrorInvalidValue;
}
// f(heads) for a group of up to 16 query heads: the 8 or 16 columns that matrix instructions give it.
template <class F>
cudaError_t for_group(int group, F f) {
  if (group <= 8) return f(std::integral_constant<int, 8>{});
  return f(std::integral_constant<int, 16>{});
}

}  // namespace taper
