"""Saving in parts while a run trains, and the files of one process's form once it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.reader import RunProgress
from trainer.run.distributed.checkpoint import ShardedCheckpoints
from trainer.run.distributed.gathered_checkpoint import GatheredCheckpoints
from trainer.run.distributed.loop import OF_ALL
from trainer.system.errors import StorageError

if TYPE_CHECKING:
    from trainer.tracking.run_recorder import RunRecorder


class ShardedSaves:
    """`Checkpoints` whose saves gather nothing: every rank writes its part.

    Args:
        gathered: takes the last step too, for the commands that read one process's form.
        written: the newest step that has that form; 0 if none has.
        progress: what a checkpoint of a step says of the run.
        recorder: on rank 0. One failed save is an alarm there, a second in a row ends the run.
    """

    def __init__(
        self,
        sharded: ShardedCheckpoints,
        gathered: GatheredCheckpoints,
        written: int,
        progress: Callable[[int], RunProgress],
        recorder: RunRecorder | None,
    ) -> None:
        self._sharded, self._gathered, self._written = sharded, gathered, written
        self._progress, self._recorder = progress, recorder
        self._scores: tuple[int, dict[str, Any] | None] = (0, None)

    def save(self, step: int, scores: dict[str, Any] | None) -> None:
        """Copy this rank's part and write it in the background, after an earlier save."""
        self._scores = step, scores
        with suppress(StorageError):  # the recorder has it
            self._sharded.wait()
        try:
            saving = self._sharded.save(self._progress(step))
        except StorageError as error:
            if self._recorder is not None:
                self._recorder.record_failed_save(step, str(error))
        else:
            began = time.monotonic()
            saving.add_done_callback(lambda done: self._record_save(step, began, done))

    def finish(self, step: int) -> None:
        """Wait for the last save, then gather the state and write it on rank 0."""
        with suppress(StorageError):
            self._sharded.close()
        if step > self._written:
            at, scores = self._scores
            self._gathered.stream_state(step, scores if at == step else None)

    def give_up(self, error: BaseException) -> None:
        """Complete what is under way if all ranks live, else leave it."""
        if isinstance(error, OF_ALL):
            with suppress(StorageError):
                self._sharded.close()
            return
        self._recorder = None
        self._sharded.give_up()

    def _record_save(self, step: int, began: float, done: Future[None]) -> None:
        """Run in the writer's thread."""
        recorder, error = self._recorder, done.exception()
        if recorder is None:
            return
        if error is None:
            path, seconds = self._sharded.folder / f"step-{step:06d}", time.monotonic() - began
            recorder.record_checkpoint(step, path, seconds)
        else:
            recorder.record_failed_save(step, str(error))
