"""PowerSGD beside PyTorch's hook: a full fine-tune of the demo's model by four equal workers.

    python benchmarks/powersgd.py [--demo demo] [--steps 100] [--seeds 3] [--limit 4]

`make demo` makes the model.

PyTorch's `powerSGD_hook` runs in four processes under DistributedDataParallel over gloo. So does
Motley's codec, up and down, with error feedback; gloo sums what is decoded. Both see the same
samples in the same order from the same weights, and Motley's AdamW applies the average of both. A
byte counts where a worker hands it to the exchange: to the all-reduce, or to its uplink. The hook's
factors are fp32: bf16 ones need NCCL. Ratios are means over the seeds.

Finished runs are kept in --work and not repeated. Writes benchmarks/results/powersgd.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from codec_loss import train
from rig.demo_model import DEMO, EQUAL, open_demo, require_demo, validate
from rig.ranks import RANKS, Ranks, Trained
from rig.report import Ratio, Report
from rig.sender import Sender
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.learning_rate import learning_rate_at

GOAL = 0.2
"""Percent of the loss by which Motley's may be worse at equal bytes."""
RATE = 1e-3
BATCH = 8


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    codec: str
    """Of Motley's exchange; `hook` is PyTorch's."""
    exact: int = 0
    """Steps at the start that are not compressed."""
    rank: int = 4
    seed: int = 0

    @property
    def file(self) -> str:
        """A name for its result."""
        return f"{self.codec.replace(':', '')}-{self.exact}-{self.rank}-{self.seed}.json"


EXACT = Case("every value, fp32", "fp32")
PEER = Case("PyTorch's hook, rank 4, fp32 factors, 10 exact steps", "hook", exact=10)
OURS = (
    Case("Motley, rank 8, bf16 factors, 10 exact steps", "powersgd:8", exact=10),
    Case("Motley, rank 8, bf16 factors", "powersgd:8"),
)
FURTHER = (
    Case("Motley, rank 4, bf16 factors, 10 exact steps", "powersgd:4", exact=10),
    Case("Motley, rank 4, bf16 factors", "powersgd:4"),
    Case("PyTorch's hook, rank 4, fp32 factors, 2 exact steps (its least)", "hook", exact=2),
)


def main() -> int:
    """Train what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: powersgd in the demo's folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="train at most so many of the missing runs")
    options = parser.parse_args()
    require_demo(options.demo)
    work: Path = options.work or options.demo / "powersgd"
    work.mkdir(exist_ok=True)
    wanted = cases(range(options.seeds))
    for case in [case for case in wanted if not (work / case.file).exists()][: options.limit]:
        train_rank = hook if case.codec == "hook" else motley
        with Ranks() as ranks:
            run = ranks.run(train_rank, options.demo.resolve(), options.steps, case)
        found = {**asdict(case), **run}
        (work / case.file).write_text(json.dumps(found) + "\n", encoding="utf-8")
        print(f"{case.name}, seed {case.seed}: {found['loss']:.4f}", flush=True)
    runs = {
        case: json.loads((work / case.file).read_text(encoding="utf-8"))
        for case in wanted
        if (work / case.file).exists()
    }
    return report(runs)


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return every run, those that answer most first; the further ones with the first seed."""
    return [replace(case, seed=seed) for seed in seeds for case in (EXACT, PEER, *OURS)] + [
        replace(case, seed=seeds[0]) for case in FURTHER
    ]


def _open(demo: Path, steps: int, seed: int) -> Any:
    changes = {
        "training__seed": seed,
        "training__batch_size": BATCH,
        "optimizer__learning_rate": RATE,
    }
    return open_demo(demo, steps, method="full", **changes)


def motley(rank: int, demo: Path, steps: int, case: Case) -> dict[str, Any]:
    """Train one rank with Motley's codec; return losses and bytes."""
    inputs, replica = _open(demo, steps, case.seed)
    layout = inputs.layout
    own, server = (Sender(case.codec, layout, feedback=case.codec != "fp32") for _ in range(2))
    found = train(
        inputs,
        replica,
        inputs.config,
        [own],
        server,
        AdamW(inputs.config.optimizer, layout),
        exact_steps=case.exact,
        shares=EQUAL,
        rank=rank,
    )
    return {
        "loss": found["loss"],
        "accuracy": found["accuracy"],
        "bytes": own.sent,
        "bytes_of_a_compressed_step": sum(
            codec.nbytes(block.size) for codec, block in zip(own.codecs, layout.blocks, strict=True)
        ),
        "elements": layout.size,
    }


