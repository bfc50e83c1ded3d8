"""What rounds (DiLoCo) cost in loss against a step at a time, on the demo's model.

    python benchmarks/rounds.py [--demo demo] [--seeds 2] [--jobs 2] [--limit 6]

`make demo` makes the model.

Each run is the preset `quickstart` with the workers' arithmetic and without their processes: four
workers with 40, 30, 20 and 10 % of each round's samples, Motley's inner steps and outer update. A
run of H = 1 is the ordinary schedule; others may begin with ordinary steps. All runs of a seed and
length see the same samples from the same weights, so "gap", of the validation loss, is at equal
tokens. `post-local SGD` averages weights as torch's PostLocalSGDOptimizer does: an outer learning
rate of 1 without momentum.

Finished runs are kept in --work and not repeated. Writes benchmarks/results/rounds.json, and
docs/rounds.svg with --picture; of the longer runs docs/rounds-1000.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rig.demo_model import DEMO, open_demo, require_demo, shards, validate
from rig.picture import picture
from rig.report import Ratio, Report

from benchmarks.compare.picture import TEXT
from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.learning_rate import learning_rate_at
from trainer.optimizer.nesterov import Update
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inner_steps import InnerSteps
from trainer.run.inputs import RunInputs

GOALS = {20: 1.0, 50: 2.0}
"""Percent of the loss that rounds of so many steps may cost at most."""
OUTER = ((0.7, 0.9), (1.0, 0.0))
"""Outer learning rate and momentum: as published, and the mean of weights, Motley's default."""
SHORT, LONG = 420, 1000
"""Inner steps of the runs: the preset's, and as many as rounds of 50 need."""
COLOURS = {1: TEXT, 20: "#68a0b3", 50: "#f0c674"}
AFTER = "#b5bd68"
"""The colour of rounds after ordinary steps."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    inner_steps: int
    """In a round; 1 is the ordinary schedule."""
    steps: int
    """Inner steps of the run."""
    rate: float = 0.7
    momentum: float = 0.9
    """Of the outer update."""
    settle: int = 0
    """Rounds between settled ones; 0 settles at the end alone."""
    after: int = 0
    """Ordinary steps before the first round."""
    seed: int = 0

    @property
    def file(self) -> str:
        """A name for its result."""
        outer = f"-{self.rate:g}-{self.momentum:g}-{self.settle}" if self.inner_steps > 1 else ""
        outer += f"-after-{self.after}" if self.after else ""
        return f"{self.inner_steps}-{self.steps}{outer}-{self.seed}.json"

    @property
    def title(self) -> str:
        """What it is called in the report."""
        if self.inner_steps == 1:
            return f"every step, {self.steps} steps"
        outer = f"outer rate {self.rate:g}, momentum {self.momentum:g}"
        if (self.rate, self.momentum) == (1, 0):
            outer = "post-local SGD"
        settled = f", settled every {self.settle} rounds" if self.settle else ""
        after = f" after {self.after}" if self.after else ""
        return f"H = {self.inner_steps}{after}, {self.steps} steps, {outer}{settled}"


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return every run, those that answer most first."""
    found: list[Case] = []
    for seed in seeds:
        first = [
            *(Case(1, SHORT), Case(20, SHORT, 1.0, 0.0, after=100), Case(20, SHORT, after=100)),
            *(Case(20, SHORT, 1.0, 0.0), Case(20, SHORT), Case(50, SHORT)),
            *(Case(20, SHORT, 0.7, 0.5), Case(20, SHORT, settle=1), Case(50, SHORT, 1.0, 0.0)),
            *(Case(1, LONG), Case(50, LONG, 1.0, 0.0), Case(50, LONG), Case(20, LONG)),
        ]
        found += [replace(case, seed=seed) for case in first]
    return found


