#!/usr/bin/env bash
# compute-sanitizer's racecheck over kernels that check.py does not launch, or not by the lists that the model makes: by
# tests of taper-kernels, each with a few launches of one kernel looked at and all others at full speed.
#
#   bench/gpu/racecheck.sh TEST [OUT]
#
# TEST is the executable that `cargo test --release -p taper-kernels --features cuda --test cuda --no-run` names; OUT a
# folder for the logs. Takes under four minutes: what has not ended by then is counted as a failure. The barriers of part
# of a thread block in the kernels below are of whole warpgroups, which racecheck follows; those of the sampled steps
# it does not (scripts/kernels.sh says how these are checked).
set -uo pipefail
binary=$(realpath "$1")
out=${2:-${OUT:-racecheck}}
mkdir -p "$out"
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
# The option has had three names.
known=$("$sanitizer" --help 2>&1)
for filter in --kernel-regex --kernel-name --filter; do
  grep -q -e "$filter" <<<"$known" && break
done

# Test, kernel, launches.
list='
certain::bounds_that_leave_much_open_send_a_head_dense promote_kernel 60
certain::a_sample_beside_the_pages_that_could_weigh_most_is_that_of_the_cpu look_kernel 24
certain::a_row_alone_is_the_row_among_others look_kernel 8
lists::the_best_blocks_by_means_are_those_of_the_cpu means_kernel 40
lists::the_best_blocks_by_means_are_those_of_the_cpu own_kernel 40
lists::heads_of_every_kind_beside_each_other_agree_with_the_cpu prefill_kernel 24
prefill::selections_of_blocks_and_tokens_agree_with_the_cpu prefill_kernel 24
values::draws_from_any_list_fall_where_they_fall_on_the_cpu walk_kernel 60
values::draws_from_any_list_fall_where_they_fall_on_the_cpu weigh_kernel 60
values::draws_from_any_list_fall_where_they_fall_on_the_cpu spread_kernel 60
values::values_of_what_was_chosen_on_the_device_are_those_of_the_cpu distinct_kernel 60
values::features_are_drawn_as_on_the_cpu features_kernel 60
sample::values_drawn_from_scores_are_those_of_the_cpu spread_kernel 40
token::tokens_are_drawn_from_those_that_the_filters_keep token_kernel 40
token::the_likeliest_token_is_the_first_of_the_largest token_kernel 40
'

check() {
  local log=$out/$1.$2.log
  timeout 110 "$sanitizer" --tool racecheck "$filter" "kns=$2" --launch-count "$3" --error-exitcode 9 \
    "$binary" --exact --test-threads 1 "$1" >"$log" 2>&1
  local code=$? found
  found=$(grep -o 'RACECHECK SUMMARY.*' "$log" | tail -1)
  # A test that was renamed runs nothing and would pass.
  grep -q '^test result: ok. 1 passed' "$log" || found="$found; the test did not pass"
  printf '%-3s %-16s %s: %s\n' "$code" "$2" "$1" "${found:-no summary, see $log}"
}
export -f check
export binary out sanitizer filter
results=$(grep . <<<"$list" | xargs -P 8 -L 1 bash -c 'check "$@"' check)
echo "$results"
! grep -qv '^0 .*(0 errors, 0 warnings)$' <<<"$results"
