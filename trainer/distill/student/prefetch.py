"""Reads and prepares a student's batches in a thread while the device computes."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trainer.config.distillation import DistillationConfig
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.logits.stream import Position, ShardStream
from trainer.distill.logits.targets import make_targets
from trainer.exchange.protocol.schedule import StepPlan
from trainer.system.process.native_thread import NativeThread
from trainer.system.process.stop_signals import StopRequest

Tell = Callable[[str, str], None]
"""Takes an event of `trainer.tracking.metrics` and a message."""

_PREFETCHED = 2
"""Batches that are ready for the device."""
_LOOK = 0.2
"""Seconds between two checks for a stop."""
_TELL = 30.0
"""Seconds after which a continuing wait is logged again."""


@dataclass(frozen=True)
class Batch:
    """The windows of one step."""

    samples: list[Encoded]
    documents: list[int]
    """The document of each sample."""
    behind: Position
    """The stream's position after them."""


@dataclass(frozen=True)
class Preparation:
    """Converts a window of a teacher's scores to a sample with soft targets."""

    scheme: Scheme
    objective: DistillationConfig
    max_seq_len: int

    def __call__(self, window: Window) -> Encoded:
        """Return a sample, cut at the student's `max_seq_len`."""
        soft = make_targets(
            window.scores, self.scheme, self.objective.temperature, self.objective.divergence
        )
        length = min(len(window.tokens), self.max_seq_len)
        tokens = window.tokens[:length]
        is_scored = np.diff(window.scores.offsets[: length + 1]) > 0
        labels = np.where(is_scored, tokens, IGNORED).astype(np.int32)
        return Encoded(tokens, labels, soft.slice_positions(0, length))


def iterate_batches(
    stream: ShardStream, plan: StepPlan, step: int, position: Position, prepare: Preparation
) -> Iterator[Batch]:
    """Yield the batches of a run from a step, counted from 0, and its position."""
    windows: Iterator[tuple[Window, Position]] = iter(())
    for number in range(step, plan.total_steps):
        at = plan.find_samples(number)
        if number == step or at.start == 0:
            assert position.epoch == at.epoch, (position, at)
            windows = stream.iterate_epoch(position)
        samples: list[Encoded] = []
        documents: list[int] = []
        for _ in range(at.start, at.stop):
            window, position = next(windows)
            samples.append(prepare(window))
            documents.append(window.document)
        yield Batch(samples, documents, position)


class BatchPrefetcher:
    """Keeps a few batches ready; an error of the reading thread is raised in `take_batch`.

    Args:
        source: returns the batches, given this feed: it calls `on_wait` about once a second while
            it waits, and `damaged` for damaged shards.
        stop: ends a wait.
    """

    def __init__(
        self, source: Callable[[BatchPrefetcher], Iterator[Batch]], stop: StopRequest
    ) -> None:
        self._source, self._stop = source, stop
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(_PREFETCHED)
        self._waits_for = ""
        self._damage: deque[str] = deque()
        self._closed = False
        self._thread = NativeThread(self._fill_queue, "feed")
        self._thread.start()

    def take_batch(self, tell: Tell) -> Batch | None:
        """Return the next batch, or None if the run is to stop.

        Args:
            tell: called for damage and for waits: when the reason changes, and now and then with
                the duration.
        """
        began, reported, due = time.monotonic(), "", _TELL
        while not self._stop:
            try:
                item = self._ready.get(timeout=_LOOK)
            except queue.Empty:
                item = None
            while self._damage:
                tell("quarantined", self._damage.popleft())
            if item is None:
                message, waited = self._waits_for, time.monotonic() - began
                if message and message != reported:
                    tell("waiting", message)
                elif message and waited >= due:
                    tell("waiting", f"{message}, for {waited:.0f} s")
                    due = waited + _TELL
                reported = message
                continue
            if isinstance(item, BaseException):
                raise item
            return item
        return None

    def on_wait(self, message: str) -> None:
        """Record what the source waits for; raises once the consumer has stopped."""
        if self._closed or self._stop:
            raise _Closed
        self._waits_for = message

    def record_damage(self, message: str) -> None:
        """Record what the source found damaged."""
        self._damage.append(message)

    @property
    def running(self) -> bool:
        """Whether the reading thread is alive."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread; one that a hanging share blocks is abandoned."""
        self._closed = True
        self._thread.join(5.0)

    def _fill_queue(self) -> None:
        with suppress(_Closed):
            try:
                for batch in self._source(self):
                    self._waits_for = ""
                    self._put_item(batch)
            except _Closed:
                raise
            except BaseException as error:  # raised again in the consumer
                self._put_item(error)

    def _put_item(self, item: Batch | BaseException) -> None:
        while True:
            if self._closed:
                raise _Closed
            with suppress(queue.Full):
                return self._ready.put(item, timeout=_LOOK)


class _Closed(Exception):  # noqa: N818 - not an error: the run is over
    """Ends the reading thread."""
