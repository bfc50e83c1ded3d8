#!/usr/bin/env bash
# Run every benchmark alone, one after the other; each prints its ratio, writes JSON to
# benchmarks/results/ and skips with a reason what this machine does not allow.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p benchmarks/results

failed=()
for file in benchmarks/[a-z]*.py; do
    [ -e "$file" ] || { echo "no benchmarks"; exit 1; }
    printf '\n==> %s\n' "$file"
    "${VENV:-.venv}/bin/python" "$file" || failed+=("$file")
done
[ ${#failed[@]} = 0 ] || { printf '\nfailed: %s\n' "${failed[*]}"; exit 1; }
