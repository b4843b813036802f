#!/usr/bin/env bash
# Compiles every CUDA kernel for sm_90a (H100, H200), those that need nothing of it for sm_80 (A100) too, and links them
# into one library. Needs no GPU.
#
#   scripts/kernels.sh [OUT]     OUT: a folder for the objects, default target/kernels, or that of CARGO_TARGET_DIR
#
# Which nvcc, and where one comes from: scripts/cuda.sh. bench/gpu/check.py runs what this makes, on a machine with a GPU:
# TAPER_GPU_LIB=target/kernels/libtaper_gpu.so.
# TAPER_NVCC_FLAGS=-DTAPER_RACECHECK makes a library for compute-sanitizer's racecheck, which follows neither a named
# barrier of part of a thread block (kernels/common/team.cuh) nor a lane that speaks for its warp (common/ptx.cuh); give it a
# folder of its own. With it `compute-sanitizer --tool racecheck python3 check.py --small vattention` reports no hazard.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-${CARGO_TARGET_DIR:-$root/target}/kernels}
library=$out/libtaper_gpu.so
cd "$root"

# The interface is C, for callers in any language; bench/gpu reads it as a compiler does.
python3 bench/gpu/header.py | "${CC:-cc}" -std=c11 -Wall -Wextra -Werror -fsyntax-only -x c -

if [ -f "$library" ] && [ -z "$(find kernels scripts/kernels.sh -newer "$library" -type f)" ]; then
  echo "$library is up to date"
  exit
fi

environment=$(scripts/cuda.sh --compiler)
eval "$environment"

mkdir -p "$out"
# Without clusters, tensor copies and warpgroup products.
export TAPER_PORTABLE=" append delta distinct features hash layer merge pick project quantized reduce score spread stripes walk "
compile() {
  local name older=
  name=$(basename "$2" .cu)
  case $TAPER_PORTABLE in *" $name "*) older=-gencode=arch=compute_80,code=sm_80 ;; esac
  nvcc --options-file kernels/nvcc.flags $older ${TAPER_NVCC_FLAGS:-} -c "$2" -o "$1/$name.o" || return
  echo "$2"
}
export -f compile
rm -f "$out"/*.o
# xargs fails if any of them does.
printf '%s\0' kernels/*/*.cu | xargs -0 -n 1 -P "$(nproc)" bash -c 'compile "$0" "$1"' "$out"
nvcc -shared -gencode=arch=compute_90a,code=sm_90a "$out"/*.o -o "$library"
echo "$library"
