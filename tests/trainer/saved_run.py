"""A run's output folder, as its trainer leaves it, and an eval runner over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.checkpoint.trained_model import TrainedModel
from trainer.evaluate.base import Outcome
from trainer.evaluate.claims import Claims
from trainer.evaluate.results import read_evaluations
from trainer.evaluate.runner import Runner, RunnerOptions
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState
from trainer.replica.backend import Compute

if TYPE_CHECKING:
    from tests.conftest import MakeConfig

CPU = Compute("cpu", threads=1)


class Run:
    """A run's output folder, whose checkpoints have random weights."""

    def __init__(self, output: Path, model: Path, make_config: MakeConfig, **settings: Any) -> None:
        settings = {"task": "causal-lm", "data__max_seq_len": 24, **settings}
        self.output = output
        self._config = make_config(model, **settings)
        self._layout = build_layout(model, self._config)
        self._start = initial_weights(self._layout, model, self._config)
        store = output / "checkpoints"
        self._store = CheckpointStore(store, self._layout, self._config, model)

    def save(self, step: int, scale: float = 0.5) -> Path:
        weights = self._start.copy()
        for slot in self._layout.iter_tensors():
            if slot.name.endswith("lora_B.weight"):
                weights[slot.start : slot.stop] = draw_uniform(step, slot.name, slot.size, scale)
        zeros = np.zeros_like(weights)
        state = TrainState(weights, zeros, zeros.copy(), step=step)
        tree = self._config.model_dump(mode="json")
        return self._store.save(state.take_snapshot(), RunProgress("run", step, 0, 8, 0, 0, tree))

    def status(self, state: str) -> None:
        tree = {"schema": "motley.status/2", "state": state}
        (self.output / "status.json").write_text(json.dumps(tree))

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_evaluations(self.output / "evaluations" / "evaluations.jsonl")


class Probe:
    """A task that does what a test tells it to with the checkpoint's folder."""

    name = "probe"

    def __init__(self, action: Callable[[Path], object] = lambda _: None) -> None:
        self.seen: list[str] = []
        self._action = action

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        self.seen.append(trained.path.name)
        self._action(trained.path)
        return Outcome({"figure": float(trained.path.name[-1])}, "figure")


def runner(run: Run, *tasks: Any, once: bool = True, name: str = "runner", **manner: Any) -> Runner:
    manner = {"every": 0.05, "claim_timeout": 30.0, **manner}
    return Runner(run.output, tasks, CPU, RunnerOptions(name=name, once=once, **manner))


def claims(run: Run, name: str = "other") -> Claims:
    made = Claims(run.output / "evaluations" / "claims", name, 30.0)
    made.read_states()
    return made