def main() -> int:
    """Train all cases that are missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: rounds in the demo's folder")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, choices=(SHORT, LONG), help="train such runs alone")
    parser.add_argument("--limit", type=int, help="train at most so many of the missing runs")
    parser.add_argument("--picture", action="store_true", help="draw the curves into docs/")
    options = parser.parse_args()
    require_demo(options.demo)
    work: Path = options.work or options.demo / "rounds"
    work.mkdir(exist_ok=True)
    wanted = cases(range(options.seeds))
    missing = [
        case
        for case in wanted
        if options.steps in (None, case.steps) and not (work / case.file).exists()
    ][: options.limit]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        runs = {pool.submit(train, options.demo.resolve(), case): case for case in missing}
        for run in as_completed(runs):
            case, found = runs[run], run.result()
            (work / case.file).write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(f"{case.title}, seed {case.seed}: {found['loss']:.4f}", flush=True)
    done = {
        case: json.loads((work / case.file).read_text(encoding="utf-8"))
        for case in wanted
        if (work / case.file).exists()
    }
    if options.picture:
        for steps in {case.steps for case in done if case.inner_steps > 1}:
            draw(done, steps)
    return report(done)


def train(demo: Path, case: Case) -> dict[str, Any]:
    """Train one case; return its losses and what a worker sent."""
    inputs, replica = open_demo(
        demo,
        case.steps,
        training__seed=case.seed,
        exchange__outer_learning_rate=case.rate,
        exchange__outer_momentum=case.momentum,
    )
    training = inputs.config.training
    settle = (case.settle,) if case.settle else ()
    plan = StepPlan(
        inputs.samples, training.batch_size, training.epochs, case.steps, settle_every=settle
    ).with_rounds((case.after, case.inner_steps) if case.inner_steps > 1 else None)
    steps = Steps(inputs, replica)
    run: Steps | Rounds = steps
    assert isinstance(inputs.train, Dataset)
    losses: list[float] = []
    for step in range(plan.total_steps):
        at = plan.at(step)
        order = epoch_order(training.seed, at.epoch, len(inputs.train))
        batch = [inputs.train[int(index)] for index in order[at.start : at.stop]]
        if step == plan.first_round:
            run = Rounds(inputs, replica, plan, steps.state)
        losses.append(run.step(step, batch))
    size = inputs.layout.size
    settled = sum(plan.settles(step) and plan.is_round(step) for step in range(plan.total_steps))
    return {
        **asdict(case),
        **validate(inputs, replica),
        "training_losses": [round(value, 5) for value in losses],
        "samples": [plan.inner(step).stop * training.batch_size for step in range(len(losses))],
        "fp32_bytes_an_inner_step": 4 * size * (plan.total_steps + settled) / case.steps,
    }


class Steps:
    """The ordinary schedule: one AdamW step on the mean of all workers' gradients."""

    def __init__(self, inputs: RunInputs, replica: TorchReplica) -> None:
        self._config, self._layout, self._replica = inputs.config, inputs.layout, replica
        self._total = inputs.plan.total_inner
        self._optimizer = AdamW(inputs.config.optimizer, inputs.layout)
        self.state = TrainState.fresh(
            initial_weights(inputs.layout, inputs.model_dir, inputs.config)
        )
        replica.write_trainable(self.state.weights)

    def step(self, step: int, batch: Sequence[Any]) -> float:
        """Apply a step and return its mean loss."""
        average = np.zeros(self._layout.size, np.float32)

        def add(index: int, values: np.ndarray) -> None:
            block = self._layout.blocks[index]
            average[block.start : block.stop] += values

        results = [
            self._replica.forward_backward(batch[start:stop], add)
            for start, stop in shards(len(batch))
        ]
        average /= np.float32(len(batch))
        scale = self._optimizer.clip_scale(math.sqrt(float(np.dot(average, average))))
        rate = learning_rate_at(step, self._total, self._config.optimizer)
        self._optimizer.apply(self.state, average, rate, scale)
        self._replica.write_trainable(self.state.weights)
        return sum(result.loss_sum for result in results) / len(batch)


