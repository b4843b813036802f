#!/usr/bin/env bash
# compute-sanitizer's racecheck over kernels that check.py does not launch, or not by the lists that the model makes: by
# tests of taper-kernels, each with a few launches of one kernel looked at and all others at full speed.
#
#   bench/gpu/racecheck.sh TEST [OUT]
#
# TEST is the executable that `cargo test --release -p taper-kernels --features cuda --test cuda --no-run` names; OUT a
# folder for the logs. Takes three minutes, under four in any case: what has not ended by then is counted as a failure.
# The barriers of part of a thread block in the kernels below are of whole warpgroups, which racecheck follows; those of
# the sampled steps it does not (scripts/kernels.sh says how these are checked).
#
# Under racecheck a kernel that is launched in clusters fails with status 700 and "failed to handle a hardware exception"
# where it is NOT looked at: seen with version 2025.3.1 on an H100, of a kernel of five lines too that reads no other
# block's memory, whether launches overlap or are waited for. So in a test that launches such kernels (sample, look, token, probe, key_clusters)
# all of them are looked at, every time; and that takes seconds a launch.
set -uo pipefail
binary=$(realpath "$1")
out=${2:-${OUT:-racecheck}}
mkdir -p "$out"
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
# The option has had three names; the latest first, since an older one stays for a while.
known=$("$sanitizer" --help 2>&1)
for filter in --kernel-name --kernel-regex --filter; do
  grep -q -e "$filter" <<<"$known" && break
done

# Test, launches (0: all), kernels.
list='
certain::one_row_is_sampled_by_itself 0 promote_kernel look_kernel sample_kernel
token::one_row_goes_through_every_filter 0 token_kernel
lists::the_best_blocks_by_means_are_those_of_the_cpu 40 means_kernel
lists::the_best_blocks_by_means_are_those_of_the_cpu 40 own_kernel
lists::heads_of_every_kind_beside_each_other_agree_with_the_cpu 24 prefill_kernel
prefill::selections_of_blocks_and_tokens_agree_with_the_cpu 24 prefill_kernel
values::draws_from_any_list_fall_where_they_fall_on_the_cpu 60 walk_kernel
values::draws_from_any_list_fall_where_they_fall_on_the_cpu 60 weigh_kernel
values::draws_from_any_list_fall_where_they_fall_on_the_cpu 60 spread_kernel
values::draws_from_any_list_fall_where_they_fall_on_the_cpu 60 distinct_kernel
values::features_are_drawn_as_on_the_cpu 60 features_kernel
sample::values_drawn_from_scores_are_those_of_the_cpu 40 spread_kernel
step::clusters_of_long_rows_are_those_of_the_cpu 0 probe_kernel
decode::selections_agree_with_the_cpu 24 decode_kernel
select::the_largest_shares_and_the_fewest_that_hold_one_are_those_of_the_cpu 0 select_kernel
project::layers_centroids_and_turns_are_those_of_the_cpu_whatever_the_widths_and_rows 60 project_kernel
project::layers_centroids_and_turns_are_those_of_the_cpu_whatever_the_widths_and_rows 60 project_short_kernel
project::a_key_is_taken_in_alike_alone_and_beside_a_prompt 0 key_clusters_kernel
step::what_scores_choose_is_what_they_choose_on_the_cpu 40 lse_kernel
'

check() {
  local test=$1 launches=$2 filters=() kernel
  shift 2
  for kernel in "$@"; do filters+=("$filter" "kns=$kernel"); done
  local log=$out/${test##*::}.$1.log
  timeout 210 "$sanitizer" --tool racecheck "${filters[@]}" --launch-count "$launches" --error-exitcode 9 \
    "$binary" --exact --test-threads 1 "$test" >"$log" 2>&1
  local code=$? found
  found=$(grep -o 'RACECHECK SUMMARY.*' "$log" | tail -1)
  # A test that was renamed runs nothing and would pass.
  grep -q '^test result: ok. 1 passed' "$log" || found="$found; the test did not pass"
  printf '%-3s %s: %s: %s\n' "$code" "$test" "$*" "${found:-no summary, see $log}"
}
export -f check
export binary out sanitizer filter
results=$(grep . <<<"$list" | xargs -P 8 -L 1 bash -c 'check "$@"' check)
echo "$results"
! grep -qv '^0 .*(0 errors, 0 warnings)$' <<<"$results"
