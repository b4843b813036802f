#!/bin/sh
# Formatting, lints, a type check of the CUDA build, all tests; clients, a browser and made-up requests against the real
# server; what docker/ says of it.
set -eu
cd "$(dirname "$0")/.."

step() {
    printf '\n== %s\n' "$*"
    "$@"
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets -- -D warnings
step scripts/cuda-check.sh
step cargo xtask tidy
step scripts/kernels.sh
if cargo nextest --version >/dev/null 2>&1; then
    step cargo nextest run --workspace --no-fail-fast
else
    step cargo test --workspace --lib --bins --tests --no-fail-fast
fi
step cargo test --workspace --doc --quiet

# The binary that the tests above built: dev profile, optimised arithmetic. With the tests, whose features it has; without them
# half of the world would be built again.
step cargo build --workspace --bins --tests
TAPER=$(realpath "${CARGO_TARGET_DIR:-target}")/debug/taper
export TAPER

# Each folder of Python tests has an environment of its own, kept between runs.
pytest_in() {
    venv=${XDG_CACHE_HOME:-$HOME/.cache}/taper/python-$(cksum <"$1/requirements.txt" | cut -d ' ' -f 1)
    if [ ! -e "$venv/ready" ]; then
        python3 -m venv --clear "$venv"
        step "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 8 --timeout 60 -r "$1/requirements.txt"
        touch "$venv/ready"
    fi
    step "$venv/bin/python" -m pytest -q -p no:cacheprovider "$1"
}

pytest_in scripts/clients

# A browser for the page, and what reads Prometheus's files: where nobody has them and they can be had, they are installed.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    missing=
    command -v "${CHROMIUM:-chromium}" >/dev/null || missing=chromium
    command -v promtool >/dev/null || missing="$missing prometheus"
    if [ -n "$missing" ]; then
        step apt-get -o Acquire::Retries=5 update -qq
        # shellcheck disable=SC2086
        step env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 install -qq --no-install-recommends $missing
    fi
fi
pytest_in scripts/page

pytest_in docker/tests
