"""A replica group: several devices of one host hold one replica together, as one worker.

The leader is the worker's process: it implements `Replica` for the loop, computes as rank 0 of the
group, and tells the members what to do. They know nothing of the run: the samples of a step and the
weights after a commit come from the leader, and their gradients go to it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from trainer.model.layout import build_layout
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.run.distributed import flight_recorder
from trainer.run.distributed.group.link import pack_samples
from trainer.run.distributed.group.member import as_user_error
from trainer.run.distributed.group.part import broadcast_weights, open_part
from trainer.run.distributed.group.processes import Members
from trainer.run.distributed.group.setup import GroupSetup, compute_identity
from trainer.run.distributed.rank_watchdog import is_peer_failure
from trainer.system.errors import DoesNotFitError, RefusedError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_Result = TypeVar("_Result")


class GroupReplica:
    """A Replica of `trainer.replica.base` over all processes of a group.

    Args:
        setup: the leader's; its members are told.

    Raises:
        InputError: the leader's device is not available, or the model does not fit. The same of a
            member ends this process.
        RefusedError: a member has other data than the leader.
    """

    def __init__(self, setup: GroupSetup, members: Members) -> None:
        self._members = members
        self._is_one_copy = setup.strategy == "tensor"
        members.send_command_to_all({"command": "open", **setup.to_json()})
        check_identities(compute_identity(setup), members.collect_answers(), members)
        self._part = self._explain_errors(lambda: open_part(setup, 0))
        folder = flight_recorder.record_collectives(Path(setup.config.output))
        members.keep_record = partial(
            flight_recorder.save_record, folder / f"group-{os.getpid()}.json"
        )
        self.layout = build_layout(setup.model_dir, setup.config)
        self.device = f"{'+'.join(members.devices)} ({setup.strategy})"

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard, divided between the processes; see `Replica.forward_backward`."""
        began = time.monotonic()
        parts = self._divide_batch(batch)
        for rank, part in enumerate(parts[1:], start=1):
            self._members.send_command(
                rank, {"command": "train", "alpha": alpha}, pack_samples(part)
            )
        own = self._explain_errors(lambda: self._part.train(parts[0], on_block, alpha))
        results = [own, *(StepResult(**answer) for answer in self._members.collect_answers())]
        return StepResult(
            loss_sum=sum(result.loss_sum for result in results),
            weight=sum(result.weight for result in results),
            tokens=sum(len(sample.input_ids) for sample in batch),
            seconds=time.monotonic() - began,
            ce_sum=_sum_known([result.ce_sum for result in results]),
            kl_sum=_sum_known([result.kl_sum for result in results]),
        )

    def write_trainable(self, flat: np.ndarray) -> None:
        """Take the trainable weights, fp32 `[layout.size]`; see `Replica.write_trainable`.

        The leader's whole copy on a CPU computes with the array itself, as one process does.
        """
        assert flat.dtype == np.float32, f"weights are fp32, got {flat.dtype}"
        assert flat.shape == (self.layout.size,), f"{flat.shape} is not ({self.layout.size},)"
        self._members.send_command_to_all({"command": "weights"})
        self._explain_errors(lambda: broadcast_weights(self.layout, flat))
        self._part.write_trainable(flat)

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass, divided between the processes; see `Replica.evaluate`."""
        parts = self._divide_batch(batch)
        for rank, part in enumerate(parts[1:], start=1):
            self._members.send_command(rank, {"command": "evaluate"}, pack_samples(part))
        own = self._explain_errors(lambda: self._part.evaluate(parts[0]))
        return EvalResult.sum_parts(
            [own, *(EvalResult(**each) for each in self._members.collect_answers())]
        )

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        stop: frozenset[int],
    ) -> list[list[int]]:
        """Refuse: a run that asks prompts opens no group (`config.capabilities`)."""
        raise NotImplementedError

    def _divide_batch(self, batch: Sequence[Encoded]) -> list[Sequence[Encoded]]:
        """Return the samples of each process; all take all if they share every layer."""
        if self._is_one_copy:
            return [batch] * self._members.world_size
        lengths = [len(sample.input_ids) for sample in batch]
        return [
            [batch[index] for index in part]
            for part in divide_by_tokens(lengths, self._members.world_size)
        ]

    def _explain_errors(self, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except (RuntimeError, MemoryError, DoesNotFitError) as error:
            if is_peer_failure(error):
                self._members.raise_collective_failure(error)
            known = as_user_error(error)
            if known is None:
                raise
            raise type(known)(f"{self._members.name_rank(0)}: {known}") from None


def divide_by_tokens(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the samples of each process, in their order: about as many tokens for each.

    The longest sample goes first, each to the process that has the fewest tokens, so equal shards
    are divided equally.
    """
    tokens, chosen = [0] * parts, [[0] * 0 for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        least = tokens.index(min(tokens))
        tokens[least] += lengths[index]
        chosen[least].append(index)
    return [sorted(part) for part in chosen]


def check_identities(
    own: dict[str, str], others: Sequence[dict[str, str]], members: Members
) -> None:
    """Check that every member has the leader's config, layout, model and torch.

    Raises:
        RefusedError: one has not; names it and the first difference.
    """
    for rank, other in enumerate(others, start=1):
        for what, value in own.items():
            if other[what] != value:
                raise RefusedError(
                    f"{members.name_rank(rank)}: its {what} differs from that of the leader on "
                    f"{socket.gethostname()} ({other[what]}, not {value}); give all processes "
                    "of a group the same model folder and installation"
                )


def _sum_known(sums: Sequence[float | None]) -> float | None:
    """Return the sum of those that there are: a process without samples has none."""
    known = [part for part in sums if part is not None]
    return sum(known) if known else None
