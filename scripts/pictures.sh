#!/usr/bin/env bash
# The documentation's pictures: a plan, and the curve of a run on the demo's data and base (`make demo` first).
# Benchmarks draw the others, and `scripts/cable_recording.py` the recording in README.md. `scripts/pictures.sh plan` draws the plan alone, which needs no demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
"$bin/launch" plan --shape 7b --cluster '8xA100-80G nvlink, 2 hosts, 200gbit' --method full --plot docs/plan.svg
[ "${1:-all}" = all ] || exit 0

export MOTLEY_STATE_DIR=$PWD/demo/state
trap '"$bin/launch" cluster down >/dev/null 2>&1 || true' EXIT

rm -rf demo/pictures
"$bin/launch" cluster up --expect-workers 3 --preset quickstart --set output=demo/pictures
"$bin/launch" status --watch </dev/null >/dev/null # until the run's end
"$bin/python" scripts/loss_picture.py demo/pictures
