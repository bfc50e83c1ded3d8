"""A published model fine-tuned by Motley, by a plain PyTorch loop, and by TRL, in one run.

    python -m pip install trl
    python -m tests.real.data DATA
    python benchmarks/real_model.py MODEL DATA/train.jsonl [--method lora] [--method full]
        [--steps 8] [--repeats 2] [--threads 1] [--backend cpu|cuda]

LoRA of rank 16 on every linear, by PEFT in the loop, and full fine-tuning, in fp32, on a card
autocast to bf16, AdamW at a constant 1e-4, four conversations a step whose last answers are
learned: the same rows in the same order with the same labels for each, so that the first losses are
equal; later ones of LoRA differ by the random start of the adapters. Each is a process of its own,
and they take turns. Tokens are those of the rows, without padding, in all steps but the first: per
second, and per second of the process's processor time, which other load on the machine changes
less. Memory is the largest resident set of the process, which contains files that it maps; for a
card's memory see one_card.py. Of DATA with texts and classes each is a question, and its class the
answer.
JSON: benchmarks/results/real_model.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rig.report import Ratio, Report, skip

from trainer.data.order import permute_epoch

ROWS, RATE, RANK, SEED = 4, 1e-4, 16, 0
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = ("lora", "full")
CONTESTANTS = ("motley", "loop", "trl")
ROUNDED = {"cpu": 1e-3, "cuda": 3e-2}
"""How far first losses may be apart: in fp32, and in bf16, where each rounds elsewhere."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None:
        skip("needs the folder of a model, and data")
    if options.backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("--backend cuda: torch finds no CUDA device", file=sys.stderr)
            return 2
    if options.contestant:
        found = globals()[options.contestant](options)
        found["mib"] = found.get("mib") or _peak(resource.RUSAGE_SELF)
        print("\n" + json.dumps(found))
        return 0
    names = [name for name in CONTESTANTS if name != "trl" or find_spec("trl")]
    report = Report("real_model")
    for method in options.method or METHODS:
        _compare(report, options, method, names)
    return report.write()


def _compare(
    report: Report, options: argparse.Namespace, method: str, names: Sequence[str]
) -> None:
    """Let the contestants take turns, and compare Motley's medians with those of the others."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    fixed = [sys.executable, __file__, str(options.model), str(options.data)]
    for name in ("steps", "threads", "backend"):
        fixed += [f"--{name}", str(getattr(options, name))]
    for _ in range(options.repeats):
        for name in names:
            command = [*fixed, "--method", method, "--contestant", name]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(method, name, runs[name][-1], flush=True)
    middle = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in runs.items()
    }
    for name in names[1:]:
        own, its = middle["motley"], middle[name]
        assert abs(own["first_loss"] - its["first_loss"]) < ROUNDED[options.backend], (own, its)
        for key in ("tokens_per_second", "tokens_per_cpu_second", "mib", "last_loss"):
            better = "higher" if key.startswith("tokens") else "lower"
            what = f"{method}: Motley's {key}"
            report.add(Ratio(what, own[key] / its[key], name, None, better), motley=own, other=its)


def motley(options: argparse.Namespace) -> dict[str, float]:
    """Run `trainer finetune` in one process."""
    constant = ["optimizer.warmup_ratio=0", "optimizer.final_ratio=1"]
    with tempfile.TemporaryDirectory() as output:
        data = Path(output, "data.jsonl")
        data.write_text("".join(_lines(options)), encoding="utf-8")
        command = [sys.executable, "-m", "trainer.cli", "finetune", str(options.model)]
        command += ["--data", str(data), "--max-steps", str(options.steps), "-o", f"{output}/run"]
        command += ["--batch-size", str(ROWS), "--learning-rate", str(RATE)]
        command += ["--gpu-backend", options.backend]
        command += ["--threads", str(options.threads), "--set", "data.validation_fraction=0"]
        (method,) = options.method
        method_settings = [f"lora.lora_rank={RANK}"] if method == "lora" else ["method=full"]
        for setting in [*constant, f"training.seed={SEED}", *method_settings]:
            command += ["--set", setting]
        metrics = Path(output, "run/metrics.jsonl")
        processor: list[float] = []
        with psutil.Popen(command, stdout=subprocess.DEVNULL) as running:
            while running.poll() is None:
                text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
                if text.count('"kind": "step"') > len(processor):
                    processor.append(sum(running.cpu_times()[:2]))
                time.sleep(0.02)
        assert running.returncode == 0, running.returncode
        lines = metrics.read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    assert len(processor) == len(steps), "the steps were seen too late"
    tokens = sum(len(ids) for ids, _ in _rows(options)[ROWS:])
    losses = [step["loss"] for step in steps]
    seconds = steps[-1]["time"] - steps[0]["time"], processor[-1] - processor[0]
    return _result(tokens, seconds, losses) | {"mib": _peak(resource.RUSAGE_CHILDREN)}


def loop(options: argparse.Namespace) -> dict[str, float]:
    """Run the loop of PyTorch's and PEFT's documentation, on padded batches."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32
    )
    if options.method == ["lora"]:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS)
        model = get_peft_model(model, settings)
    device = torch.device(options.backend)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    padding, rows = tokenizer.pad_token_id, _rows(options)
    losses: list[float] = []
    tokens, began = 0, _now()
    for step in range(options.steps):
        if step == 1:
            tokens, began = 0, _now()
        batch = rows[step * ROWS : (step + 1) * ROWS]
        longest = max(len(ids) for ids, _ in batch)
        padded = [
            [values + [fill] * (longest - len(values)) for values in column]
            for column, fill in zip(zip(*batch, strict=True), (padding, -100), strict=True)
        ]
        ids, labels = (torch.tensor(column).to(device) for column in padded)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in batch])
        tokens += int(mask.sum())
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, attention_mask=mask.to(device), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _result(tokens, _between(began, _now()), losses)


