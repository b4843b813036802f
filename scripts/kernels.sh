#!/usr/bin/env bash
# Compiles every CUDA kernel for sm_90a (H100, H200), those that need nothing of it for sm_80 (A100) too, and links them
# into one library. Needs no GPU.
#
#   scripts/kernels.sh [OUT]     OUT: a folder for the objects, default target/kernels, or that of CARGO_TARGET_DIR
#
# nvcc 13.0 is taken from the PATH, else from TAPER_CUDA (default ~/.cache/taper/cuda-13.0), where it is installed from
# Python packages on first use. bench/gpu/check.py runs what this makes, on a machine with a GPU:
# TAPER_GPU_LIB=target/kernels/libtaper_gpu.so. The same nvcc builds the feature `cuda` of taper-kernels.
# TAPER_NVCC_FLAGS=-DTAPER_RACECHECK makes a library for compute-sanitizer's racecheck, which follows neither a named
# barrier of part of a thread block (kernels/common/team.cuh) nor a lane that speaks for its warp (common/ptx.cuh); give it a
# folder of its own. With it `compute-sanitizer --tool racecheck python3 check.py --small vattention` reports no hazard.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-${CARGO_TARGET_DIR:-$root/target}/kernels}
cuda=${TAPER_CUDA:-${XDG_CACHE_HOME:-$HOME/.cache}/taper/cuda-13.0}
library=$out/libtaper_gpu.so
cd "$root"

if [ -f "$library" ] && [ -z "$(find kernels scripts/kernels.sh -newer "$library" -type f)" ]; then
  echo "$library is up to date"
  exit
fi

install() {
  # Every part pinned: a newer nvvm or crt than nvcc makes PTX that ptxas rejects.
  python3 -m venv --clear "$cuda" && "$cuda/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
    'cuda-toolkit[nvcc,cudart,crt,cccl]==13.0.2' 'nvidia-nvvm==13.0.88' 'nvidia-cuda-crt==13.0.88' &&
    touch "$cuda/ready"
}
if ! command -v nvcc >/dev/null; then
  if [ ! -e "$cuda/ready" ] && ! install; then
    echo "kernels.sh: nvcc is not on the PATH and could not be installed under $cuda" >&2
    exit 1
  fi
  CUDA_HOME=$(echo "$cuda"/lib/python3.*/site-packages/nvidia/cu13)
  ln -sfn lib "$CUDA_HOME/lib64"  # where nvcc looks for the runtime
  export CUDA_HOME PATH="$CUDA_HOME/bin:$PATH"
fi

mkdir -p "$out"
# The interface is C, for callers in any language.
"${CC:-cc}" -std=c11 -Wall -Wextra -Werror -fsyntax-only -x c kernels/taper_gpu.h
# Without clusters, tensor copies and warpgroup products.
export TAPER_PORTABLE=" append delta distinct features hash layer merge pick project quantized reduce saap score spread stripes walk "
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
