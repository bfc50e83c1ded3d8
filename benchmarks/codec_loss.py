"""What compressed gradients cost in loss, on the demo's model and data: `make demo` first.

    python benchmarks/codec_loss.py [--demo demo] [--steps 100] [--seeds 3] [--jobs 2]

Each run is the preset `quickstart` for so many steps, with the workers' arithmetic and without
their processes: the samples of a step are dealt to four workers in unequal shares, each encodes its
gradient sums, the decoded sums are averaged, the average is encoded once more for the way down,
clipped and applied by Motley's AdamW. All runs of a seed see the same samples from the same
weights. "gap" is the validation loss against that of fp32 at the same seed, after the same tokens;
how far runs of one codec are from each other whose weights start a little apart says which gaps are
noise.

Finished runs are kept in --work and not repeated. Writes benchmarks/results/codec_loss.json, and
docs/codec-loss.svg with --picture; another --result names both.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig.demo_model import DEMO, SHARES, open_demo, require_demo, shards, validate
from rig.picture import picture
from rig.report import Ratio, Report
from rig.sender import Sender

from benchmarks.compare.picture import TEXT
from trainer.config.run import RunConfig
from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.learning_rate import learning_rate_at
from trainer.replica.base import Replica
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inputs import RunInputs

GOALS = {"bf16": 0.2, "int8": 0.5, "topk:0.1": 1.0, "topk:0.01": 3.0}
"""Percent of the loss that error feedback may cost at most."""
RATES = {"topk:0.1": (2.0, 4.0), "topk:0.01": (2.0, 4.0, 8.0), "fp32": (0.5, 2.0)}
"""Learning rates besides the preset's, as multiples. A coordinate sent every 1/k steps meets
a second moment 1/k times too large, so Adam moves it by sqrt(k) of what it would."""
NUDGES = (1, 2, 3, 4)
LOSSY = ("topk:0.1", "topk:0.01", "int8", "bf16", "int4")
COLOURS = {
    "fp32": TEXT,
    "int8": "#68a0b3",
    "int4": "#b294bb",
    "topk:0.1": "#b5bd68",
    "topk:0.01": "#f0c674",
}


@dataclass(frozen=True)
class Case:
    """One training run."""

    codec: str
    feedback: bool
    rate: float
    """Of the preset's learning rate."""
    seed: int
    one_way: bool = False
    """The average travels as bf16."""
    nudged: int = 0
    """Each weight starts up to 2^-9 of itself away, as rounded to bf16, by this random sequence."""

    @property
    def file(self) -> str:
        """A name for its result."""
        kind = "feedback" if self.feedback else "plain"
        kind += "-up" if self.one_way else ""
        kind += f"-nudged{self.nudged}" if self.nudged else ""
        return f"{self.codec.replace(':', '')}-{kind}-{self.rate:g}-{self.seed}.json"


def main() -> int:
    """Train all cases that are missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: codec-loss in the demo's folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, help="train at most so many of the missing runs")
    parser.add_argument("--picture", action="store_true", help="draw the curves into docs/")
    parser.add_argument("--result", default="codec_loss")
    options = parser.parse_args()
    require_demo(options.demo)
    work: Path = options.work or options.demo / "codec-loss"
    work.mkdir(exist_ok=True)
    wanted = cases(range(options.seeds))
    missing = [case for case in wanted if not (work / case.file).exists()][: options.limit]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, context, _open, (options.demo.resolve(), options.steps)
    ) as pool:
        for case, found in zip(missing, pool.map(_train, missing), strict=True):
            (work / case.file).write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(f"{case}: {found['loss']:.4f}", flush=True)
    runs = {
        case: json.loads((work / case.file).read_text(encoding="utf-8"))
        for case in wanted
        if (work / case.file).exists()
    }
    if options.picture:
        draw(runs, options.result.replace("_", "-"))
    return report(runs, options.result)


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return every run, those that answer most first."""
    found: list[Case] = [Case("fp32", False, 1.0, seed) for seed in seeds]
    for by in NUDGES:
        found += [
            Case(codec, codec != "fp32", 1.0, seeds[0], nudged=by) for codec in ("fp32", "bf16")
        ]
    for seed in seeds:
        found += [Case(codec, True, 1.0, seed) for codec in LOSSY]
        found += [Case(codec, True, 1.0, seed, one_way=True) for codec in ("topk:0.1", "topk:0.01")]
        for codec, rates in RATES.items():
            found += [Case(codec, codec != "fp32", rate, seed) for rate in rates]
        found += [Case(codec, False, 1.0, seed) for codec in LOSSY]
    return found


_opened: tuple[RunInputs, TorchReplica] | None = None


def _open(demo: Path, steps: int) -> None:
    """Read data and model once a process."""
    global _opened
    _opened = open_demo(demo, steps)


def _train(case: Case) -> dict[str, Any]:
    """Train one case; return its losses and what it sent."""
    assert _opened is not None
    inputs, replica = _opened
    config, layout = _config(inputs.config, case), inputs.layout
    workers = [Sender(case.codec, layout, feedback=case.feedback) for _ in SHARES]
    down = "bf16" if case.one_way else case.codec
    server = Sender(down, layout, feedback=case.one_way or case.feedback)
    optimizer = AdamW(config.optimizer, layout)
    weights = initial_weights(layout, inputs.model_dir, config)
    if case.nudged:
        off = np.random.default_rng(case.nudged).uniform(-(2**-9), 2**-9, weights.size)
        weights *= 1 + off.astype(np.float32)
    return {
        **asdict(case),
        **train(inputs, replica, config, workers, server, optimizer, weights=weights),
        "elements": layout.size,
    }


