#!/bin/sh
# Builds Taper and serves the default model on 127.0.0.1:8080. Arguments go to `taper serve`; with `--device cuda` the build
# has CUDA, which scripts/cuda.sh installs where there is none.
set -eu
cd "$(dirname "$0")/.."
features=
case " $* ${TAPER_DEVICE:-}" in
    *" --device cuda"* | *" --device=cuda"* | *" cuda" | *" cuda:"*)
        environment=$(scripts/cuda.sh)
        eval "$environment"
        features=cuda
        ;;
esac
cargo build --release --package taper --features "$features"
target=${CARGO_TARGET_DIR:-target}
exec "$target/release/taper" serve "$@"