class Rounds:
    """DiLoCo: each worker's inner steps, one after the other, and the outer update of all."""

    def __init__(
        self, inputs: RunInputs, replica: TorchReplica, plan: StepPlan, begin: TrainState
    ) -> None:
        self._plan, self._layout, self._replica = plan, inputs.layout, replica
        self._inner_batch = inputs.config.training.batch_size // len(shards(0))
        arrays = (begin.weights, begin.first_moment, begin.second_moment)
        # A state for each worker, as in a run: their second moments are their own.
        self._states = [
            TrainState(*(array.copy() for array in arrays), step=begin.step) for _ in shards(0)
        ]
        self._inner = [
            InnerSteps(replica, inputs.config.optimizer, plan, state) for state in self._states
        ]
        self._update = Update(inputs.config, inputs.layout)

    def step(self, step: int, batch: Sequence[Any]) -> float:
        """Apply a round and return its mean loss."""
        layout = self._layout.doubled if self._plan.settles(step) else self._layout
        average = np.zeros(layout.size, np.float32)
        loss = 0.0
        for inner, (start, stop) in zip(self._inner, shards(len(batch)), strict=True):
            moved = inner.run(batch[start:stop], step, self._inner_batch)
            loss += moved.result.loss_sum
            for block in layout.blocks:
                average[block.start : block.stop] += moved.block(block.index)
        average /= np.float32(len(batch))
        for inner, state in zip(self._inner, self._states, strict=True):
            self._update.apply(state, average, 0.0, 1.0, self._plan.first_round)
            inner.committed(step)
        self._replica.write_trainable(self._states[0].weights)
        return loss / len(batch)


def report(runs: dict[Case, dict[str, Any]]) -> int:
    """Print and write each case's gap to the ordinary schedule, the mean over seeds."""
    written = Report("rounds")
    exact = {(c.steps, c.seed): run["loss"] for c, run in runs.items() if c.inner_steps == 1}
    groups: dict[Case, list[Case]] = {}
    for case in runs:
        if (case.steps, case.seed) in exact:
            groups.setdefault(replace(case, seed=0), []).append(case)
    for group, members in groups.items():
        gaps = [100 * (runs[c]["loss"] / exact[c.steps, c.seed] - 1) for c in members]
        judged = (group.rate, group.momentum) in OUTER and not (group.settle or group.after)
        allowed = group.inner_steps <= group.steps / 20
        goal = GOALS.get(group.inner_steps) if judged and allowed else None
        every = runs[members[0]]["fp32_bytes_an_inner_step"]
        written.add(
            Ratio(
                f"{group.title}: percent above", statistics.mean(gaps), "every step's loss", goal
            ),
            gaps_percent=gaps,
            losses=[runs[case]["loss"] for case in members],
            accuracies=[runs[case]["accuracy"] for case in members],
            seeds=[case.seed for case in members],
            fp32_bytes_an_inner_step=every,
        )
    return written.write()


def draw(runs: dict[Case, dict[str, Any]], steps: int) -> None:
    """Draw the training losses over samples of the runs of so many steps with seed 0."""
    name = "rounds" if steps == SHORT else f"rounds-{steps}"
    with picture(name, "Loss over samples by schedule") as axes:
        for case, run in runs.items():
            plain = (case.rate, case.momentum) in OUTER and not case.settle
            if case.steps != steps or case.seed or not plain:
                continue
            losses, samples = np.array(run["training_losses"]), np.array(run["samples"])
            ordinary = len(losses) if case.inner_steps == 1 else case.after
            if ordinary:
                smooth = np.convolve(losses[:ordinary], np.ones(50) / 50, "valid")
                losses = np.concatenate([smooth, losses[ordinary:]])
                samples = samples[49:]
            averaged = case.rate == 1
            label = "every step" if case.inner_steps == 1 else f"H = {case.inner_steps}"
            label += f" after {case.after}" if case.after else ""
            axes.plot(
                samples,
                losses,
                color=AFTER if case.after else COLOURS[case.inner_steps],
                lw=1.2,
                ls=":" if averaged else "-",
                label=label + (", mean of weights" * averaged),
            )
        axes.set_xlabel("samples")
        axes.set_ylabel("training loss")
        axes.legend(frameon=False, labelcolor="linecolor", fontsize=8, ncols=2)


if __name__ == "__main__":
    sys.exit(main())
