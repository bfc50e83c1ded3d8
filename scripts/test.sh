#!/usr/bin/env bash
# Run tiers of checks one after the other and sum them up: `scripts/test.sh lint fast vulkan cluster`.
# A failing tier does not hide the next one; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin

lint() {
    "$bin/ruff" check && "$bin/ruff" format --check && "$bin/lint-imports"
}
fast() {
    # By file, since the tests of one share their models. Three for two cores, since many of them
    # wait, and each process imports torch; torch's own threads would only be in each other's way.
    OMP_NUM_THREADS=1 "$bin/pytest" -m 'not slow and not cluster and not testbed and not exhaustive' \
        -n 3 --dist loadfile --durations=10 --ignore tests/trainer/replica/wgpu
}
vulkan() {
    # Apart, since every process compiles its kernels again; they skip without Vulkan.
    "$bin/pytest" tests/trainer/replica/wgpu -m 'not exhaustive' -n 2 --dist loadfile
}
cluster() {
    # Three at a time: they mostly wait. By file, since a file's tests may share one run, and the
    # longest first. Named, since to import all the others costs each process seconds of CPU time.
    local files longest=(tests/soak/test_soak.py tests/trainer/distill/test_student.py
        tests/launcher/installation/test_installation.py tests/launcher/transfer/test_push.py)
    mapfile -t files < <(grep -rlE 'mark\.(cluster|slow)\b' tests --include='test_*.py' | sort)
    "$bin/pytest" "${longest[@]}" "${files[@]}" -m '(cluster or slow) and not exhaustive' -n 3 \
        --dist loadfile --no-loadscope-reorder --durations=15
}
exhaustive() {
    # Further cells of the matrices that the tiers above cover in part.
    local files
    mapfile -t files < <(grep -rlE 'covering\(|mark\.exhaustive\b' tests --include='test_*.py' | sort)
    OMP_NUM_THREADS=1 "$bin/pytest" "${files[@]}" -m 'exhaustive and not testbed' -n 3 \
        --dist loadfile --durations=10
}
testbed() {
    # In one process: the hosts share a lab, and the machine's cores.
    "$bin/pytest" -m testbed --ignore tests/testbed/test_newcomer.py
}
hosts() {
    # Of the test bed what a run of .ci/run has time for: one cluster, from bare hosts through the
    # recipe to a trained model. The faults and all that provisions hosts of its own: testbed.
    "$bin/pytest" -m testbed -s --durations=12 tests/testbed/test_training.py
}
soak() {
    # Other faults every day; the report tells the seed. `make soak` for a length and seed of one's own.
    "$bin/python" -m tests.soak --minutes 10 --seed "$(date +%Y%m%d)"
}
newcomer() {
    # What the README promises: its two commands, whole, on a computer with what it asks for alone.
    "$bin/pytest" -m testbed -s tests/testbed/test_newcomer.py
}

# What failed is said once more at the end, where it is seen even if only the last lines are kept.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
[ -t 1 ] && export PY_COLORS=1 # a pipe is no terminal
summary=() failed=0
for tier in "$@"; do
    printf '\n==> %s\n' "$tier"
    started=$SECONDS
    if "$tier" 2>&1 | tee "$log"; then result=passed; else result=FAILED failed=1; fi
    summary+=("$(printf '%-8s %s  %4d s' "$tier" "$result" $((SECONDS - started)))")
    if [ "$result" = FAILED ]; then
        mapfile -t lines < <(grep -E $'^(\e\\[[0-9;]*m)*(FAILED|ERROR)\\b' "$log")
        summary+=("${lines[@]/#/    }")
    fi
done
printf '\n==> summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
