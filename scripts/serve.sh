#!/bin/sh
# Builds Taper and serves the default model on 127.0.0.1:8080. Arguments go to `taper serve`; where they, the environment or the
# settings file say `cuda` the build has CUDA, which scripts/cuda.sh installs where there is none.
set -eu
device= config=${TAPER_CONFIG:-} last=
for word in "$@"; do
    case $last in
        --device) device=$word ;;
        --config) config=$word ;;
    esac
    case $word in
        --device=*) device=${word#*=} ;;
        --config=*) config=${word#*=} ;;
    esac
    last=$word
done
device=${device:-${TAPER_DEVICE:-}}
if [ -z "$device" ] && [ -n "$config" ]; then
    device=$(sed -n 's/^device *= *"\([^"]*\)".*/\1/p' "$config")
fi
from=$PWD
cd "$(dirname "$0")/.."
features=
case $device in
    cuda | cuda:*)
        environment=$(scripts/cuda.sh)
        eval "$environment"
        features=cuda
        ;;
esac
cargo build --release --package taper --features "$features"
taper=$(realpath "${CARGO_TARGET_DIR:-target}")/release/taper
cd "$from"
exec "$taper" serve "$@"
