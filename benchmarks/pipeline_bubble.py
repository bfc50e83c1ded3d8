"""How long a pipeline's stages stand idle, by schedule.

    python benchmarks/pipeline_bubble.py [--steps 20] [--microbatches 8]

Two processes with one thread each train one model, full fine-tuning, by each of torch's schedules.
Every action of a stage is timed: a forward, a backward, and in the V-shaped schedules its two
halves. The bubble is the share of the processes' time, from the first action of a step to the last,
in which none runs; communication that computing does not hide counts as idle. Of all steps the
shortest counts: this machine is shared.

The formula is (p - 1) / (v m + p - 1) for p processes with v stages each and m micro-batches. For
the V-shaped schedules it is what their order of actions leaves idle if a forward and both halves of
a backward take equal time and a message none. JSON: benchmarks/results/pipeline_bubble.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rig.ranks import ALONE, Ranks
from rig.report import Ratio, Report, skip

ROOT = Path(__file__).parents[1]
RANKS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
LAYERS, WIDTH, TOKENS = 8, 256, 96
KINDS = {"forward_one_chunk": "forward", "backward_weight_one_chunk": "weights"}
UNITS = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""The formula's durations: a whole backward takes twice as long as a forward."""


class Action(NamedTuple):
    """What a stage did; seconds of a clock that all processes share."""

    stage: int
    kind: str
    microbatch: int
    start: float
    stop: float


Step = list[list[Action]]
"""The actions of each process, in order."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < RANKS:
        skip(f"{RANKS} processes need a processor each")
    report = Report("pipeline_bubble")
    for schedule, steps in measure(options.steps, options.microbatches).items():
        shown = min(steps, key=lambda step: span(step)[1] - span(step)[0])
        expected = formula(schedule, options.microbatches, shown)
        measured = bubble(shown)
        report.add(
            Ratio(
                f"{schedule}: a step's time",
                (1 - expected) / (1 - measured),
                f"one with the formula's bubble of {expected:.3f}; measured {measured:.3f}",
            ),
            bubble=round(measured, 4),
            formula=round(expected, 4),
            every_step=sorted(round(bubble(step), 4) for step in steps),
            seconds=round(span(shown)[1] - span(shown)[0], 4),
        )
    return report.write()


def measure(steps: int, microbatches: int) -> dict[str, list[Step]]:
    """Return the steps of each schedule."""
    with (
        tempfile.TemporaryDirectory(prefix="motley-bubble-") as scratch,
        Ranks(RANKS, ALONE) as ranks,
    ):
        folder = Path(scratch)
        write_model(folder)
        found = ranks.run_all(work, folder, steps, microbatches)
    return {
        schedule: [[rank[schedule][step] for rank in found] for step in range(steps)]
        for schedule in SCHEDULES
    }


def write_model(folder: Path) -> None:
    """Make a model whose head is small beside a layer, so that stages are equal."""
    from trainer.init_model import ModelSizes, init_model

    data = folder / "data.jsonl"
    data.write_text('{"input": "a", "label": 0}\n{"input": "b", "label": 1}\n')
    sizes = ModelSizes(WIDTH, LAYERS, 4, 4, WIDTH // 4, 2 * WIDTH, 300)
    init_model(data, folder / "model", sizes)


def work(_rank: int, folder: Path, steps: int, microbatches: int) -> dict[str, list[list[Action]]]:
    """Be a process of the pipelines, and return what its stages did."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from trainer.config.run import load
    from trainer.data.tokens import Encoded
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.replica.torch.parallel.mesh import make_mesh
    from trainer.replica.torch.parallel.replica import ParallelReplica

    torch.set_num_threads(1)
    ids = np.random.default_rng(0).integers(3, 200, (microbatches, TOKENS)).astype(np.int32)
    batch = [Encoded(row, row) for row in ids]
    actions = recorder()
    found: dict[str, list[list[Action]]] = {}
    mesh = None
    for schedule in SCHEDULES:
        config = load(
            None,
            {
                "model.path": str(folder / "model"),
                "data.train": "none",
                "task": "causal-lm",
                "method": "full",
                "parallel.pipeline.stages": RANKS,
                "parallel.pipeline.schedule": schedule,
                "parallel.pipeline.microbatches": microbatches,
            },
        )
        mesh = mesh or make_mesh(config.parallel, RANKS, "cpu")
        layout = build_layout(folder / "model", config)
        weights = initial_weights(layout, folder / "model", config)
        device = torch.device("cpu")
        replica = ParallelReplica(folder / "model", config, layout, mesh, device, weights)
        found[schedule] = []
        for _ in range(steps + 1):
            actions.clear()
            dist.barrier()
            replica.accumulate(batch)
            found[schedule].append(list(actions))
        del found[schedule][0]  # memory is still being taken
    return found


def recorder() -> list[Action]:
    """Return a list that gets every action of this process's stages."""
    from torch.distributed.pipelining import PipelineStage

    actions: list[Action] = []

    def timed(name: str) -> Callable[..., Any]:
        original = getattr(PipelineStage, name)

        def run(stage: Any, microbatch: int, *args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = original(stage, microbatch, *args, **named)
            whole = "backward" if named.get("full_backward", True) else "inputs"
            kind = KINDS.get(name, whole)
            stop = time.perf_counter()
            actions.append(Action(stage.stage_index, kind, microbatch, start, stop))
            return result

        return run

    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(PipelineStage, name, timed(name))
    return actions


def span(step: Step) -> tuple[float, float]:
    """Return when a step begins and ends."""
    actions = [action for rank in step for action in rank]
    return min(action.start for action in actions), max(action.stop for action in actions)


def bubble(step: Step) -> float:
    """Return the share of all processes' time in which they do nothing."""
    begin, end = span(step)
    busy = sum(action.stop - action.start for rank in step for action in rank)
    return 1 - busy / (len(step) * (end - begin))


def formula(schedule: str, microbatches: int, step: Step) -> float:
    """Return the bubble to expect."""
    if schedule == "zbv":
        return bubble(ideal(step))
    each = 2 if schedule == "interleaved" else 1
    return (RANKS - 1) / (each * microbatches + RANKS - 1)


def ideal(step: Step) -> Step:
    """Return the same actions in the same order if they took their units of time."""
    done: dict[tuple[str, int, int], float] = {}
    made: Step = [[] for _ in step]
    last = max(action.stage for rank in step for action in rank)
    while any(len(mine) < len(rank) for mine, rank in zip(made, step, strict=True)):
        for mine, rank in zip(made, step, strict=True):
            for action in rank[len(mine) :]:
                needed = list(needs(action, last))
                if any(part not in done for part in needed):
                    break
                start = max([mine[-1].stop if mine else 0, *(done[part] for part in needed)])
                stop = start + UNITS[action.kind]
                mine.append(action._replace(start=start, stop=stop))
                done[direction(action.kind), action.stage, action.microbatch] = stop
    return made


def needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield what must be done before an action."""
    stage, number = action.stage, action.microbatch
    match direction(action.kind):
        case "down" if stage:
            yield "down", stage - 1, number
        case "up":
            yield ("up", stage + 1, number) if stage < last else ("down", stage, number)
        case "weights":
            yield "up", stage, number
        case _:
            pass


def direction(kind: str) -> str:
    """Return which way an action's result goes; that of `weights` stays."""
    return {"forward": "down", "backward": "up", "inputs": "up"}.get(kind, kind)


if __name__ == "__main__":
    sys.exit(main())
