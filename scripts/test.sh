#!/bin/sh
# Formatting, lints, all tests, and the official OpenAI client against the real server.
set -eu
cd "$(dirname "$0")/.."

step() {
    printf '\n== %s\n' "$*"
    "$@"
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets -- -D warnings
step cargo xtask tidy
step scripts/kernels.sh --if-possible
if cargo nextest --version >/dev/null 2>&1; then
    step cargo nextest run --workspace --no-fail-fast
else
    step cargo test --workspace --lib --bins --tests --no-fail-fast
fi
step cargo test --workspace --doc --quiet

# The client runs in an environment of its own, kept between runs.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/taper
venv=$cache/clients-$(cksum <scripts/clients/requirements.txt | cut -d ' ' -f 1)
if [ ! -e "$venv/ready" ]; then
    python3 -m venv --clear "$venv"
    step "$venv/bin/pip" install --quiet --disable-pip-version-check -r scripts/clients/requirements.txt
    touch "$venv/ready"
fi
# The binary that the tests above built: dev profile, optimised arithmetic. With the tests, whose features it has; without them
# half of the world would be built again.
step cargo build --workspace --bins --tests
TAPER=${CARGO_TARGET_DIR:-target}/debug/taper
export TAPER
step "$venv/bin/python" -m pytest -q -p no:cacheprovider scripts/clients
