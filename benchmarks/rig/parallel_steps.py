"""The time of a step of each strategy against others' of the same, for `benchmarks/parallel.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rig import accelerated
from rig.parallel_models import MICROBATCHES, ROWS, TREE, encoded, meshes, ours, rows, write_model
from rig.report import Ratio, Report

LIMIT = 1.05
AGAINST = {
    "plain": "the same by hand in plain PyTorch",
    "accelerate": "the same by accelerate",
}


def time_steps(folder: Path, rounds: int) -> dict[str, Any]:
    """Return this rank's seconds of each step, ours and the others' in turn."""
    import torch.distributed as dist

    path, found = write_model(folder), {}
    for strategy, mesh in meshes().items():
        replica = ours(path, strategy, mesh)
        share = replica.share(ROWS)
        mine = rows()[share.start : share.stop]
        batch = encoded(mine)
        result = replica.accumulate(batch)
        steps: dict[str, Callable[[], object]] = {"ours": partial(replica.accumulate, batch)}
        for name, step in rivals(path, strategy, mesh).items():
            mean, theirs = result.loss_sum / result.weight, step(mine)
            assert abs(mean / theirs - 1) < 1e-4, f"{strategy}, {name}: {mean} is not {theirs}"
            steps[name] = partial(step, mine)
        times: dict[str, list[float]] = {
            f"{kind}{name}": [] for name in steps for kind in ("", "cpu ")
        }
        for number in range(rounds + 1):
            for name in steps if number % 2 else reversed(steps):
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
                steps[name]()
                times[name].append(time.perf_counter() - began)
                times[f"cpu {name}"].append(time.process_time() - used)
        found[strategy] = {name: seconds[1:] for name, seconds in times.items()}
    return found


def rivals(path: Path, strategy: str, mesh: Any) -> dict[str, Any]:
    """Return the steps that ours is compared with, each with a model of its own."""
    from rig.plain import plain_step
    from rig.plain_pipeline import plain_pipeline

    if strategy == "pp":
        return {"plain": plain_pipeline(weighted(path), mesh["pipeline"], MICROBATCHES)}
    dimension = "tensor" if strategy.startswith("tp") else "data"
    found = {"plain": plain_step(weighted(path), strategy, mesh[dimension])}
    if strategy in accelerated.STRATEGIES and accelerated.missing() is None:
        found["accelerate"] = accelerated.accelerated_step(weighted(path), strategy)
    return found


def weighted(path: Path) -> Any:
    """Return the plain model with the weights of a folder."""
    from safetensors.torch import load_file

    from rig.plain import Plain

    model = Plain(TREE)
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model


def report_steps(report: Report, ranks: list[Any]) -> None:
    """Report the ratios of each strategy."""
    if reason := accelerated.missing():
        print(f"skipped: {reason}")
    for strategy, times in ranks[0].items():
        slowest = {
            name: zip(*(rank[strategy][name] for rank in ranks), strict=True) for name in times
        }
        seconds = {name: list(map(max, every)) for name, every in slowest.items()}
        medians = {name: statistics.median(every) for name, every in seconds.items()}
        for name, against in AGAINST.items():
            if name not in seconds:
                continue
            pairs = zip(seconds["ours"], seconds[name], strict=True)
            report.add(
                Ratio(
                    f"{strategy}: a step beside {name}",
                    statistics.median(ours / theirs for ours, theirs in pairs),
                    against,
                    LIMIT,
                ),
                median_seconds={kind: round(value, 4) for kind, value in medians.items()},
                of_processor_time=round(medians["cpu ours"] / medians[f"cpu {name}"], 3),
                of_shortest=round(min(seconds["ours"]) / min(seconds[name]), 3),
            )
