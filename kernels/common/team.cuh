// Teams: thread blocks of one launch that share a list and meet through counters in
// device memory. A member may wait only for members of its own team.
//
// That is safe if a whole team fits on the device and teams are formed in the order in
// which thread blocks start: the lowest unfinished team is then always on the device.
#pragma once

#include "ptx.cuh"

namespace taper {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ uint32_t fetch_add_release(uint32_t* p, uint32_t x) {
  uint32_t v;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(x) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* p, uint32_t x) {
  uint32_t v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(v)
               : "l"(p), "r"(x)
               : "memory");
  return v;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(uint64_t* p, uint64_t x) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// Words that carry their own flag: they order nothing else.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ __forceinline__ ulonglong2 load_relaxed(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}

// A barrier of some warps of a block. racecheck does not follow a named barrier of fewer threads than
// the block has: compiled with TAPER_RACECHECK the barrier is one in shared memory that every thread
// arrives at, which it follows and which takes some 0.2 us longer.
struct Gate {
  const uint32_t bar;  // an mbarrier for as many arrivals as threads
  const int id, threads;
  uint32_t met = 0;
  __device__ __forceinline__ void meet() {
#ifdef TAPER_RACECHECK
    mbar_arrive(bar);
    while (!mbar_done(bar, met & 1)) {
    }
    ++met;
#else
    __syncwarp();
    bar_sync(id, threads);
#endif
  }
};
// Named barriers; warpgroups that sum tiles use 1 and 2.
constexpr int kConsumersGate = 3, kSieveGate = 4;

// Blocks of one list's team at most; those of short lists may be smaller. What a team has depends on its list alone, so that
// results do not depend on batch or device. (Those of sample/values do as well, but they only deal out what depends on the list.)
constexpr int kTeamBlocks = 128, kTeamMax = 32;
__host__ __device__ inline int team_size(int list_heads) {
  const int n = kTeamBlocks / list_heads;
  return n < 1 ? 1 : n > kTeamMax ? kTeamMax : n;
}

// Counters of a launch: the first line deals out places, then one line of 128 bytes for
// each list. All are 0 before a launch and after it.
constexpr int kTeamLine = 32;
// Words of a list's line: blocks that met and, in the next word, the sampled keys that they told of; blocks that left, that
// have read what the others told.
constexpr int kMetWord = 8, kLeftWord = 16, kHeardWord = 24;

// One thread calls this: the place of its block in the order of starting.
__device__ __forceinline__ uint32_t team_place(uint32_t* sync) {
  const uint32_t place = atomicAdd(sync, 1u);
  if (place == gridDim.x - 1) *sync = 0;  // No block is left to ask.
  return place;
}
// One thread calls this, after a barrier over all whose writes the team is to see.
__device__ __forceinline__ void team_meet(uint32_t* counter, uint32_t until) {
  add_release(counter, 1);
  while (load_acquire(counter) < until) {
  }
}

}  // namespace taper
