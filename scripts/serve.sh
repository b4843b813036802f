#!/bin/sh
# Builds Taper and serves the default model on 127.0.0.1:8080. Arguments go to `taper serve`.
set -eu
cd "$(dirname "$0")/.."
cargo build --release --package taper
target=${CARGO_TARGET_DIR:-target}
exec "$target/release/taper" serve "$@"