def hook(rank: int, demo: Path, steps: int, case: Case) -> dict[str, Any]:
    """Train one rank with PyTorch's hook; return losses and bytes."""
    inputs, replica = _open(demo, steps, case.seed)
    config, layout, plan = inputs.config, inputs.layout, inputs.plan
    assert isinstance(inputs.train, Dataset)
    state = TrainState.fresh(initial_weights(layout, inputs.model_dir, config))
    optimizer = AdamW(config.optimizer, layout)
    module = Trained(layout, state.weights)
    # One bucket: with several gloo stops with a size mismatch, as if the sums that the hook begins
    # in callbacks had another order on each rank.
    parallel = DistributedDataParallel(module, bucket_cap_mb=1024)
    compression = PowerSGDState(
        None, matrix_approximation_rank=case.rank, start_powerSGD_iter=case.exact
    )
    parallel.register_comm_hook(compression, powerSGD_hook)
    own = np.empty(layout.size, np.float32)

    def keep(index: int, values: np.ndarray) -> None:
        block = layout.blocks[index]
        own[block.start : block.stop] = values

    for step in range(plan.total_steps):
        at = plan.at(step)
        order = epoch_order(config.training.seed, at.epoch, len(inputs.train))[at.start : at.stop]
        mine = np.array_split(order, RANKS)[rank]
        replica.write_trainable(state.weights)
        replica.forward_backward([inputs.train[int(index)] for index in mine], keep)
        module.zero_grad()
        # DDP divides by the ranks, so this is the mean over the step's samples.
        parallel(own / np.float32(len(mine))).backward()
        average = module.flat(gradient=True)
        norm = math.sqrt(float(np.dot(average, average)))
        rate = learning_rate_at(step, plan.total_steps, config.optimizer)
        optimizer.apply(state, average, rate, optimizer.clip_scale(norm))
    if rank:
        return {}
    replica.write_trainable(state.weights)
    compressed = steps - case.exact
    once = 4 * compression.total_numel_after_compression / compressed
    return {
        **validate(inputs, replica),
        "bytes": compressed * once + case.exact * 4 * layout.size,
        "bytes_of_a_compressed_step": once,
        "elements": layout.size,
    }


def report(runs: dict[Case, dict[str, Any]]) -> int:
    """Print and write each case's loss and bytes, and Motley's beside the hook's at equal bytes."""
    written = Report("powersgd")
    groups: dict[Case, list[Case]] = {}
    for case in runs:
        if replace(EXACT, seed=case.seed) in runs:
            groups.setdefault(replace(case, seed=0), []).append(case)
    for group, members in groups.items():
        first = runs[members[0]]
        gaps = beside(runs, members, EXACT)
        written.add(
            Ratio(f"{group.name}: percent above", statistics.mean(gaps), "fp32's loss"),
            gaps_percent=gaps,
            losses=[runs[case]["loss"] for case in members],
            accuracies=[runs[case]["accuracy"] for case in members],
            seeds=[case.seed for case in members],
            bytes_of_a_compressed_step=first["bytes_of_a_compressed_step"],
            fp32_bytes_over_bytes=4 * first["elements"] / first["bytes_of_a_compressed_step"],
        )
    for case in OURS:
        if gaps := beside(runs, groups.get(case, []), PEER):
            mean, of = statistics.mean(gaps), "bytes_of_a_compressed_step"
            written.add(
                Ratio(f"{case.name}: percent above", mean, "the hook's loss", GOAL),
                gaps_percent=gaps,
                bytes_of_the_hooks=runs[case][of] / runs[PEER][of],
            )
    return written.write()


def beside(runs: dict[Case, dict[str, Any]], members: Sequence[Case], peer: Case) -> list[float]:
    """Return by how many percent each run's loss is above that of the peer's of the same seed."""
    pairs = [(case, replace(peer, seed=case.seed)) for case in members]
    return [100 * (runs[a]["loss"] / runs[b]["loss"] - 1) for a, b in pairs if b in runs]


if __name__ == "__main__":
    sys.exit(main())
