// Eight numbers of a row at a time: read from 16 bits or fp32, written in fp32.
#pragma once

#include "ptx.cuh"

namespace taper {

template <class T>
__device__ __forceinline__ void load8(const T* from, float (&x)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const T* of = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] = to_float(of[k]);
}
template <>
__device__ __forceinline__ void load8<float>(const float* from, float (&x)[8]) {
  *reinterpret_cast<float4*>(x) = reinterpret_cast<const float4*>(from)[0];
  *reinterpret_cast<float4*>(x + 4) = reinterpret_cast<const float4*>(from)[1];
}
__device__ __forceinline__ void store8(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

}  // namespace taper
