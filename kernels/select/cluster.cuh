// Thread block clusters whose size is chosen at run time: launches, and messages from
// one block's shared memory to another's that complete on the receiver's mbarrier. A
// barrier over the cluster costs a memory fence of the whole device each time; a message
// costs none.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx.cuh"

namespace taper {

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
  return n;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Both by all threads. Enough for "every block has started and initialised its barriers".
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives with all that this thread has written: who waits for the others sees it.
__device__ __forceinline__ void cluster_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The address of the same variable in block `rank`.
__device__ __forceinline__ uint32_t in_block(uint32_t addr, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
// What a block has at the same place of its shared memory.
__device__ __forceinline__ uint32_t read_in_block(const uint32_t& here, uint32_t rank) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(x)
               : "r"(in_block((uint32_t)__cvta_generic_to_shared(&here), rank))
               : "memory");
  return x;
}
__device__ __forceinline__ void write_in_block(uint32_t& there, uint32_t rank, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;"
               :
               : "r"(in_block((uint32_t)__cvta_generic_to_shared(&there), rank)), "r"(x)
               : "memory");
}
__device__ __forceinline__ void send_four(uint32_t to, uint4 v, uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void send_word(uint32_t to, uint64_t value, uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
      "l"(value), "r"(bar)
      : "memory");
}

// Whether the device can run the kernel in clusters of that size at all.
inline bool cluster_fits(const void* kernel, int threads, size_t smem, int cluster) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess ||
      allow_shared(kernel, smem) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = cluster;
  cfg.blockDim = threads;
  cfg.dynamicSmemBytes = smem;
  cudaLaunchAttribute attr[1];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = cluster;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  cfg.attrs = attr;
  cfg.numAttrs = 1;
  int n = 0;
  const bool ok = cudaOccupancyMaxActiveClusters(&n, kernel, &cfg) == cudaSuccess && n > 0;
  if (!ok) cudaGetLastError();
  return ok;
}

}  // namespace taper
