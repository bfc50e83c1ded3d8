"""Sharded checkpoints: every rank writes what it holds, while training goes on.

torch.distributed.checkpoint copies the tensors, writes them in another thread, and reads them back
into any other cut of the same tensors: checkpoints move between strategies and numbers of ranks.
Its own file of metadata and its exchange between ranks are pickles, so neither is used. The files
are safetensors, which say of each tensor where it lies in the whole one; which rank writes what,
and that all is written, the ranks exchange as JSON (`trainer.run.distributed.rank_notes`).

`step-000120/` appears whole or not at all (`trainer.system.storage.atomic_folder`): rank 0 makes it
under a temporary name, collects sizes and hashes, and renames it.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.reader import (
    RUN_FILE,
    SCHEMA,
    Resumed,
    RunProgress,
    complete_checkpoints,
    read_owner,
    read_progress,
    read_run,
)
from trainer.checkpoint.retention import describe_older, prune_checkpoints
from trainer.replica.torch.adamw import FusedAdamW
from trainer.run.distributed.rank_file import (
    choose_writers,
    locate_part,
    rank_file_name,
    start_writing,
)
from trainer.run.distributed.rank_notes import RankNotes
from trainer.system.errors import InputError, StorageError, first_line
from trainer.system.storage import atomic_folder, removal
from trainer.system.storage.atomic_folder import Disk, FileRecord, FolderWriter
from trainer.system.storage.lease import Lease
from trainer.system.storage.removal import pin_folder

_GRACE = 5.0
"""Seconds that a save under way waits for the others once the run is over by an error."""

log = logging.getLogger(__name__)

# Each rank saves and loads for itself, as it is meant to.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class ShardedCheckpoints:
    """The checkpoints of a world in one folder that all its ranks see.

    Every rank calls every method, in the same order, and each error is raised on all of them.

    Args:
        parts: this rank's part of every tensor that is saved, by names that all strategies share;
            `training_parts` returns them. They are written into by `restore`.
        layout: the digest of the run's `GradientLayout`.
        lease: ensures a single writer; rank 0 holds it.

    Raises:
        InputError: the folder is not writable.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Tensor],
        layout: str,
        board: RankNotes,
        *,
        keep_last: int,
        lease: Lease | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self._parts = dict(parts)
        self._layout = layout
        self._board = board
        self._keep_last = keep_last
        self._lease = lease
        self._workspace = lease.workspace if lease else folder
        self._disk = disk or Disk()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sharded-checkpoint")
        self._saving: Future[None] | None = None
        self._mine: list[str] | None = None
        if board.rank == 0:
            atomic_folder.prepare_folder(folder)
            removal.sweep_leftovers(self._disk, folder)

    def save(self, progress: RunProgress) -> Future[None]:
        """Copy this rank's tensors and write them in the background, after any earlier save.

        Returns:
            What is done once the checkpoint is complete, or has the error of `wait`.

        Raises:
            StorageError: this save, or the earlier one, failed; older checkpoints are intact.
        """
        self.wait()
        if self._mine is None:
            self._mine = self._choose_parts()
        writer = error = None
        name = f"step-{progress.step:06d}"
        if self._board.rank == 0:
            try:
                if self._lease:
                    self._lease.check_held()
                writer = FolderWriter(self._disk, self.folder, name, self._workspace)
            except OSError as failure:
                error = failure.strerror or str(failure)
        announcement = [writer and str(writer.temporary), error]
        temporary, error = self._board.broadcast_note("checkpoint folder", announcement)
        if error is not None:
            raise self._make_error(name, error)
        parts = {key: self._parts[key] for key in self._mine}
        upload = start_writing(parts, Path(temporary), self._board.rank) if parts else None
        self._saving = self._executor.submit(
            self._finish_save, upload, Path(temporary), writer, progress
        )
        return self._saving

    def wait(self) -> None:
        """Wait until the save that is under way is complete.

        Raises:
            StorageError: it failed; older checkpoints are intact.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def restore(self, run_id: str) -> Resumed | None:
        """Read the newest intact checkpoint of a run into this rank's tensors; None without one.

        Each rank proves some of the files, and reads of them what it needs.

        Raises:
            InputError: it belongs to another model or another trainable set.
        """
        found: list[str] = []
        if self._board.rank == 0:
            complete = complete_checkpoints(self.folder)
            found = [str(path) for path in complete if read_owner(path) == run_id]
        rejected: list[str] = []
        for path in map(Path, self._board.broadcast_note("checkpoints", found)):
            with ExitStack() as pinned:
                if not (bad := self._find_damage(path, pinned)):
                    return self._load_folder(path, tuple(rejected))
            rejected += bad[:1]
            if self._board.rank == 0:
                log.warning("checkpoint skipped: %s", bad[0])
        return None

    def close(self) -> None:
        """Wait for the last save, and end the thread.

        Raises:
            StorageError: it failed.
        """
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def give_up(self) -> None:
        """End the thread without a wait: other ranks may be gone, and get a few seconds."""
        self._board.patience = _GRACE
        self._executor.shutdown(wait=False)

    def _choose_parts(self) -> list[str]:
        """Return what this rank writes: of those that hold the same part, the least laden does."""
        mine = {name: locate_part(part) for name, part in self._parts.items()}
        return choose_writers(self._board.gather_notes("parts", mine))[self._board.rank]

    def _finish_save(
        self,
        upload: Future[Any] | None,
        temporary: Path,
        writer: FolderWriter | None,
        progress: RunProgress,
    ) -> None:
        """Wait for all ranks' files and let the folder appear; in the background."""
        name = f"step-{progress.step:06d}"
        error, files = "", dict[str, Any]()
        try:
            if upload is not None:
                upload.result()
                path = temporary / rank_file_name(self._board.rank)
                files[path.name] = asdict(atomic_folder.make_record(path))
        except (Exception, CheckpointException) as failure:
            error = _first_reason(failure)
        try:
            notes = self._board.gather_notes("written", [error, files])
            bad = [
                f"{self._board.name_rank(r)}: {note[0]}" for r, note in enumerate(notes) if note[0]
            ]
            if writer is not None:
                error = bad[0] if bad else self._publish_folder(writer, notes, progress)
        finally:
            if writer is not None and writer.temporary.exists():
                writer.abandon()
        error = self._board.broadcast_note("published", error)
        if error:
            raise self._make_error(name, error)

    def _publish_folder(
        self, writer: FolderWriter, notes: Sequence[Any], progress: RunProgress
    ) -> str:
        """Let the folder appear, and return why it does not, or nothing."""
        run = {"schema": SCHEMA, **asdict(progress), "metric": None, "layout_digest": self._layout}
        text = json.dumps(run, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            for _, files in notes:
                for name, record in files.items():
                    writer.adopt_file(name, FileRecord(**record))
            writer.write_file(RUN_FILE, [text.encode()])
            path = writer.publish()
        except OSError as error:
            return _first_reason(error)
        try:
            prune_checkpoints(
                self._disk, path, progress.run_id, self._keep_last, (), self._workspace
            )
            removal.sweep_leftovers(self._disk, self.folder)
        except OSError as error:  # the checkpoint is safe; the next save prunes again
            log.warning("%s: old checkpoints not removed: %s", self.folder, error.strerror)
        return ""

    def _find_damage(self, path: Path, pinned: ExitStack) -> list[str]:
        """Return what is wrong with a folder's files; it is kept from being removed."""
        bad = ""
        try:
            pinned.enter_context(pin_folder(path))
            records = sorted(atomic_folder.read_manifest(path).items())
            for name, record in records[self._board.rank :: self._board.world]:
                atomic_folder.verify_file(path / name, record)
            run = read_run(path)
        except StorageError as error:
            run, bad = {}, str(error)
        bad = [found for found in self._board.gather_notes("proof", bad) if found]
        if not bad and run.get("layout_digest") != self._layout:
            raise InputError(f"{path}: belongs to another model or trainable set")
        return bad

    def _load_folder(self, path: Path, rejected: tuple[str, ...]) -> Resumed:
        reader = HuggingFaceStorageReader(str(path))
        load(self._parts, storage_reader=reader, no_dist=True)
        return Resumed(path, read_progress(path), rejected)

    def _make_error(self, name: str, reason: str) -> StorageError:
        return StorageError(
            f"{self.folder / name}: checkpoint not saved: {reason}; {describe_older(self.folder)}"
        )


def training_parts(parameters: Mapping[str, Tensor], optimizer: FusedAdamW) -> dict[str, Tensor]:
    """Return a rank's weights and both moments of AdamW, by names that all strategies share."""
    parts: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        parts[f"weights.{name}"] = parameter.detach()
        parts[f"first_moment.{name}"] = state["exp_avg"]
        parts[f"second_moment.{name}"] = state["exp_avg_sq"]
    return parts


def _first_reason(error: BaseException) -> str:
    """Return an error's first line, without the path of an OSError."""
    if isinstance(error, CheckpointException):
        error = error.failures[0][0]  # torch counts the ranks of a save, which is one
    text = error.strerror if isinstance(error, OSError) else None
    return text or first_line(error)
