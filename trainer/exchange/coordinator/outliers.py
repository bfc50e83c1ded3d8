"""Detect contributions whose norm is far above the usual norm of their block. Pure.

A sum over a share of weight w has the norm n. Where samples agree n grows like w, where they are
noise like the root of w, so n/w and n/sqrt(w) are both compared with the largest of the block's
last contributions. Only what is more than `alarm_factor` times both is an outlier: no share is one
for its size, and no batch for being harder than those that the model has learned. Nothing is
changed: a value that is odd may still be right.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.gradient_sum import Contribution
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.wire import Frame
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.system.errors import OutlierError

WINDOW = 64
"""Contributions to a block that the next one is compared with."""
FEWEST = 8
"""Contributions before one can be an outlier, and outliers in a row that are the new usual."""


def _new_window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass
class _NormHistory:
    """The norms of the last contributions to one block."""

    by_weight: deque[float] = field(default_factory=_new_window)
    by_root: deque[float] = field(default_factory=_new_window)
    odd: int = 0
    """Outliers since the last one that is none; they are not among the contributions above."""


class OutlierDetector:
    """Compares each contribution with its block's past; reports an outlier or halts the run."""

    def __init__(
        self,
        layout: GradientLayout,
        settings: ExchangeConfig,
        outbox: Outbox,
        all_sent: Callable[[int], bool],
    ) -> None:
        """Compare those of all steps but where `all_sent` that is owed: it is of many steps."""
        self._all_sent = all_sent
        self._layout = layout
        self._factor = settings.alarm_factor
        self._halts = settings.outliers == "halt"
        self._outbox = outbox
        self._usual = [_NormHistory() for _ in layout.blocks]
        self._reported: set[tuple[int, int]] = set()
        """The (step, rank) of the present step that have an event."""

    def reset(self) -> None:
        """Forget all norms: outer steps send deltas of weights, not gradients."""
        self._usual = [_NormHistory() for _ in self._layout.blocks]

    def check_contribution(self, frame: Frame, contribution: Contribution) -> None:
        """Check a whole contribution against its block's past.

        Raises:
            OutlierError: it is an outlier, and the run is to halt for it.
        """
        block = self._layout.blocks[frame.block]
        norm, weight = contribution.norm, contribution.weight
        if not norm or not weight or self._all_sent(frame.step):
            return
        usual = self._usual[block.index]
        by_weight, by_root = norm / weight, norm / math.sqrt(weight)
        if self._is_far(by_weight, usual.by_weight) and self._is_far(by_root, usual.by_root):
            usual.odd += 1
            if usual.odd < FEWEST:
                tensor = _largest_tensor(block, contribution)
                largest = max(usual.by_weight)
                self._report_outlier(frame.rank, frame.step + 1, block, tensor, by_weight, largest)
                return
            usual = self._usual[block.index] = _NormHistory()
        usual.odd = 0
        usual.by_weight.append(by_weight)
        usual.by_root.append(by_root)

    def _is_far(self, value: float, past: deque[float]) -> bool:
        return len(past) >= FEWEST and value > self._factor * max(past)

    def _report_outlier(
        self, rank: int, step: int, block: Block, tensor: str, norm: float, largest: float
    ) -> None:
        if self._halts:
            raise OutlierError(
                f"step {step}: rank {rank} sent a gradient of norm {norm:.3g} a unit of "
                f"weight in block {block.name}, tensor {tensor}, where at most {largest:.3g} is"
                " usual: the run is halted before the update (exchange.outliers), the last"
                " checkpoint is intact"
            )
        self._reported = {key for key in self._reported if key[0] == step}
        if (step, rank) in self._reported:
            return
        self._reported.add((step, rank))
        self._outbox.emit(
            "outlier",
            rank=rank,
            step=step,
            block=block.name,
            tensor=tensor,
            norm=norm,
            largest=largest,
        )


def _largest_tensor(block: Block, contribution: Contribution) -> str:
    """Return the name of the tensor that has the largest norm."""
    values = contribution.decode()

    def compute_norm(slot: TensorSlot) -> float:
        part = values[slot.start - block.start : slot.stop - block.start]
        return float(np.linalg.norm(part.astype(np.float64)))

    return max(block.tensors, key=compute_norm).name
