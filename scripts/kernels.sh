#!/usr/bin/env bash
# Compiles every CUDA kernel for sm_90a (H100, H200) and links them into one library. Needs no GPU.
#
#   scripts/kernels.sh [OUT]     OUT: a folder for the objects, default target/kernels
#
# nvcc 13.0 is taken from the PATH, else from TAPER_CUDA (default target/cuda), where it is installed from
# Python packages on first use. bench/gpu/check.py runs what this makes, on a machine with a GPU:
# TAPER_GPU_LIB=target/kernels/libtaper_gpu.so.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/target/kernels}
cuda=${TAPER_CUDA:-$root/target/cuda}
mkdir -p "$out"

if ! command -v nvcc >/dev/null; then
  if ! compgen -G "$cuda/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc" >/dev/null; then
    python3 -m venv "$cuda"
    # Every part pinned: a newer nvvm or crt than nvcc makes PTX that ptxas rejects.
    "$cuda/bin/pip" install --quiet --no-cache-dir 'cuda-toolkit[nvcc,cudart,crt,cccl]==13.0.2' \
      'nvidia-nvvm==13.0.88' 'nvidia-cuda-crt==13.0.88'
  fi
  CUDA_HOME=$(echo "$cuda"/lib/python3.*/site-packages/nvidia/cu13)
  ln -sfn lib "$CUDA_HOME/lib64"  # where nvcc looks for the runtime
  export CUDA_HOME PATH="$CUDA_HOME/bin:$PATH"
fi

cd "$root"
# The interface is C, for callers in any language.
"${CC:-cc}" -std=c11 -Wall -Wextra -Werror -fsyntax-only -x c kernels/taper_gpu.h
compile() {
  local object
  object=$1/$(basename "$2" .cu).o
  nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC -c "$2" -o "$object"
  echo "$2"
}
export -f compile
rm -f "$out"/*.o
# xargs fails if any of them does.
printf '%s\0' kernels/*/*.cu | xargs -0 -n 1 -P "$(nproc)" bash -c 'compile "$0" "$1"' "$out"
nvcc -shared -gencode=arch=compute_90a,code=sm_90a "$out"/*.o -o "$out/libtaper_gpu.so"
echo "$out/libtaper_gpu.so"
