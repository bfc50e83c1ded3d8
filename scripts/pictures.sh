#!/usr/bin/env bash
# The documentation's two pictures, both of one run on the demo's data and base (`make demo` first).
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
export MOTLEY_STATE_DIR=$PWD/demo/state
trap '"$bin/launch" cluster down >/dev/null 2>&1 || true' EXIT

rm -rf demo/pictures
"$bin/launch" cluster up --expect-workers 3 --preset quickstart --set output=demo/pictures
"$bin/python" scripts/status_picture.py
"$bin/launch" status --watch </dev/null >/dev/null # until the run's end
"$bin/python" scripts/loss_picture.py demo/pictures
