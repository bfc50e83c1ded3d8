"""A shard as micro-batches, and as groups of them that run layer by layer, by free memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from trainer.config.run import RunConfig
from trainer.planning.replica import (
    CPU_TOKENS,
    MemoryPlan,
    fitting_tokens,
    group_tokens,
    most_tokens,
)
from trainer.replica.microbatch import MicroBatchLimit, pack_rows, split_by_length
from trainer.replica.torch.batch import MicroBatch, collate
from trainer.replica.torch.device import available_bytes
from trainer.system.errors import DoesNotFitError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_UNBOUNDED = 1 << 62


class ShardSplit:
    """The sizes of micro-batches and groups, which shrink if the device runs out of memory.

    Args:
        plan: of the replica, whose weights are loaded.
    """

    def __init__(self, config: RunConfig, plan: MemoryPlan, device: torch.device) -> None:
        self._config, self._device = config, device
        wanted = config.training.micro_batch_size
        if wanted != "auto":
            self.limit = MicroBatchLimit(wanted, _UNBOUNDED)
        else:
            tokens = fitting_tokens(plan, available_bytes(device))
            tokens = min(tokens, CPU_TOKENS) if device.type == "cpu" else tokens
            self.limit = MicroBatchLimit(_UNBOUNDED, tokens)
        self.group_tokens = 0
        """The most of a group; it has at least one micro-batch."""
        if plan.resident is not None:
            where = torch.device("cpu") if plan.waits_on_host else device
            micro = min(self.limit.tokens, most_tokens(config))
            self.group_tokens = group_tokens(plan, available_bytes(where), micro)
        self._tried = (0, 0, 0)
        """Samples and tokens of the largest micro-batch in flight, and tokens of its group."""

    def iterate_groups(
        self, batch: Sequence[Encoded], *, soft: bool = False
    ) -> Iterator[tuple[list[MicroBatch], bool]]:
        """Yield the micro-batches of each group on the device, and whether they are the last.

        Args:
            soft: with a teacher's predictions.
        """
        group: list[MicroBatch] = []
        largest, tokens = (0, 0), 0
        for micro, samples in self._iterate_micro_batches(batch, soft=soft):
            size = micro.input_ids.numel()
            if group and tokens + size > self.group_tokens:
                self._tried = *largest, tokens
                yield group, False
                group, largest, tokens = [], (0, 0), 0
            group.append(micro)
            largest = max(largest, (samples, size), key=lambda one: one[1])
            tokens += size
        if group:
            self._tried = *largest, tokens
            yield group, True

    def shrink_limits(self) -> None:
        """Halve what was tried last: a group, or the micro-batch that it was.

        Raises:
            DoesNotFitError: it was one sample.
        """
        samples, tokens, together = self._tried
        if together == tokens:
            smaller = self.limit.halve_limit(samples, tokens)
            if smaller is None:
                raise DoesNotFitError(
                    f"{self._device}: one sample of {tokens} tokens does not fit; lower"
                    " data.max_seq_len or set model.quantization nf4"
                )
            self.limit = smaller
        self.group_tokens = min(self.group_tokens, together // 2)

    def _iterate_micro_batches(
        self, batch: Sequence[Encoded], *, soft: bool
    ) -> Iterator[tuple[MicroBatch, int]]:
        """Yield each micro-batch on the device, and its number of samples."""
        sizes = [_count_tokens(sample) for sample in batch]
        rows = self._split_rows(sizes)
        lengths = [sum(sizes[index] for index in row) for row in rows]
        for group in split_by_length(lengths, self.limit):
            samples = [[batch[index] for index in rows[row]] for row in group]
            count = sum(map(len, samples))
            samples += [[pair.rejected] for (*_, pair) in samples if pair.rejected is not None]
            yield collate(samples, soft=soft).to(self._device), count

    def _split_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the samples of each row: one, or as many as fit `data.max_seq_len`."""
        if not self._config.training.pack:
            return [[index] for index in range(len(lengths))]
        return pack_rows(lengths, min(self._config.data.max_seq_len, self.limit.tokens))


def _count_tokens(sample: Encoded) -> int:
    """Return the tokens that a sample takes in a micro-batch: of a pair its longer row's, twice."""
    return len(sample.answers) * max(len(row.input_ids) for row in sample.answers)
