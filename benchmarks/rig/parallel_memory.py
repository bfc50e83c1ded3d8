"""Memory of a process against the plan, for `benchmarks/parallel.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rig.parallel_models import (
    MICROBATCHES,
    RANKS,
    ROWS,
    STRATEGIES,
    TOKENS,
    encoded,
    meshes,
    ours,
    rows,
    settings,
    write_model,
)
from rig.report import Ratio, Report
from rig.resident import Peak, own_bytes

WITHIN = 0.1


def weigh(folder: Path, _rounds: int) -> dict[str, Any]:
    """Return the most bytes that torch holds for each strategy, and the plan."""
    from trainer.config.parallel import PipelineConfig
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.strategy import FP32, Strategy, TrainingSetup

    path, found = write_model(folder), dict[str, Any]()
    shape = read_shape(path)
    for strategy, mesh in meshes().items():
        tensor = RANKS if strategy.startswith("tp") else 1
        stages = RANKS if strategy == "pp" else 1
        parts = MICROBATCHES if stages > 1 else 1
        planned = plan_memory_by_part(
            shape,
            TrainingSetup(
                length=TOKENS, rows=ROWS * tensor * stages // parts // RANKS, precision=FP32
            ),
            Strategy(
                world=RANKS,
                data="fsdp" if strategy == "fsdp" else "ddp",
                tensor=tensor,
                sequence=strategy == "tp-sp",
                stages=stages,
                schedule=PipelineConfig().schedule,
                microbatches=parts,
            ),
        )
        with peak() as measured:
            replica = ours(path, strategy, mesh)
            import torch

            optimizer = torch.optim.AdamW(replica.parameters.values(), foreach=False)
            share = replica.share(ROWS)
            for _ in range(2):
                replica.accumulate(encoded(rows()[share.start : share.stop]))
                optimizer.step()
        found[strategy] = {"peak": measured[0], "plan": planned.total, "parts": planned.bytes()}
        del replica, optimizer
    found["group"] = weigh_group(path)
    return found


def weigh_group(path: Path) -> dict[str, Any]:
    """Return the same of a process of a replica group that holds copies.

    It keeps gradients where torch's allocator does not see them, so this is resident memory.
    """
    from trainer.config.run import load
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.strategy import FP32, Strategy, TrainingSetup
    from trainer.run.distributed.group.part import CopiedPart
    from trainer.run.distributed.group.setup import Setup

    config = load(None, settings(path))
    layout = build_layout(path, config)
    each = ROWS // RANKS
    batch = encoded(rows()[:each])
    setup = Setup(config, path, "cpu", "ddp", ("cpu",) * RANKS, 1, "")
    before = own_bytes()
    with Peak() as peak:
        part = CopiedPart(setup, layout, "cpu")
        part.write_trainable(initial_weights(layout, path, config))
        for _ in range(2):
            part.train(batch, None, None)
    planned = plan_memory_by_part(
        read_shape(path),
        TrainingSetup(length=TOKENS, rows=each, precision=FP32),
        Strategy(world=RANKS, data="motley"),
    )
    return {"peak": peak.bytes - before, "plan": planned.total, "parts": planned.bytes()}


@contextmanager
def peak() -> Iterator[list[int]]:
    """Yield a list that gets the most bytes that torch's CPU allocator held in the block."""
    from torch.profiler import ProfilerActivity, profile

    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    kineto: Any = profiler.profiler
    events = kineto.kineto_results.events()
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    found.append(most)


def report_memory(report: Report, ranks: list[Any]) -> None:
    """Report how far each strategy's memory is from the plan."""
    for strategy in (*STRATEGIES, "group"):
        figures = max((rank[strategy] for rank in ranks), key=lambda rank: rank["peak"])
        ratio = figures["peak"] / figures["plan"]
        print(f"  {strategy}: {figures['peak'] / 1e6:.1f} MB, {ratio:.3f} of the plan")
        name = f"{strategy}: memory of a process, distance from the plan"
        report.add(Ratio(name, abs(ratio - 1), "the plan", WITHIN), **figures)