def trl(options: argparse.Namespace) -> dict[str, float]:
    """Run TRL's SFTTrainer."""
    import torch
    import transformers
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(options.threads)
    rows, settings = _rows(options), None
    if options.method == ["lora"]:
        from peft import LoraConfig

        settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS)
    times: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(_now())

    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=str(options.model),
            args=SFTConfig(
                output_dir=output,
                max_steps=options.steps,
                per_device_train_batch_size=ROWS,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                weight_decay=0.01,
                train_sampling_strategy="sequential",
                logging_steps=1,
                report_to=[],
                use_cpu=options.backend == "cpu",
                bf16=options.backend == "cuda",
                gradient_checkpointing=False,
                save_strategy="no",
                disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list(
                [{"input_ids": ids, "labels": labels} for ids, labels in rows]
            ),
            peft_config=settings,
            callbacks=[Clock()],
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    tokens = sum(len(ids) for ids, _ in rows[ROWS:])
    return _result(tokens, _between(times[0], times[-1]), losses)


def _lines(options: argparse.Namespace) -> list[str]:
    lines = options.data.read_text(encoding="utf-8").splitlines()
    return [f"{_as_chat(line)}\n" for line in lines[: ROWS * options.steps]]


def _as_chat(line: str) -> str:
    """Return a conversation as it is, and a text with a class as a question and its answer."""
    row = json.loads(line)
    if "messages" in row:
        return line
    turns = {"user": row["input"], "assistant": f"class {row['label']}"}
    return json.dumps({"messages": [{"role": role, "content": turns[role]} for role in turns]})


def _rows(options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels in the order in which Motley trains.

    An answer is learned up to its end token; the line break after it is not.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    found: list[tuple[list[int], list[int]]] = []
    for line in _lines(options):
        turns = json.loads(line)["messages"]
        ids, prompt = (
            tokenizer.apply_chat_template(part, add_generation_prompt=asks, return_dict=False)
            for part, asks in ((turns, False), (turns[:-1], True))
        )
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        labels = [-100] * len(prompt) + ids[len(prompt) : end] + [-100] * (len(ids) - end)
        found.append((ids, labels))
    return [found[place] for place in permute_epoch(SEED, 0, len(found))]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(began: tuple[float, float], ended: tuple[float, float]) -> tuple[float, float]:
    return ended[0] - began[0], ended[1] - began[1]


def _result(tokens: int, seconds: tuple[float, float], losses: list[float]) -> dict[str, float]:
    last = losses[-max(1, len(losses) // 4) :]
    return {
        "tokens_per_second": round(tokens / seconds[0], 1),
        "tokens_per_cpu_second": round(tokens / seconds[1], 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(statistics.mean(last), 4),
    }


def _peak(who: int) -> float:
    return round(resource.getrusage(who).ru_maxrss / 1024, 0)


if __name__ == "__main__":
    sys.exit(main())
