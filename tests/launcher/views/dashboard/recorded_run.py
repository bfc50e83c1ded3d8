"""A run that was recorded: a plan in a registry, a status and a history, and no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place
from launcher.plan.setting import Setting
from launcher.runs.records.registry import Registry
from trainer.config.run import load
from trainer.exchange.protocol.actions import Step
from trainer.tracking.metrics import MetricsLog
from trainer.tracking.status import StatusFile, first_status

RUN_ID = "demo-20261120-110300-7f3a"
HOSTILE = "<img src=x onerror=window.hacked=1>"


class RecordedRun:
    """One run of three workers; worker 1 is lost at step 4 and back at step 6."""

    def __init__(self, folder: Path) -> None:
        """Take the state folder, which the launcher is to have as well."""
        self.output = folder / "output"
        self.output.mkdir(parents=True)
        cpu = Device("cpu", "cpu", name=f"CPU {HOSTILE}")
        here = Host(
            name="localhost",
            connection="local",
            coordinator=True,
            bind_address="127.0.0.1",
            devices=(cpu,),
            fill_with_cpu=True,
            state_folder=str(folder),
        )
        setting = Setting(
            run_id=RUN_ID, trainer_command=("t",), state_folder=str(folder), routes={}
        )
        plan = place([here], load("quickstart", {"output": str(self.output)}), 3, setting)
        run, text = Registry.default().record(plan)
        kept = folder / "runs" / run.run_id
        kept.mkdir(parents=True)
        (kept / "plan.json").write_bytes(text)
        self.metrics = MetricsLog(self.output, tensorboard=False)
        self.status: dict[str, Any] = {
            **first_status(RUN_ID, 20, 3),
            "state": "running",
            "reason": HOSTILE,
            "workers": [
                {"rank": rank, "host": HOSTILE, "state": "active", "samples": 4}
                for rank in range(3)
            ],
        }
        for rank in range(3):
            self.metrics.event("joined", 0, rank=rank, host=HOSTILE, device=HOSTILE, backend="cpu")
        for number in range(1, 11):
            self.step(number)
        self.metrics.validation(10, loss=0.75, accuracy=0.5)
        self.metrics.event("verified", 10, at=10, digest="5f" * 32, ranks=[0, 1, 2])

    def step(self, number: int) -> None:
        """Record a step."""
        if number == 4:
            self.metrics.event("lost", 4, rank=1, reason=f"connection of {HOSTILE}")
            self.metrics.event("redealt", 4, rank=1, samples=4, to=[0, 2])
        if number == 6:
            self.metrics.event("rejoined", 6, rank=1, host=HOSTILE, device="cpu", backend="cpu")
        first = 12 * (number - 1)
        samples = [[0, first, first + 4], [1, first + 4, first + 8], [2, first + 8, first + 12]]
        if 4 <= number < 6:
            samples = [[0, first, first + 6], [2, first + 6, first + 12]]
        ranks = [rank for rank, _, _ in samples]
        self.metrics.step(
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
                exchange_exposed_ms=10.0,
                samples=samples,
                worker_tokens_per_second=dict.fromkeys(ranks, 300.0),
                worker_seconds={rank: 0.3 + 0.05 * rank for rank in ranks},
                worker_overlap_seconds=dict.fromkeys(ranks, 0.02),
            )
        )
        self.status |= {"step": number, "loss": 2.0 / number, "tokens_per_second": 1000.0 + number}
        StatusFile(self.output).update(self.status, force=True)  # pyright: ignore[reportArgumentType]


def lines(run: RecordedRun) -> list[dict[str, Any]]:
    """Return what the trainer wrote."""
    text = (run.output / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
