"""The windows of a folder of logits in a reproducible order, also while it is being written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.heartbeat import TeacherWatch
from trainer.distill.logits.scores import Window
from trainer.system.errors import InputError, StorageError, UnreachableError

logger = logging.getLogger(__name__)

Order = Callable[[int, int, int], NDArray[np.int64]]
"""(seed, epoch, length) -> a permutation of range(length), as `trainer.data.order.epoch_order`."""

POLL = 1.0
"""Seconds between two checks for a shard that is not there yet."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A student's position; with it a stream resumes exactly where it stopped."""

    epoch: int = 0
    group: int = 0
    """Group of shards; after the last one, each postponed shard is a group."""
    index: int = 0
    """Consumed places of the group's order."""
    postponed: tuple[int, ...] = ()
    """Shards that were damaged when read: they come at the end of the epoch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "postponed", tuple(self.postponed))  # JSON has lists


class ShardStream:
    """Yields windows in an order that depends on seed, epoch, and the shards' plan alone.

    The first epoch takes the shards in the teachers' order, later ones in a random order; windows
    are mixed within groups of `group` shards, which are held in memory.

    Args:
        folder: the logits.
        seed: of the orders.
        order: draws a permutation.
        group: shards that are mixed with each other.
        timeout: seconds without a living teacher after which a missing shard is an error.
        on_wait: called about once a second while a shard is missing; may raise to end the wait.
        on_damage: called for each damaged shard that was moved away.
    """

    def __init__(
        self,
        folder: LogitsFolder,
        *,
        seed: int,
        order: Order,
        group: int = 4,
        timeout: float = 60.0,
        on_wait: Callable[[str], None] = logger.info,
        on_damage: Callable[[str], None] = logger.warning,
        poll: float = POLL,
    ) -> None:
        self._folder, self._seed, self._order = folder, seed, order
        self._group, self._timeout, self._poll = group, timeout, poll
        self._on_wait, self._on_damage = on_wait, on_damage
        self._shards = [shard for shard in folder.description.shards if shard.windows]

    def iterate_epoch(self, position: Position | None = None) -> Iterator[tuple[Window, Position]]:
        """Yield the rest of an epoch: each window with the position after it.

        The position after the last window is the beginning of the next epoch.

        Raises:
            UnreachableError: a shard is missing and no teacher is alive.
            InputError: a shard is missing and the teachers are done.
            StorageError: a damaged shard cannot be moved away.
        """
        at = position or Position()
        groups = self._draw_groups(at.epoch)
        group, index, postponed = at.group, at.index, at.postponed
        while group < len(groups) + len(postponed):
            late = group >= len(groups)
            numbers = (postponed[group - len(groups)],) if late else groups[group]
            shards: dict[int, Sequence[Window]] = {}
            for number in numbers:
                if not late and number in postponed:
                    continue
                # A group that was begun is finished, so that no window comes twice.
                windows = self.load_shard(number, patient=late or index > 0)
                if windows is None:
                    postponed += (number,)
                else:
                    shards[number] = windows
            places = self._draw_window_order(at.epoch, group, len(groups), numbers)
            left = [
                (after, number, row)
                for after, (number, row) in enumerate(places, start=1)
                if after > index and number in shards
            ]
            for after, number, row in left:
                behind = Position(epoch=at.epoch, group=group, index=after, postponed=postponed)
                if after == left[-1][0]:
                    behind = self._next_group(behind, len(groups))
                yield shards[number][row], behind
            group, index = group + 1, 0

    def load_shard(self, number: int, *, patient: bool) -> Sequence[Window] | None:
        """Return a shard's windows, waiting for it; None if it is damaged and `patient` is off.

        Raises:
            UnreachableError, InputError, StorageError: see `iterate_epoch`.
        """
        while True:
            self._wait_for(number)
            try:
                return self._folder.read_shard(number)
            except StorageError as error:
                if not self._folder.has_shard(number):
                    continue  # its share is gone, or another student moved it to quarantine
                aside = self._folder.quarantine_shard(number, str(error))
                if aside is not None:
                    self._on_damage(f"{error}; moved to {aside} and requested again")
                if not patient and not self._folder.has_shard(number):
                    return None

    def _draw_groups(self, epoch: int) -> list[tuple[int, ...]]:
        count = len(self._shards)
        places = (
            self._order(self._seed, self._derive_epoch(epoch, 0), count) if epoch else range(count)
        )
        numbers = [self._shards[int(place)].number for place in places]
        return [
            tuple(numbers[start : start + self._group]) for start in range(0, count, self._group)
        ]

    def _draw_window_order(
        self, epoch: int, group: int, groups: int, numbers: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return shard and row of a group's windows in the order of the epoch."""
        plans = self._folder.description.shards
        rows = [(number, row) for number in numbers for row in range(plans[number].windows)]
        # A postponed shard's order does not depend on when it comes.
        own = group if group < groups else groups + numbers[0]
        return [
            rows[int(i)]
            for i in self._order(self._seed, self._derive_epoch(epoch, 1 + own), len(rows))
        ]

    def _derive_epoch(self, epoch: int, use: int) -> int:
        """Return a distinct number for every drawn order: shards, groups, postponed."""
        return epoch * (2 * len(self._folder.description.shards) + 1) + use

    def _next_group(self, behind: Position, groups: int) -> Position:
        if behind.group + 1 == groups + len(behind.postponed):
            return Position(epoch=behind.epoch + 1)
        return Position(epoch=behind.epoch, group=behind.group + 1, postponed=behind.postponed)

    def _wait_for(self, number: int) -> None:
        if self._folder.has_shard(number):
            return
        watch = TeacherWatch(self._folder)
        name = self._folder.shard_path(number).name
        while not self._folder.has_shard(number):
            if watch.seconds_of_silence() >= self._timeout and not self._folder.has_shard(number):
                self._give_up(watch, name)
            states = [f"{each.state.name} {each.state.state}" for each in watch.list_teachers()]
            self._on_wait(f"waits for {name} ({', '.join(states) or 'no teacher yet'})")
            time.sleep(self._poll)

    def _give_up(self, watch: TeacherWatch, name: str) -> None:
        path, teachers = self._folder.path, watch.list_teachers()
        again = "start it again with the same arguments, it writes what is missing"
        if not teachers:
            raise UnreachableError(
                f"{path}: {name} is missing and no teacher started within {self._timeout:g} s; "
                f"start `trainer distill teacher ... --out {path}`"
            )
        if all(each.state.state == "done" for each in teachers):
            missing = ", ".join(map(str, self._folder.list_missing()))
            raise InputError(
                f"{path}: shards {missing} are missing although every teacher is done; "
                "run `trainer distill teacher` again with the same arguments, and with --stay if"
                " they are scores of a student's own answers: it writes only these"
            )
        raise UnreachableError(
            f"{path}: {name} is missing and no teacher is alive ({watch.describe_lost()}); {again}"
        )
