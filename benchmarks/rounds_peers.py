"""Motley's rounds beside PyTorch's PostLocalSGDOptimizer and torchft's DiLoCo: `make demo` first.

    python benchmarks/rounds_peers.py [--demo demo] [--model bag] [--steps 420] [--inner-steps 20]

Four processes, equal workers, train the preset `quickstart`, or a small classifier by token counts
on the same data, which takes seconds: the same samples
from the same weights at the same learning rates, by AdamW. Motley's inner steps, codecs and outer
update are a run's own, and gloo sums what they send; PyTorch's runs over gloo, torchft's also with
a lighthouse and a manager for each worker. Bytes are what a worker hands to the exchange: a star
sends them once, a ring of four 1.5 times. `pip install torchft==0.2.0` adds torchft; without it
that row is missing.

Finished runs are kept in --work and not repeated. Writes
benchmarks/results/rounds_peers-MODEL-H.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rig.demo_model import DEMO, require_demo
from rig.ranks import Ranks
from rig.report import Ratio, Report
from rig.round_peers import Outer, Run, every_step, motley, post_local, torchft

BASELINE = "every step"
POST_LOCAL = "PyTorch's PostLocalSGDOptimizer"
TORCHFT = "torchft 0.2.0 DiLoCo"
MEAN, PUBLISHED = Outer(1.0, 0.0, "int8"), Outer(0.7, 0.9, "int8")
OUTER = (
    *(MEAN, PUBLISHED, Outer(1.0, 0.5), Outer(0.7, 0.5), Outer(1.0, 0.0, inner_rate=2.0)),
    *(Outer(1.0, 0.3), Outer(0.7, 0.7), Outer(1.0, 0.0), Outer(0.7, 0.9)),
    *(Outer(0.7, 0.3), Outer(0.7, 0.0), Outer(1.0, 0.0, inner_rate=0.5)),
)


def main() -> int:
    """Train what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: rounds-peers in the demo's folder")
    parser.add_argument("--model", choices=("bag", "demo"), default="bag")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=99, help="of runs trained now")
    options = parser.parse_args()
    require_demo(options.demo)
    if options.steps % options.inner_steps:
        parser.error("--steps is a multiple of --inner-steps, so that all ends with a round")
    work: Path = options.work or options.demo / "rounds-peers"
    work.mkdir(exist_ok=True)
    run = Run(options.demo.resolve(), options.steps, options.inner_steps, options.batch)
    run = replace(run, model=options.model)
    name = f"{run.model}-{run.steps}-{run.inner_steps}-{run.batch}"
    seeds = [replace(run, seed=seed) for seed in range(options.seeds)]
    done: dict[str, list[dict[str, Any]]] = {}
    with Ranks() as ranks:
        for title, train in trainings(ranks).items():
            file = work / f"{name}-{''.join(filter(str.isalnum, title))}.json"
            if title == TORCHFT and not file.exists() and find_spec("torchft") is None:
                print("torchft is not installed: pip install torchft==0.2.0")
                continue
            if not file.exists() and options.limit > 0:
                options.limit -= 1
                found = [train(run) for run in seeds]
                file.write_text(json.dumps(found) + "\n", encoding="utf-8")
                print(f"{title}: {[round(each['loss'], 4) for each in found]}", flush=True)
            if file.exists():
                done[title] = json.loads(file.read_text(encoding="utf-8"))
    return report(done, f"rounds_peers-{run.model}-{run.inner_steps}")


def trainings(ranks: Ranks) -> dict[str, Callable[[Run], dict[str, Any]]]:
    """Return every way to train by its name, those that answer most first."""
    return {
        BASELINE: partial(ranks.run, every_step),
        POST_LOCAL: partial(ranks.run, post_local),
        TORCHFT: partial(torchft, ranks),
        **{outer.name: partial(_ours, ranks, outer) for outer in OUTER},
    }


def _ours(ranks: Ranks, outer: Outer, run: Run) -> dict[str, Any]:
    return ranks.run(motley, run, outer)


def report(done: dict[str, list[dict[str, Any]]], name: str) -> int:
    """Print and write each way's loss and bytes beside those of every step; means over seeds."""
    written = Report(name)
    base = done[BASELINE]
    for title, found in done.items():
        gaps = [
            100 * (run["loss"] / exact["loss"] - 1) for run, exact in zip(found, base, strict=True)
        ]
        written.add(
            Ratio(f"{title}: percent above", statistics.mean(gaps), "every step's loss"),
            gaps_percent=gaps,
            losses=[run["loss"] for run in found],
            accuracies=[run["accuracy"] for run in found],
            bytes_an_inner_step=found[0]["bytes_an_inner_step"],
            of_every_steps_bytes=found[0]["bytes_an_inner_step"] / base[0]["bytes_an_inner_step"],
        )
    for ours, peer in ((MEAN.name, POST_LOCAL), (PUBLISHED.name, TORCHFT)):
        if ours in done and peer in done:
            for key, what in (("loss", "loss"), ("bytes_an_inner_step", "bytes")):
                ratios = [a[key] / b[key] for a, b in zip(done[ours], done[peer], strict=True)]
                written.add(
                    Ratio(f"{ours}: {what}", statistics.mean(ratios), f"{peer}'s", 1.0),
                    of_each_run=ratios,
                )
    return written.write()


if __name__ == "__main__":
    sys.exit(main())
