"""A run that was recorded: a plan in a registry, a status and a history, and no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.distillation import place_distillation
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.records.registry import Registry
from trainer.config import distill_job
from trainer.config.run import load_config
from trainer.exchange.protocol.actions import Step
from trainer.tracking.metrics import MetricsLog
from trainer.tracking.status import StatusFile, first_status

RUN_ID = "demo-20261120-110300-7f3a"
OTHER_ID = "demo-20261121-090000-1c2d"
TAUGHT_ID = "distill-20261121-200000-7f3a"
BEGAN = 1_795_000_000.0
HOSTILE = "<img src=x onerror=window.hacked=1>"


def here(folder: Path) -> Host:
    """Return this machine as a host with a state folder."""
    return Host(
        name="localhost",
        connection="local",
        coordinator=True,
        bind_address="127.0.0.1",
        devices=(Device("cpu", "cpu", name=f"CPU {HOSTILE}"),),
        fill_with_cpu=True,
        state_folder=str(folder),
    )


def setting(run_id: str, folder: Path) -> PlanContext:
    """Return the setting of a run on this machine."""
    return PlanContext(run_id=run_id, trainer_command=("t",), state_folder=str(folder), routes={})


def record(plan: LaunchPlan, folder: Path) -> None:
    """Record a plan in the registry and on the host."""
    run, text = Registry.for_this_user().record_run(plan)
    kept = folder / "runs" / run.run_id
    kept.mkdir(parents=True)
    (kept / "plan.json").write_bytes(text)


class RecordedRun:
    """One run of three workers; worker 1 is lost at step 4 and back at step 6.

    Its steps are half a second apart.
    """

    def __init__(self, folder: Path, run_id: str = RUN_ID) -> None:
        """Take the state folder, which the launcher is to have as well."""
        self.run_id = run_id
        self.logs = folder / "runs" / run_id / "processes"
        self.output = folder / f"output-{run_id}"
        self.output.mkdir(parents=True)
        job = load_config("quickstart", {"output": str(self.output)})
        record(place_run([here(folder)], job, 3, setting(run_id, folder)), folder)
        self._now = BEGAN
        self.metrics = MetricsLog(self.output, clock=lambda: self._now)
        self.status: dict[str, Any] = {
            **first_status(run_id, 20, 3),
            "state": "running",
            "reason": HOSTILE,
            "workers": [
                {"rank": rank, "host": HOSTILE, "state": "active", "samples": 4}
                for rank in range(3)
            ],
        }
        for rank in range(3):
            self.metrics.record_event(
                "joined", 0, rank=rank, host=HOSTILE, device=HOSTILE, backend="cpu"
            )
        self.answer(0)
        for number in range(1, 11):
            self.step(number)
            if number in (4, 10):
                self.answer(number)
        self.metrics.record_validation(10, loss=0.75, accuracy=0.5)
        self.metrics.record_event("verified", 10, at=10, digest="5f" * 32, ranks=[0, 1, 2])

    def answer(self, step: int) -> None:
        """Record the answers to two prompts."""
        for number, prompt in ((1, "How are you?"), (2, HOSTILE)):
            text = f"as at step {step} {HOSTILE}"
            self.metrics.record_answer(
                step, number=number, prompt=prompt, text=text, tokens=4, ended=True
            )

    def step(self, number: int) -> None:
        """Record a step."""
        self._now += 0.5
        if number == 4:
            self.metrics.record_event("lost", 4, rank=1, reason=f"connection of {HOSTILE}")
            self.metrics.record_event("reassigned", 4, rank=1, samples=4, ranks=[0, 2])
        if number == 6:
            self.metrics.record_event(
                "rejoined", 6, rank=1, host=HOSTILE, device="cpu", backend="cpu"
            )
        first = 12 * (number - 1)
        samples = [[0, first, first + 4], [1, first + 4, first + 8], [2, first + 8, first + 12]]
        if 4 <= number < 6:
            samples = [[0, first, first + 6], [2, first + 6, first + 12]]
        ranks = [rank for rank, _, _ in samples]
        self.metrics.record_step(
            Step(
                step=number,
                epoch=0,
                generation=3,
                loss=2.0 / number,
                learning_rate=1e-4,
                grad_norm=1.0,
                seconds=0.5,
                tokens_per_second=1000.0 + number,
                exchange_ms=30.0,
                exchange_bytes=1000,
                exchange_exposed_ms=10.0,
                sample_ranges=samples,
                worker_tokens_per_second=dict.fromkeys(ranks, 300.0),
                worker_seconds={rank: 0.3 + 0.05 * rank for rank in ranks},
                worker_overlap_seconds=dict.fromkeys(ranks, 0.02),
            )
        )
        self.status |= {"step": number, "loss": 2.0 / number, "tokens_per_second": 1000.0 + number}
        StatusFile(self.output).write_if_due(self.status, force=True)  # pyright: ignore[reportArgumentType]

    def finish(self, folder: Path, name: str = HOSTILE) -> None:
        """End it, with a checkpoint, a folder to publish, spending, and its settings.

        Args:
            name: of the model.
        """
        self.metrics.record_validation(10, loss=0.75, accuracy=0.5, confusion=[[3, 1], [2, 4]])
        store = self.output / "checkpoints"
        (store / "step-10").mkdir(parents=True)
        (store / "best").symlink_to("step-10")
        progress = {"step": 10, "model_digest": "aa", "base_digest": "bb", "data_digest": "cc"}
        (store / "step-10" / "run.json").write_text(json.dumps(progress))
        files = {"adapter_model.safetensors": {"size": 1, "blake3": "dd"}}
        (store / "step-10" / "manifest.json").write_text(json.dumps({"files": files}))
        (self.output / "adapter").mkdir()
        (self.output / "adapter" / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# x\n")
        spent = {"host": "localhost", "until": BEGAN, "seconds": 60.0, "measured_seconds": 30.0}
        spent |= {"run_id": self.run_id, "kwh": 0.5, "cost": 1.25, "currency": "EUR"}
        (folder / "spend.jsonl").write_text(json.dumps(spent) + "\n")
        settings = {
            "task": "classify",
            "method": "lora",
            "class_names": [HOSTILE, "safe"],
            "model": {"path": name},
        }
        text = yaml.safe_dump(settings)
        (folder / "runs" / self.run_id / "run.yaml").write_text(text)
        self.status |= {
            "state": "completed",
            "reason": None,
            "exit_code": 0,
            "checkpoint": {"step": 10, "path": str(store / "step-10")},
        }
        StatusFile(self.output).write_if_due(self.status, force=True)  # pyright: ignore[reportArgumentType]

    def log(self, process: str, text: str, attempt: int = 1, *marks: tuple[float, int]) -> None:
        """Add to the log of a process; `marks` are moments and the size that it had then."""
        folder = self.logs / process
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"attempt-{attempt}.log").open("a") as file:
            file.write(text)
        with (folder / f"attempt-{attempt}.times").open("a") as file:
            file.writelines(f"{moment:.3f} {size}\n" for moment, size in marks)


class RecordedDistillation:
    """A distillation: 3 of 4 shards are written and one is damaged, and the student is in its
    second shard; of two scored checkpoints the first is the best."""

    def __init__(self, folder: Path) -> None:
        """Take the state folder, which the launcher is to have as well."""
        self.output, self.logits = folder / "taught", folder / "logits" / "taught"
        job = distill_job.load_job(
            None,
            {
                "logits": "taught",
                "teacher.model": "inputs/teacher",
                "teacher.data": ["inputs/corpus"],
                "student.model": "inputs/student",
                "student.output": str(self.output),
            },
        )
        record(place_distillation([here(folder)], job, setting(TAUGHT_ID, folder)), folder)
        for name in ("shard-00000", "shard-00001", "quarantine/shard-00002.1", "teachers"):
            (self.logits / name).mkdir(parents=True)
        (self.logits / "shard-00003").mkdir()
        shards = [{"number": number, "windows": 10} for number in range(4)]
        (self.logits / "dataset.json").write_text(json.dumps({"shards": shards}))
        (self.output / "checkpoints" / "step-3").mkdir(parents=True)
        metrics = MetricsLog(self.output)
        for number in range(1, 4):
            metrics.record_step(
                Step(
                    step=number,
                    epoch=0,
                    generation=0,
                    loss=5.0 / number,
                    ce=4.0 / number,
                    kl=1.0 / number,
                    learning_rate=1e-4,
                    grad_norm=1.0,
                    seconds=0.5,
                    tokens_per_second=100.0,
                    sample_ranges=[[0, 5 * (number - 1), 5 * number]],
                )
            )
        status: dict[str, Any] = {
            **first_status(TAUGHT_ID, 20, 1),
            "state": "running",
            "step": 3,
            "checkpoint": {"step": 3, "path": str(self.output / "checkpoints" / "step-3")},
        }
        StatusFile(self.output).write_if_due(status, force=True)  # pyright: ignore[reportArgumentType]
        (self.output / "evaluations").mkdir()
        with (self.output / "evaluations" / "evaluations.jsonl").open("w") as file:
            for step, loss in ((2, 2.0), (3, 2.5)):
                score = {
                    "schema": "motley.evaluation/1",
                    "step": step,
                    "digest": str(step),
                    "reason": HOSTILE if step == 3 else None,
                    "rated_by": "loss/loss",
                    "rating": -loss,
                    "tasks": {"loss": {"figures": {"loss": loss}}},
                }
                file.write(json.dumps(score) + "\n")
            file.write('{"step": -1}\n[]\n{"st')


def lines(run: RecordedRun) -> list[dict[str, Any]]:
    """Return what the trainer wrote."""
    text = (run.output / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
