#!/usr/bin/env bash
# The distillation demo: from nothing to a table of losses. A teacher writes logits, a student learns
# from them while they are written, and an eval runner scores the student's checkpoints: three
# processes on this machine. Everything it makes is below demo-distill/; nothing is downloaded,
# nothing needs root or a GPU. TEACHER=DIR takes a local model with a byte-level BPE as the teacher.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
out=demo-distill
started=$SECONDS

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
show() {
    printf '$ %s\n' "$*"
    "$bin/$@"
}
# Runs in the background; its output goes to NAME.log.
aside() { # NAME COMMAND...
    [ "$quiet" ] || printf '$ %s &\n' "${*:2}"
    "$bin/${@:2}" >"$out/$1.log" 2>&1 &
    pids[$!]=$1
}
# Waits for all that runs aside; the first that fails ends the demo.
together() {
    for pid in "${!pids[@]}"; do
        wait "$pid" || { tail -n 20 "$out/${pids[$pid]}.log"; exit 1; }
        unset "pids[$pid]"
    done
}
declare -A pids=()
quiet=
# Whatever happens, nothing is left running.
trap '[ ${#pids[@]} = 0 ] || kill "${!pids[@]}" 2>/dev/null; wait' EXIT

score() { # SCHEME FLAG...
    aside "teacher-$1" trainer distill teacher "$teacher" --tokenizer $out/tokenizer \
        --data $out/data/student.jsonl --out "$out/logits/$1" --scheme "$@" \
        --max-seq-len 512 --shard-bytes 40000 --dtype float32 --gpu-backend cpu --threads 1
}
learn() { # NAME SEED LOGITS ALPHA
    aside "$1-$2" trainer distill student --teacher-logits "$out/logits/$3" \
        --student-config scripts/demo_distill_student.json --tokenizer $out/tokenizer \
        --validation $out/data/validation.jsonl --alpha "$4" --epochs 2 --batch-size 8 \
        --learning-rate 4e-3 --max-seq-len 512 --set "training.seed=$2" --set checkpoint.every=100 \
        --set checkpoint.keep_last=10 -o "$out/students/$1-$2" --gpu-backend cpu --threads 1
}

rm -rf $out

say "1. Data: sources of Python's standard library; the student gets a fifth of the teacher's"
show python scripts/demo_distill_data.py $out/data

if [ -n "${TEACHER:-}" ]; then
    teacher=$TEACHER
else
    say "2. A teacher: a small Qwen3 with a tokenizer of its own reads all of it"
    teacher=$out/teacher/checkpoints/latest
    show trainer init-model --data $out/data/teacher.jsonl -o $out/blank --vocab-size 2048 \
        --hidden-size 128 --layers 4 --heads 4 --kv-heads 2 --head-dim 32 --intermediate-size 384
    show trainer finetune $out/blank --task causal-lm --method full \
        --data $out/data/teacher.jsonl --max-seq-len 512 --epochs 1 --batch-size 16 \
        --learning-rate 4e-3 --set optimizer.beta2=0.98 --set checkpoint.every=1000 \
        -o $out/teacher --gpu-backend cpu
fi

say "3. The student's tokenizer: the teacher's tokens that the student's text needs most"
show trainer distill trim-tokenizer "$teacher" --data $out/data/student.jsonl --size 1536 \
    -o $out/tokenizer

say "4. At the same time: teacher, student, and an eval runner that scores its checkpoints"
score topk --top-k 32
learn topk 0 topk 0.9
aside evaluate trainer evaluate --watch $out/students/topk-0 --data $out/data/validation.jsonl \
    --until-done --every 1 --gpu-backend cpu --threads 1
together

say "5. The same texts in the other schemes"
score sampled --samples 50
score full
together

say "6. As many steps from each, and from the text alone; three seeds"
for seed in 0 1 2; do
    learn text $seed topk 0
    [ $seed = 0 ] || learn topk $seed topk 0.9
    together
    learn sampled $seed sampled 0.9
    learn full $seed full 0.9
    together
    echo "seed $seed is done"
    quiet=yes # the other commands differ in the seed
done

say "7. Results"
for scheme in topk sampled full; do
    show trainer distill verify $out/logits/$scheme --complete
done
"$bin/python" scripts/demo_distill_report.py $out "$teacher"
printf '\nfrom nothing to this line: %d s\n' $((SECONDS - started))
