#!/usr/bin/env bash
# Run every benchmark alone, one after the other; each prints its ratio, writes JSON to
# benchmarks/results/ and skips with a reason what this machine does not allow.
# `--list` prints the commands and runs none; MODEL is the published one of tests/real.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
results=benchmarks/results

arguments() { # NAME: what it needs, a line for each of its runs
    case $1 in
    distill) printf '%s\n' bytes scoring "engines --model MODEL" "generate --model MODEL" kv ;;
    keyword_baseline) echo demo/data/train.jsonl demo/data/validation.jsonl ;; # of `make demo`
    *) echo ;;
    esac
}
commands() {
    local file words
    for file in benchmarks/[a-z]*.py; do
        arguments "$(basename "$file" .py)" | while read -r words; do
            echo "$file${words:+ $words}"
        done
    done
}
if [ "${1:-}" = --list ]; then
    commands
    exit
fi

mkdir -p $results
failed=() model=
while read -r -a words; do
    printf '\n==> %s\n' "${words[*]}"
    for at in "${!words[@]}"; do
        [ "${words[at]}" = MODEL ] || continue
        model=${model:-$("$python" -m tests.real.packages)} || model=
        words[at]=$model
    done
    "$python" "${words[@]}" </dev/null || failed+=("${words[*]}")
done < <(commands)
[ ${#failed[@]} = 0 ] || { printf '\nfailed:\n'; printf '  %s\n' "${failed[@]}"; exit 1; }
