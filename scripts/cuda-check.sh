#!/bin/sh
# Type check, with clippy, of the whole workspace with the feature `cuda`. Needs neither a GPU nor a CUDA toolkit.
#
#   scripts/cuda-check.sh [OPTIONS OF cargo clippy]
#
# A check reads no compiled kernel, so build scripts get a stand-in for nvcc, which writes empty files, even where there
# is a real one. Nothing is linked and nothing runs: what is wrong with a kernel (scripts/kernels.sh compiles them), with
# how it is called, with libraries, or on a device alone, is not found here.
set -eu
cd "$(dirname "$0")/.."

mkdir -p "${CARGO_TARGET_DIR:-target}/cuda-check/bin"
CUDA_HOME=$(realpath "${CARGO_TARGET_DIR:-target}/cuda-check")
# The build scripts of candle-kernels and taper-kernels say `-o FILE`, or, for PTX, `--output-directory FOLDER` and a source.
cat >"$CUDA_HOME/nvcc" <<'NVCC'
#!/bin/sh
folder=
while [ $# -gt 0 ]; do
    case $1 in
        -o) shift && : >"$1" ;;
        --output-directory) shift && folder=$1 ;;
        *.cu) [ -z "$folder" ] || : >"$folder/$(basename "$1" .cu).ptx" ;;
    esac
    shift
done
NVCC
chmod +x "$CUDA_HOME/nvcc"
mv "$CUDA_HOME/nvcc" "$CUDA_HOME/bin/nvcc"
NVCC=$CUDA_HOME/bin/nvcc
PATH=$CUDA_HOME/bin:$PATH
# What nvcc and a GPU would be asked for.
CUDARC_CUDA_VERSION=13000
CUDA_COMPUTE_CAP=90
export CUDA_HOME NVCC PATH CUDARC_CUDA_VERSION CUDA_COMPUTE_CAP

# An optimisation level that no other build has keeps what these build scripts write apart from a real build's: that one
# would take empty kernels for its own. The rest is shared with `cargo clippy` without the feature.
set -- --config profile.dev.package.cudarc.opt-level=2 --config profile.dev.package.candle-kernels.opt-level=2 \
    --config profile.dev.package.taper-kernels.opt-level=2 "$@"
exec cargo clippy --workspace --all-targets --features cuda "$@" -- -D warnings
