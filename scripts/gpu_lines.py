"""The lines of scripts/gpu_report.sh: what is run on a card, for how long, and how it is rehearsed.

The limits of a part's lines are at most `PART_SECONDS` together. A rehearsal is the same program in
small on the CPU, or on Mesa's llvmpipe, which is a Vulkan device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

PARTS = ("check", "speed", "users", "vulkan")
PART_SECONDS = 480


@dataclass(frozen=True)
class Line:
    """One command of a part.

    `{out}` in it is the folder of results, `{models}` that of model folders, `{gpu}` the adapter,
    `{model}` the folder of a published model: a line with it is left out where none was given.
    The line has `{out}/NAME` for itself: it is removed before the line runs again.
    """

    part: str
    name: str
    limit: int
    """Seconds."""
    command: str
    rehearsal: str
    """Empty: only a card can run it."""
    vulkan: bool = False
    """Whether also its rehearsal needs a Vulkan device."""


_PYTHON = sys.executable
_TRAINER = f"{_PYTHON} -P -m trainer.cli"
_PYTEST = f"{_PYTHON} -P -m pytest -q -p no:cacheprovider -W default"
_ONE_CARD = f"{_PYTHON} benchmarks/one_card.py --models {{models}}"
_TINY = f"{_ONE_CARD} --shape tiny --device cpu --rows 2 --tokens 16 --steps 2 --repeats 1"
_FINETUNE = f"{_TRAINER} finetune {{out}}/model --data {{out}}/data/train.jsonl --max-seq-len 512"
_REAL = f"{_PYTHON} benchmarks/real_model.py --method lora"
_SMALL = "--hidden-size 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --intermediate-size 64"
_MIXED = "tests/contracts/test_f_dp_001_wgpu_processes.py"
_FALLBACK = "tests/contracts/test_f_dp_004.py"
_KILLED = f"{_PYTEST} {_MIXED}::test_a_killed"
_TEACHER = f"{_TRAINER} distill teacher {{out}}/model --data {{out}}/data --out {{out}}/teacher"
_STUDENT = (
    f"{_TRAINER} distill student --teacher-logits {{out}}/teacher --student {{out}}/model"
    " -o {out}/student"
)
_ANSWERS = f"{_PYTHON} benchmarks/distill.py generate --model {{out}}/model"
_STEP = f"{_PYTHON} benchmarks/wgpu_step.py --models {{models}} --gpu {{gpu}}"

LINES = (
    Line(
        "check",
        "ceilings",
        60,
        f"{_PYTHON} benchmarks/ceilings.py",
        f"{_PYTHON} benchmarks/ceilings.py --device cpu --size 256 --mib 16",
    ),
    Line(
        "check",
        "cuda-tests",
        150,
        f"{_PYTEST} -n 4 tests/pretend_cuda tests/trainer/replica/torch/test_torch_limits.py"
        " tests/trainer/replica/torch/test_torch_distillation.py",
        f"{_PYTEST} -n 1 tests/trainer/replica/torch/test_torch_limits.py::test_nan_is_passed_on",
    ),
    Line(
        "check",
        "equal-weights",
        150,
        f"{_PYTEST} {_MIXED} {_FALLBACK} -k 'not killed'",
        f"{_PYTEST} {_FALLBACK}::test_a_device_that_is_named_is_had_or_refused",
    ),
    Line(
        "check",
        "one-seed",
        120,
        f"{_PYTHON} benchmarks/one_seed.py",
        f"{_PYTHON} benchmarks/one_seed.py --backends cpu cpu --steps 2 --precisions fp32",
    ),
    Line(
        "speed",
        "0.6b",
        210,
        f"{_ONE_CARD} --shape 0.6b --rows 4 --tokens 2048 --seconds 200 --profile"
        " --output {out}/one_card-0.6b.json",
        f"{_TINY} --methods lora --profile --seconds 600 --output {{out}}/one_card-0.6b.json",
    ),
    Line(
        "speed",
        "0.6b-rows",
        90,
        f"{_ONE_CARD} --shape 0.6b --rows 16 --tokens 1024 --methods lora --seconds 80"
        " --output {out}/one_card-0.6b-rows.json",
        f"{_TINY} --rows 4 --methods full --seconds 600 --output {{out}}/one_card-0.6b-rows.json",
    ),
    Line(
        "speed",
        "4b",
        180,
        f"{_ONE_CARD} --shape 4b --rows 4 --tokens 2048 --methods lora qlora --recompute"
        " --seconds 170 --output {out}/one_card-4b.json",
        f"{_TINY} --methods qlora --recompute --seconds 600 --output {{out}}/one_card-4b.json",
    ),
    Line(
        "users",
        "data",
        20,
        f"{_TRAINER} generate-data shell-safety --count 2000 -o {{out}}/data",
        f"{_TRAINER} generate-data shell-safety --count 60 --validation-count 10 -o {{out}}/data",
    ),
    Line(
        "users",
        "model",
        30,
        f"{_TRAINER} init-model --data {{out}}/data/train.jsonl -o {{out}}/model",
        f"{_TRAINER} init-model --data {{out}}/data/train.jsonl -o {{out}}/model {_SMALL}"
        " --vocab-size 512",
    ),
    Line(
        "users",
        "finetune-cuda",
        50,
        f"{_FINETUNE} --max-steps 100 -o {{out}}/finetune-cuda --gpu-backend cuda",
        f"{_FINETUNE} --max-steps 3 -o {{out}}/finetune-cuda --gpu-backend cpu",
    ),
    Line(
        "users",
        "finetune-cpu",
        45,
        f"{_FINETUNE} --max-steps 20 -o {{out}}/finetune-cpu --gpu-backend cpu",
        f"{_FINETUNE} --max-steps 3 -o {{out}}/finetune-cpu --gpu-backend cpu",
    ),
    Line(
        "users",
        "real-model",
        70,
        f"{_REAL} {{model}} {{out}}/data/train.jsonl --backend cuda --steps 20 --repeats 1",
        f"{_REAL} {{model}} {{out}}/data/train.jsonl --steps 2 --repeats 1",
    ),
    Line(
        "users",
        "three-workers",
        115,
        f"{_KILLED}_cuda_worker_comes_back",
        f"{_KILLED}_wgpu_worker_comes_back",
        vulkan=True,
    ),
    Line(
        "users",
        "teacher",
        40,
        f"{_TEACHER} --gpu-backend cuda",
        f"{_TEACHER} --gpu-backend cpu --max-seq-len 128",
    ),
    Line(
        "users",
        "student",
        50,
        f"{_STUDENT} --max-steps 50 --gpu-backend cuda",
        f"{_STUDENT} --max-steps 2 --max-seq-len 128 --batch-size 2 --gpu-backend cpu",
    ),
    Line(
        "users",
        "generate",
        60,
        f"{_ANSWERS} --backend cuda",
        f"{_ANSWERS} --tokens 4",
    ),
    Line(
        "vulkan",
        "autotune",
        90,
        f"{_TRAINER} autotune --gpu {{gpu}}",
        f"{_TRAINER} autotune --gpu {{gpu}} --tokens 16",
        vulkan=True,
    ),
    Line(
        "vulkan",
        "products",
        50,
        f"{_PYTHON} benchmarks/wgpu_gemm.py --gpu {{gpu}}",
        f"{_PYTHON} benchmarks/wgpu_gemm.py --gpu {{gpu}} --tokens 16 --repeats 1"
        " --products scores 'one token'",
        vulkan=True,
    ),
    Line(
        "vulkan",
        "teacher-attention",
        40,
        f"{_PYTHON} benchmarks/distill.py kv --gpu {{gpu}}",
        "",
    ),
    Line(
        "vulkan",
        "layer",
        40,
        f"{_STEP} --shape layer --tokens 512 --against cuda",
        f"{_STEP} --shape layer --tokens 16 --against cpu --repeats 1",
        vulkan=True,
    ),
    Line(
        "vulkan",
        "step-0.6b",
        110,
        f"{_STEP} --shape 0.6b --tokens 512 --against cuda",
        f"{_STEP} --shape tiny --tokens 16 --against cpu --repeats 1",
        vulkan=True,
    ),
    Line(
        "vulkan",
        "wgpu-tests",
        100,
        f"{_PYTEST} tests/trainer/replica/wgpu",
        f"{_PYTEST} tests/trainer/replica/wgpu/kernels/test_norm.py",
        vulkan=True,
    ),
)
