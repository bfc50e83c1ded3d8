#!/usr/bin/env bash
# The demo: from nothing to a report. Three workers on this machine fine-tune one model.
# Everything it makes is below demo/; nothing is downloaded, nothing needs root or a GPU. A CUDA GPU,
# or a discrete one with Vulkan, is worker 0; VULKAN=software gives that place to Mesa's llvmpipe.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
started=$SECONDS
export MOTLEY_STATE_DIR=$PWD/demo/state

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
show() {
    printf '$ %s\n' "$*"
    "$bin/$@"
}
# Whatever happens, nothing is left running.
trap '"$bin/launch" cluster down --all >/dev/null 2>&1 || true' EXIT

"$bin/launch" cluster down --all >/dev/null 2>&1 || true
rm -rf demo

say "1. Data: shell scripts in five safety classes; validation comes from other templates"
show trainer generate-data shell-safety -o demo/data

say "2. A small Qwen3 with a tokenizer of its own, pre-trained on the scripts' text"
show trainer init-model --data demo/data/train.jsonl -o demo/blank
# Two processes of half the cores each: a model as small as this gains little from a second thread.
show trainer finetune --config pretrain --gpu-backend cpu --role coordinator --gpus 0,1 --bind 127.0.0.1:0

say "3. One coordinator and three workers fine-tune it with LoRA, over mutual TLS"
devices=()
if [ "${VULKAN:-}" = software ]; then
    devices=(-e 'motley_devices=[{backend: wgpu, id: llvmpipe}]')
fi
show launch cluster up --expect-workers 3 --preset quickstart --wait "${devices[@]}"
show launch status
show launch logs worker-2 --tail 3

say "4. Results"
show launch cluster down
"$bin/python" scripts/demo_report.py demo
printf '\nfrom nothing to this line: %d s\n' $((SECONDS - started))