def train(
    inputs: RunInputs,
    replica: Replica,
    config: RunConfig,
    workers: Sequence[Sender],
    server: Sender,
    optimizer: AdamW,
    *,
    exact_steps: int = 0,
    shares: Sequence[float] = SHARES,
    rank: int | None = None,
    weights: np.ndarray | None = None,
) -> dict[str, Any]:
    """Train a run and return its losses and the bytes that a worker sent.

    Args:
        exact_steps: at the start, in which all is sent as bf16.
        shares: of a step's samples, by worker.
        rank: this process is that worker alone, and the losses of the steps are its own; the others
            are the other ranks of torch.distributed.
        weights: at the start; None: those of the preset.
    """
    layout, plan = inputs.layout, inputs.plan
    assert isinstance(inputs.train, Dataset)
    if weights is None:
        weights = initial_weights(layout, inputs.model_dir, config)
    state = TrainState.fresh(weights)
    replica.write_trainable(state.weights)
    losses: list[float] = []
    average = np.empty(layout.size, np.float32)
    for step in range(plan.total_steps):
        samples, exact = plan.at(step), step < exact_steps
        order = epoch_order(config.training.seed, samples.epoch, len(inputs.train))
        batch = [inputs.train[int(index)] for index in order[samples.start : samples.stop]]
        average[...] = 0
        loss = weight = 0.0
        dealt = shards(len(batch), shares)
        dealt = dealt if rank is None else dealt[rank : rank + 1]
        for worker, (start, stop) in zip(workers, dealt, strict=True):
            result = replica.forward_backward(
                batch[start:stop], worker.add_to(average, settle=exact)
            )
            loss, weight = loss + result.loss_sum, weight + result.weight
        if rank is not None:
            torch.distributed.all_reduce(torch.from_numpy(average))
        average /= np.float32(len(batch))
        mean = average.copy()
        average[...] = 0
        down = server.add_to(average, settle=exact)
        for block in layout.blocks:
            down(block.index, mean[block.start : block.stop])
        norm, limit = math.sqrt(float(np.dot(average, average))), config.optimizer.max_grad_norm
        rate = learning_rate_at(step, plan.total_steps, config.optimizer)
        optimizer.apply(state, average, rate, 1.0 if norm <= limit else limit / norm)
        replica.write_trainable(state.weights)
        losses.append(loss / weight)
    return {
        **validate(inputs, replica),
        "training_losses": [round(value, 5) for value in losses],
        "bytes_a_step_up": sum(worker.sent for worker in workers) / len(workers) / len(losses),
    }


def _config(config: RunConfig, case: Case) -> RunConfig:
    rate = config.optimizer.learning_rate * case.rate
    return config.with_settings({"training.seed": case.seed, "optimizer.learning_rate": rate})


def report(runs: dict[Case, dict[str, Any]], name: str) -> int:
    """Print and write each case's gap to fp32, the mean over seeds."""
    written = Report(name)
    exact = {case.seed: run["loss"] for case, run in runs.items() if _is_exact(case)}
    groups: dict[Case, list[Case]] = {}
    for case in runs:
        groups.setdefault(replace(case, seed=0, nudged=bool(case.nudged)), []).append(case)
    for group, members in groups.items():
        gaps = [100 * (runs[case]["loss"] / exact[case.seed] - 1) for case in members]
        title = f"{group.codec}, {'with' if group.feedback else 'without'} error feedback"
        title += ", bf16 down" if group.one_way else ""
        title += "" if group.rate == 1 else f", {group.rate:g} of the learning rate"
        title += ", from weights a little apart" if group.nudged else ""
        judged = group.feedback and group.rate == 1 and not (group.one_way or group.nudged)
        written.add(
            Ratio(
                f"{title}: percent above fp32",
                statistics.mean(gaps),
                "the validation loss",
                GOALS.get(group.codec) if judged else None,
            ),
            gaps_percent=gaps,
            losses=[runs[case]["loss"] for case in members],
            accuracies=[runs[case]["accuracy"] for case in members],
            seeds=[case.seed for case in members],
            steps=len(runs[members[0]]["training_losses"]),
            bytes_an_element=runs[members[0]]["bytes_a_step_up"] / runs[members[0]]["elements"],
            training_losses=[
                round(statistics.mean(column), 4)
                for column in zip(*(runs[case]["training_losses"] for case in members), strict=True)
            ],
        )
    return written.write()


def _is_exact(case: Case) -> bool:
    return case.codec == "fp32" and case.rate == 1 and not case.nudged


def draw(runs: dict[Case, dict[str, Any]], name: str) -> None:
    """Draw the training losses at the preset's rate, over the seeds that all curves have."""
    curves: dict[tuple[str, bool], dict[int, list[float]]] = {}
    for case, run in runs.items():
        if case.codec in COLOURS and case.rate == 1 and not (case.one_way or case.nudged):
            curves.setdefault((case.codec, case.feedback), {})[case.seed] = run["training_losses"]
    seeds = set.intersection(*(set(curve) for curve in curves.values()))
    with picture(name, "Loss over steps by codec") as axes:
        for (codec, feedback), curve in curves.items():
            mean = np.mean([curve[seed] for seed in seeds], axis=0)
            smooth = np.convolve(mean, np.ones(10) / 10, mode="valid")
            fed = codec == "fp32" or feedback
            axes.plot(
                np.arange(10, len(mean) + 1),
                smooth,
                color=COLOURS[codec],
                lw=1.2,
                ls="-" if fed else ":",
                label=codec if fed else f"{codec}, no feedback",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, mean of 10 steps")
        axes.legend(frameon=False, labelcolor="linecolor", fontsize=8, ncols=2)


if __name__ == "__main__":
    sys.exit(main())
