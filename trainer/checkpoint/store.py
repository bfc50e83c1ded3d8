"""Checkpoints: what a run needs to resume bit for bit, and what PEFT loads.

`step-000120/` holds the trainable weights in Hugging Face form (`trainer.model.hf_export`), both
moments (optimizer.safetensors), the progress of the run (run.json) and manifest.json. `latest` and
`best` are links to such folders, and so is `best-evaluated`, which eval runners set.
`trainer.system.storage.atomic_folder` makes folders durable.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3

from trainer.checkpoint.adapter_folder import find_tokenizer
from trainer.checkpoint.generation_file import generation_file
from trainer.checkpoint.publication import write_publication
from trainer.checkpoint.reader import (
    BEST_EVALUATED,
    RUN_FILE,
    SCHEMA,
    Resumed,
    RunProgress,
    best_checkpoint,
    complete_checkpoints,
    linked_checkpoint,
    load_checkpoint,
    open_checkpoint,
    read_owner,
    read_progress,
    read_run,
    step_folders,
)
from trainer.checkpoint.retention import describe_older, prune_checkpoints
from trainer.checkpoint.stored_state import OPTIMIZER_FILE, StoredState
from trainer.config.run import SCRIPT
from trainer.model.hf_export import (
    BASE_DIGEST,
    companion_files,
    raw_bytes,
    safetensors_header,
    weights_file,
)
from trainer.model.initialization import initial_tensor
from trainer.model.layout import frozen_adapters
from trainer.model.safetensors_headers import read_headers
from trainer.optimizer.adamw import SavedState, TrainState, Vector
from trainer.system.errors import InputError, StorageError, convert_read_errors
from trainer.system.regular_file import read_file
from trainer.system.storage import atomic_folder, removal
from trainer.system.storage.atomic_folder import Disk, FolderWriter, verify_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.config.run import RunConfig
    from trainer.model.layout import GradientLayout
    from trainer.system.storage.lease import Lease

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored(Resumed):
    """A checkpoint that was read completely."""

    state: TrainState


@dataclass(frozen=True)
class Reopened(Resumed):
    """An intact checkpoint, to be read in pieces."""

    stored: StoredState


State = TypeVar("State")
Found = TypeVar("Found", bound=Resumed)


class CheckpointStore:
    """The checkpoints of one output folder; one process writes, any may read.

    Args:
        lease: ensures a single writer; without one the store only reads, or is used by a test.

    Raises:
        InputError: the folder is not writable, or the model directory is not usable.
    """

    def __init__(
        self,
        folder: Path,
        layout: GradientLayout,
        config: RunConfig,
        model_dir: Path,
        *,
        disk: Disk | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.folder = folder
        self.lease = lease
        self._workspace = lease.workspace if lease else folder
        self._layout = layout
        self._config = config
        self._disk = disk or Disk()
        self._model_dir = model_dir
        tokenizer_dir = find_tokenizer(model_dir, config.model.adapter)
        beside = {} if config.task == SCRIPT else companion_files(config, model_dir, tokenizer_dir)
        if config.task not in ("classify", SCRIPT):
            beside |= generation_file(model_dir, tokenizer_dir)
        # Read now: the model's folder may change while the run goes on.
        with convert_read_errors(model_dir, InputError):
            self._companions = {
                name: read_file(each) if isinstance(each, Path) else each
                for name, each in beside.items()
            }
        self._frozen = frozen_adapters(model_dir, config)
        atomic_folder.prepare_folder(folder)
        try:
            removal.sweep_leftovers(self._disk, folder)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be cleaned up: {error.strerror}") from None

    def save(
        self, snapshot: SavedState, progress: RunProgress, metric: float | None = None
    ) -> Path:
        """Write a checkpoint, durably, and point `latest` (and `best`) at it.

        The snapshot is closed as soon as its bytes are written, before the slow wait for the disk,
        so that the next update rarely has to copy. `metric` decides `best`: higher is better.
        May run in a thread; one save at a time.

        Raises:
            StorageError: the write failed; older checkpoints are unchanged.
        """
        assert snapshot.step == progress.step, (snapshot.step, progress.step)
        if self.lease:
            self.lease.check_held()
        if metric is not None and not math.isfinite(metric):
            metric = None
        name = f"step-{progress.step:06d}"
        improves = metric is not None and self._is_better(metric)
        try:
            path = self._write_folder(name, snapshot, progress, metric)
            self._point_link("latest", name)
            if improves or (metric is not None and self.best_checkpoint() == path):
                self._point_link("best", name)
        except OSError as error:
            if self.lease:
                self.lease.check_held(at_once=True)
            reason = error.strerror or str(error)
            raise StorageError(
                f"{self.folder / name}: checkpoint not saved: {reason};"
                f" {describe_older(self.folder)}"
            ) from None
        finally:
            snapshot.close()
        try:
            linked = (self.best_checkpoint(), linked_checkpoint(self.folder, BEST_EVALUATED))
            keep_last = self._config.checkpoint.keep_last
            also = [kept for kept in linked if kept]
            prune_checkpoints(self._disk, path, progress.run_id, keep_last, also, self._workspace)
            for folder in {self.folder, self._workspace}:  # left by a failed save
                removal.sweep_leftovers(self._disk, folder)
        except OSError as error:  # the checkpoint is safe; the next save prunes again
            logger.warning("%s: old checkpoints not removed: %s", self.folder, error.strerror)
        return path

    def release(self) -> None:
        """Let another process write here."""
        if self.lease:
            self.lease.release()

    def latest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint (sizes checked, bytes not)."""
        return next(iter(complete_checkpoints(self.folder)), None)

    def best_checkpoint(self) -> Path | None:
        """Return the checkpoint with the best metric, if it is complete."""
        return best_checkpoint(self.folder)

    def write_publication(self) -> Path | None:
        """Write the folder to publish from the best checkpoint, else the newest.

        Raises:
            StorageError: it cannot be written.
        """
        found = self.best_checkpoint() or self.latest_checkpoint()
        return found and write_publication(found, self._config, self._model_dir)

    def load(self, path: Path) -> tuple[TrainState, RunProgress]:
        """Read one checkpoint back, every byte checked against its manifest.

        Raises:
            StorageError: it is damaged; names the file.
            InputError: it belongs to another model or another trainable set.
        """
        return load_checkpoint(path, self._layout)

    def restore(self, run_id: str | None = None) -> Restored | None:
        """Return the newest intact checkpoint (of one run), or None if there is none.

        Newer ones that are damaged are logged and named in `rejected`.
        """
        return self._find_newest(run_id, load_checkpoint, Restored)

    def reopen(self, run_id: str) -> Reopened | None:
        """Return the same to be read in pieces; this process must hold the lease meanwhile."""
        return self._find_newest(run_id, open_checkpoint, Reopened)

    def read_owner(self) -> str | None:
        """Return the id of the run that wrote the newest complete checkpoint."""
        newest = self.latest_checkpoint()
        return read_owner(newest) if newest else None

    def _find_newest(
        self,
        run_id: str | None,
        read: Callable[[Path, GradientLayout], tuple[State, RunProgress]],
        found: Callable[[Path, RunProgress, tuple[str, ...], State], Found],
    ) -> Found | None:
        rejected: list[str] = []
        for path in step_folders(self.folder):
            try:
                if run_id is not None and read_progress(path).run_id != run_id:
                    continue
                state, progress = read(path, self._layout)
            except StorageError as error:
                rejected.append(str(error))
                logger.warning("checkpoint skipped: %s", error)
                continue
            return found(path, progress, tuple(rejected), state)
        return None

    def _write_folder(
        self, name: str, snapshot: SavedState, progress: RunProgress, metric: float | None
    ) -> Path:
        run = {
            "schema": SCHEMA,
            **asdict(progress),
            "metric": metric,
            "layout_digest": self._layout.digest,
            "weights_digest": snapshot.digest,
        }
        if run["weights_digest"] is not None and self._is_saved(self.folder / name, run):
            return self.folder / name
        writer = FolderWriter(self._disk, self.folder, name, self._workspace)
        try:
            slots = (*self._layout.iter_tensors(), *self._frozen)
            shapes = {slot.name: slot.shape for slot in slots}
            hashing = blake3()
            writer.write_file(
                weights_file(self._config),
                chain(
                    [safetensors_header(shapes, self._weights_metadata(progress))],
                    _hash_chunks(map(raw_bytes, snapshot.iter_chunks("weights")), hashing),
                    map(raw_bytes, self._frozen_pieces()),
                ),
            )
            run["weights_digest"] = hashing.hexdigest()
            moments: tuple[Vector, ...] = ("first_moment", "second_moment")
            about = {"format": "np", "step": str(snapshot.step), "layout": self._layout.digest}
            header = safetensors_header(dict.fromkeys(moments, (self._layout.size,)), about)
            pieces = chain.from_iterable(map(snapshot.iter_chunks, moments))
            writer.write_file(OPTIMIZER_FILE, chain([header], map(raw_bytes, pieces)))
            snapshot.close()
            for companion, content in self._companions.items():
                writer.write_file(companion, [content])
            text = json.dumps(run, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
            writer.write_file(RUN_FILE, [text.encode()])
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise

    def _frozen_pieces(self) -> Iterator[NDArray[np.float32]]:
        """Yield what an adapter has besides what trains, so that PEFT loads it."""
        if self._frozen:
            headers, seed = read_headers(self._model_dir), self._config.training.seed
            for slot in self._frozen:
                yield initial_tensor(headers, seed, slot)

    def _weights_metadata(self, progress: RunProgress) -> dict[str, str]:
        """Return the metadata of the weights: of an adapter also which base it belongs to."""
        about = {"format": "pt"}
        if self._config.method == "lora" and progress.base_digest is not None:
            about[BASE_DIGEST] = progress.base_digest
        return about

    def _point_link(self, pointer: str, name: str) -> None:
        atomic_folder.point_link(self._disk, self.folder, pointer, name, self._workspace)

    def _is_saved(self, path: Path, run: dict[str, Any]) -> bool:
        """Whether this checkpoint was already saved and is intact."""
        try:
            return path.exists() and bool(verify_folder(path)) and read_run(path) == run
        except StorageError:
            return False

    def _is_better(self, metric: float) -> bool:
        try:
            known = read_run(best).get("metric") if (best := self.best_checkpoint()) else None
        except StorageError:
            known = None  # damaged: not compared
        return known is None or metric > known


def _hash_chunks(pieces: Iterable[memoryview], hashing: blake3) -> Iterator[memoryview]:
    for piece in pieces:
        hashing.update(piece)
        yield piece
