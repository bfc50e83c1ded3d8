"""The folder of a run in progress, and its checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.checkpoint.reader import FOLDER, checkpoint_digest, read_step, step_folders
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import MANIFEST, read_manifest
from trainer.tracking.status import STATUS_FILE, says_over

logger = logging.getLogger(__name__)

Availability = Literal["available", "removed", "unreachable"]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as it was found."""

    path: Path
    digest: str

    @property
    def step(self) -> int:
        """Its step, from the folder's name."""
        return read_step(self.path)


class WatchedRun:
    """A run's output folder, or only the folder of its checkpoints; it need not exist yet."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._damaged: set[str] = set()

    @property
    def store(self) -> Path:
        """The folder of the step folders."""
        below = self._output / FOLDER
        return below if below.is_dir() else self._output

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return those whose manifest and sizes are right, newest first; name damaged ones once.

        Raises:
            OSError: the folder cannot be read.
        """
        found: list[Checkpoint] = []
        for path in step_folders(self.store):
            try:
                read_manifest(path)
                found.append(Checkpoint(path, checkpoint_digest(path)))
            except StorageError as error:
                # Without a manifest it is still being written, or already being removed.
                if (path / MANIFEST).is_file():
                    self.log_skipped(str(error))
        return found

    def log_skipped(self, reason: str) -> None:
        """Log once why a checkpoint is not scored."""
        if reason not in self._damaged:
            self._damaged.add(reason)
            logger.error("checkpoint skipped: %s", reason)

    def probe_checkpoint(self, checkpoint: Checkpoint) -> Availability:
        """Return whether a checkpoint exists, is gone, or the whole folder is unreachable.

        A run always keeps its newest one, so a folder without any is unreachable as a whole.
        """
        try:
            if checkpoint_digest(checkpoint.path) == checkpoint.digest:
                return "available"
            return "removed"
        except StorageError:
            pass
        try:
            return "removed" if self.list_checkpoints() else "unreachable"
        except OSError:
            return "unreachable"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for good; False without its status."""
        return says_over(self._output / STATUS_FILE)
