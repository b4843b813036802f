#!/bin/sh
# All tests that need an H100 or H200: operations beside the CPU's, methods, graphs and tapes, the engine. Without a GPU they fail.
#
#   scripts/gpu-test.sh [--no-run]    --no-run: builds them and leaves it at that
#
# bench/gpu/ has the kernels' own checks.
set -eu
cd "$(dirname "$0")/.."
environment=$(scripts/cuda.sh)
eval "$environment"
packages='-p taper -p taper-kernels -p taper-model -p taper-attention -p taper-engine'
# shellcheck disable=SC2086
cargo test --release $packages --features taper/cuda --lib --test cuda --no-run
[ "${1:-}" != --no-run ] || exit 0
# shellcheck disable=SC2086
cargo test --release $packages --features taper/cuda --test cuda
# shellcheck disable=SC2086
cargo test --release $packages --features taper/cuda --lib -- cuda
