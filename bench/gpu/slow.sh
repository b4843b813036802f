#!/usr/bin/env bash
# Whether every launch waits for what it reads: the tests of taper-kernels with the kernels of one file after the other so
# slow that what does not wait for them, or only for what came between, reads what was there before.
#
#   bench/gpu/slow.sh TEST [FILTER...]
#
# TEST is the executable that this names, of a target folder that nothing else has been built in:
#
#   NVCC_APPEND_FLAGS=-DTAPER_SLOW=200 \
#     cargo test --release --target-dir target/slow -p taper-kernels --features cuda --test cuda --no-run
#
# Its kernels do nothing for 200 us once they have let the next launch start. FILTERs are those of the tests; all of them
# keep 16 cores busy for some minutes.
set -uo pipefail
binary=$(realpath "$1")
shift
cd "$(dirname "$0")/../.."
check() {
  local file=$1 log
  shift
  log=$(TAPER_SLOW_FILE=/$file timeout 600 "$binary" --test-threads 3 "$@" 2>&1)
  # Each file says once that it is slow.
  grep -q "slow: .*/$file" <<<"$log" || log='no launch of it'
  printf '%-12s %s\n' "$file" "$(grep '^test result\|^test .* FAILED\|^no launch' <<<"$log" | tr '\n' ' ')"
}
export -f check
export binary
results=$(printf '%s\n' kernels/*/*.cu | xargs -P 8 -I{} bash -c 'check "$(basename {})" "$@"' check "$@")
echo "$results"
! grep -qv 'test result: ok' <<<"$results"
