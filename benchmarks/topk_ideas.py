"""What two ideas from the literature bring top-k, with Motley's arithmetic: `make demo` first.

    python benchmarks/topk_ideas.py [--demo demo] [--model bag] [--steps 420]

The runs are those of codec_loss.py, each worker in a process of its own, with `topk:0.1` and
`topk:0.01` up and down, of the demo's model or of a small classifier on its data; alone and with

- dense warm-up: the density falls from a quarter to the codec's over the first fifth of the steps,
  by the same factor at each (Deep Gradient Compression, arXiv:1712.01887),
- frozen second moments: the first fifth of the steps are exact, and Adam's second moments do not
  change after them (1-bit Adam, arXiv:2102.02888),
- exact first: the same exact steps with moments that go on, to tell the two apart.

Finished runs are kept in --work and not repeated. Writes benchmarks/results/topk_ideas-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from codec_loss import train
from rig.demo_model import DEMO, require_demo
from rig.ranks import Ranks
from rig.report import Ratio, Report
from rig.round_peers import Run
from rig.sender import Sender

from trainer.exchange.protocol.codecs import Bytes, Float32
from trainer.exchange.protocol.compression.topk import TopK
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import AdamW, TrainState, decaying_spans, power

FIRST = 0.25
"""Density of the dense warm-up's first step."""
WARMUP = 0.2
"""Of the steps."""
BATCH = 32


NAMES = {
    "none": "fp32",
    "alone": "alone",
    "dense": "dense warm-up",
    "frozen": "exact warm-up, then frozen second moments",
    "exact": "exact warm-up",
}


@dataclass(frozen=True)
class Case:
    """One training run."""

    density: float
    idea: str
    """One of `NAMES`."""

    @property
    def title(self) -> str:
        """What it is called in the report."""
        return "fp32" if self == BASELINE else f"topk:{self.density:g}, {NAMES[self.idea]}"


BASELINE = Case(1.0, "none")
IDEAS = ("alone", "dense", "frozen", "exact")
CASES = (BASELINE, *(Case(density, idea) for density in (0.1, 0.01) for idea in IDEAS))


class FallingTopK:
    """Top-k of a density that falls with each block encoded, that is with each step."""

    id = TopK.id

    def __init__(self, shapes: list[tuple[int, ...]], density: float, steps: int) -> None:
        self.name = f"topk:{density:g} after {steps} steps"
        falling = [FIRST * (density / FIRST) ** (step / steps) for step in range(steps + 1)]
        self._codecs = [TopK(each, shapes) for each in falling]
        self._step = -1

    @property
    def _codec(self) -> TopK:
        return self._codecs[min(self._step, len(self._codecs) - 1)]

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the block at this step."""
        return self._codec.nbytes(elements)

    def encode(self, block: int, values: Float32) -> Bytes:
        """Encode the block of the next step."""
        self._step += 1
        return self._codec.encode(block, values)

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Decode what was encoded last."""
        self._codec.decode(encoded, out)


class FrozenAdamW(AdamW):
    """AdamW whose second moments stay as they are after so many steps."""

    def __init__(self, settings: Any, layout: GradientLayout, steps: int) -> None:
        super().__init__(settings, layout)
        self._frozen_at = steps
        self._matrices = decaying_spans(layout)

    def apply(
        self,
        state: TrainState,
        gradient: Float32,
        learning_rate: float,
        scale: float,
        restarted: int = 0,
    ) -> None:
        """Move `state` by one update."""
        if state.step < self._frozen_at:
            super().apply(state, gradient, learning_rate, scale, restarted)
            return
        state.step += 1
        settings, mean = self.settings, state.first_moment
        mean += np.float32(1 - settings.beta1) * (gradient * np.float32(scale) - mean)
        unbiased = mean / np.float32(1 - power(settings.beta1, state.step))
        square = state.second_moment / np.float32(1 - power(settings.beta2, self._frozen_at))
        for start, stop in self._matrices:
            state.weights[start:stop] *= np.float32(1 - learning_rate * settings.weight_decay)
        state.weights -= np.float32(learning_rate) * unbiased / (np.sqrt(square) + settings.epsilon)


def main() -> int:
    """Train what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: topk-ideas in the demo's folder")
    parser.add_argument("--model", choices=("bag", "demo"), default="bag")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--limit", type=int, default=len(CASES), help="of runs trained now")
    options = parser.parse_args()
    require_demo(options.demo)
    work: Path = options.work or options.demo / "topk-ideas"
    work.mkdir(exist_ok=True)
    run = Run(options.demo.resolve(), options.steps, 1, BATCH, options.model)
    done: dict[Case, dict[str, Any]] = {}
    with Ranks() as ranks:
        for case in CASES:
            file = work / f"{run.model}-{run.steps}-{case.idea}-{case.density:g}.json"
            if not file.exists() and options.limit > 0:
                options.limit -= 1
                found = {**asdict(case), **ranks.run(train_rank, run, case)}
                file.write_text(json.dumps(found) + "\n", encoding="utf-8")
                print(f"{case.title}: {found['loss']:.4f}", flush=True)
            if file.exists():
                done[case] = json.loads(file.read_text(encoding="utf-8"))
    written = Report(f"topk_ideas-{run.model}")
    exact = done[BASELINE]["loss"]
    for case, found in done.items():
        gap = Ratio(
            f"{case.title}: percent above", 100 * (found["loss"] / exact - 1), "fp32's loss"
        )
        written.add(gap, **found)
    return written.write()


def train_rank(rank: int, run: Run, case: Case) -> dict[str, Any]:
    """Train one worker of a case; return its loss, accuracy and what it sent."""
    inputs, replica, weights = run.open()
    layout, first = inputs.layout, round(WARMUP * run.steps)

    def end() -> Sender:
        if case == BASELINE:
            return Sender("fp32", layout, feedback=False)
        if case.idea != "dense":
            return Sender(f"topk:{case.density:g}", layout, feedback=True)
        falling = [
            FallingTopK([slot.shape for slot in block.tensors], case.density, first)
            for block in layout.blocks
        ]
        return Sender(falling, layout, feedback=True)

    settings = inputs.config.optimizer
    optimizer = (
        FrozenAdamW(settings, layout, first) if case.idea == "frozen" else AdamW(settings, layout)
    )
    found = train(
        inputs,
        replica,
        inputs.config,
        [end()],
        end(),
        optimizer,
        exact_steps=first if case.idea in ("frozen", "exact") else 0,
        rank=rank,
        weights=weights,
    )
    return {
        "loss": found["loss"],
        "accuracy": found["accuracy"],
        "bytes_an_element": found["bytes_a_step_up"] / layout.size,
    }


if __name__ == "__main__":
    sys.exit(main())
