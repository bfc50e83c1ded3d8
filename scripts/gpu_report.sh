#!/usr/bin/env bash
# Everything that only a real GPU can show, in one go: `scripts/gpu_report.sh [ADAPTER [PEAK]]`, after
# `make setup`. ADAPTER is an index, a PCI address or a part of the name; default: the first GPU. PEAK
# is the card's fp32 TFLOP/s by its data sheet, for the share of it.
# Tunes the card, then measures products, attention (also of a teacher whose keys and values are on
# the card), Qwen3-0.6B- and 4B-shaped steps with random weights (next to torch CUDA where there is
# one), every strategy of torch.distributed on models of these shapes where there are two CUDA cards
# (tokens/s, MFU, peak memory), and a mixed run. JSON goes to benchmarks/results/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
gpu=${1:-}
against=none
"$bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && against=cuda

failed=()
try() {
    printf '\n==> %s\n' "$*"
    "$bin/$@" || failed+=("$*")
}
try trainer autotune --gpu "$gpu"
try python benchmarks/wgpu_gemm.py --gpu "$gpu" ${2:+--peak "$2"}
try python benchmarks/wgpu_attention.py --gpu "$gpu"
try python benchmarks/distill.py kv --gpu "$gpu"
for tokens in 256 512; do
    try python benchmarks/wgpu_step.py --gpu "$gpu" --shape layer --tokens "$tokens"
    try python benchmarks/wgpu_step.py --gpu "$gpu" --shape 0.6b --tokens "$tokens" --against $against
    try python benchmarks/wgpu_step.py --gpu "$gpu" --shape 4b --tokens "$tokens" --against $against
done
cat <<'MARKS'

Marks, published by others for their kernels; ours are the ratios to torch and the products above:
- meganeura (kvark/meganeura, paper/p3hpc/RESULTS.md), fp32 against compiled torch on the same card,
  medians of 35 comparisons: 1.83 times the time forward, 2.47 times forward and backward
- llama.cpp (pull request 11595), products of 4096 x 512 x 14336 by cooperative matrices on an RTX 3090:
  23.1 TFLOP/s with weights in f32, 45.5 in q4_0; Motley's kernels use none: wgpu does not let them (docs/decisions.md)
MARKS
if "$bin/python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    for method in lora qlora full; do
        try python benchmarks/strategies.py --shape 0.6b --method $method
    done
    for method in lora qlora; do
        try python benchmarks/strategies.py --shape 4b --method $method --rows 1
    done
else
    printf '\nskipped: strategies need two CUDA cards\n'
fi
# Every kernel and model on this card, then workers on Vulkan and the CPU with equal hashes; torch's
# own CUDA tests run where there is a CUDA card, and those of ranks over NCCL where each has one.
try pytest -q tests/trainer/replica tests/trainer/run/distributed \
    tests/contracts/test_f_dp_001_wgpu_processes.py tests/contracts/test_f_dp_001_wgpu_distillation.py

[ ${#failed[@]} = 0 ] || { printf '\nfailed:\n'; printf '  %s\n' "${failed[@]}"; exit 1; }
