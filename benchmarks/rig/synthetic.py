"""A job without a model: synthetic gradients, and no computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trainer.config.run import RunConfig, load_config
from trainer.data.tokens import Encoded
from trainer.exchange.protocol.members import Job
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.replica.base import EvalResult, OnBlock, StepResult

BLOCKS = 36
"""Transformer layers of the imitated model, as in Qwen3-4B."""
TOKENS = 8
"""Tokens of every sample."""
RUN_ID = "benchmark"


def layout(elements: int, blocks: int = BLOCKS) -> GradientLayout:
    """Return a layout of equal layer blocks, each one `[.., 2]` matrix; `elements` rounded down."""
    rows = elements // blocks // 2
    made: list[Block] = []
    for index in range(blocks):
        name = f"layers.{index}"
        start = index * rows * 2
        slot = TensorSlot(f"{name}.weight", (rows, 2), start)
        made.append(Block(index, name, start, slot.stop, (slot,)))
    return GradientLayout(tuple(made), blocks)


def config(settings: Mapping[str, object]) -> RunConfig:
    """Return a run config with dotted settings of its own."""
    return load_config("quickstart", settings)


def job(of: GradientLayout) -> Job:
    """Return what coordinator and workers agree on."""
    return Job(RUN_ID, "agreement", of.digest, "model", "data", "version")


class EqualSamples:
    """As many samples as are asked for, all alike; stands in for a Dataset."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._sample = Encoded(np.zeros(TOKENS, np.int32), 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Encoded:
        return self._sample


class InstantReplica:
    """A Replica that computes nothing and sends the same gradient each time."""

    device = "cpu"

    def __init__(self, of: GradientLayout, rank: int) -> None:
        self.layout = of
        self.before_blocks: Callable[[], None] = lambda: None
        """Called before anything of a shard is sent."""
        largest = max(block.size for block in of.blocks)
        self._gradient = np.random.default_rng(rank).standard_normal(largest, dtype=np.float32)

    def forward_backward(
        self,
        batch: Sequence[Encoded],
        on_block: OnBlock,
        alpha: float | None = None,  # noqa: ARG002 - of the protocol
    ) -> StepResult:
        """Hand out the blocks in the order of backward."""
        began = time.perf_counter()
        self.before_blocks()
        for index in self.layout.send_order:
            on_block(index, self._gradient[: self.layout.blocks[index].size])
        seconds = time.perf_counter() - began
        return StepResult(float(len(batch)), len(batch), TOKENS * len(batch), seconds)

    def write_trainable(self, flat: np.ndarray) -> None:
        """Nothing depends on the weights."""

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Not part of any benchmark."""
        raise NotImplementedError  # a run config of a benchmark has no validation data
