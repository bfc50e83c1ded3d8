"""Read and verify a checkpoint folder: its contents and the run's progress.

Only what the manifest proves is trusted. Writing is in `trainer.checkpoint.store`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from blake3 import blake3

from trainer.checkpoint.stored_state import OPTIMIZER_FILE, StoredState
from trainer.model.formats import find_conversion
from trainer.model.hf_export import ADAPTER_FILE, MODEL_FILE
from trainer.optimizer.adamw import TrainState, Vector
from trainer.optimizer.early_stopping import ValidationHistory
from trainer.system.errors import InputError, StorageError, convert_read_errors
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_folder import MANIFEST, read_manifest, verify_folder
from trainer.system.storage.removal import pin_folder
from trainer.system.untrusted_data import validate_data, validate_json

if TYPE_CHECKING:
    from trainer.model.layout import GradientLayout

RUN_FILE = "run.json"
SCHEMA = "motley.checkpoint/2"
FOLDER = "checkpoints"
"""Below a run's output folder."""
SHARDED = "sharded"
"""Below the folder of checkpoints: those of which every rank has written a part."""
BEST_EVALUATED = "best-evaluated"
"""The eval runners' link; `best` is the run's own, by its own validation."""
_NUMBERED = re.compile(r"step-[0-9]{1,18}\Z")


@dataclass(frozen=True)
class RunProgress:
    """A run's progress besides weights and moments; random numbers follow from the seed."""

    run_id: str
    step: int
    """Applied updates."""
    epoch: int
    epoch_samples: int
    """Samples consumed in this epoch."""
    generation: int
    seed: int
    config: dict[str, Any]
    """The run config as `model_dump(mode="json")`."""
    data_digest: str | None = None
    """BLAKE3 of the training file: another file changes the order of all samples."""
    model_digest: str | None = None
    """`model_digest` of the model that the run began from."""
    base_digest: str | None = None
    """`weights_digest` of it."""
    logits_position: dict[str, Any] | None = None
    """A student's position in its folder of logits; None for a run on a file."""
    early_stopping: ValidationHistory | None = None
    """Counters of early stopping."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run resumes, and why newer ones were rejected."""

    path: Path
    progress: RunProgress
    rejected: tuple[str, ...]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints whose manifest and sizes are right, newest first."""
    return [path for path in step_folders(folder) if is_complete(path)]


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint of an output folder, a store or a checkpoint.

    Of several: the best by the run's own validation, else by an eval runner's, else the newest
    intact one.

    Raises:
        InputError: there is none.
    """
    if (path / RUN_FILE).is_file():
        return path.resolve()
    for folder in (path / FOLDER, path):
        best = best_checkpoint(folder), linked_checkpoint(folder, BEST_EVALUATED)
        candidates = [*best, *complete_checkpoints(folder)]
        for candidate in filter(None, candidates):
            with suppress(StorageError):
                verify_folder(candidate)
                return candidate
    other = find_conversion(path) if path.is_dir() else None
    raise InputError(f"{path}: {other or 'contains no intact checkpoint'}")


def read_progress(path: Path) -> RunProgress:
    """Return the progress that a checkpoint records.

    Raises:
        StorageError: run.json cannot be read.
    """
    try:
        return validate_data(RunProgress, read_run(path), str(path / RUN_FILE), lines=True)
    except ValueError as error:
        raise StorageError(str(error)) from None


def load_checkpoint(path: Path, layout: GradientLayout) -> tuple[TrainState, RunProgress]:
    """Read one checkpoint back, every byte checked against its manifest.

    Raises:
        StorageError: it is damaged; names the file.
        InputError: it belongs to another model or another trainable set.
    """
    with pin_folder(path):
        stored, progress = open_checkpoint(path, layout)
        vectors = map(stored.read_vector, get_args(Vector))
        return TrainState(*vectors, step=progress.step), progress


def open_checkpoint(path: Path, layout: GradientLayout) -> tuple[StoredState, RunProgress]:
    """Check every byte of a checkpoint against its manifest, and return it to be read in pieces.

    Nothing prevents its removal: the caller holds the lease of its folder, or a pin.

    Raises:
        StorageError: it is damaged; names the file.
        InputError: it belongs to another model or another trainable set.
    """
    records = verify_folder(path)
    missing = {RUN_FILE, OPTIMIZER_FILE} - records.keys()
    weights_name = next((n for n in (ADAPTER_FILE, MODEL_FILE) if n in records), None)
    if missing or weights_name is None:
        lacks = min(missing, default="the weights")
        raise StorageError(f"{path}: the manifest lacks {lacks}")
    run, progress = read_run(path), read_progress(path)
    if run.get("layout_digest") != layout.digest:
        raise InputError(f"{path}: belongs to another model or trainable set")
    return StoredState(path / weights_name, path / OPTIMIZER_FILE, layout), progress


def read_run(path: Path) -> dict[str, Any]:
    """Return run.json as it is.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        data = read_file(path / RUN_FILE)
        run = validate_json(dict[str, Any], data, str(path / RUN_FILE), lines=True)
    except OSError as error:
        raise StorageError(f"{path / RUN_FILE}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StorageError(str(error)) from None
    if run.get("schema") != SCHEMA:
        raise StorageError(f"{path / RUN_FILE}: not a checkpoint of {SCHEMA}")
    if isinstance(settings := run.get("config"), dict):
        cast("dict[str, Any]", settings).pop("notify", None)  # no file names a command
    return run


def step_folders(folder: Path) -> list[Path]:
    """Return the step folders, complete or not, newest first."""
    # Not `glob` and `is_dir`: of a share that fails, newer Pythons' say that nothing is there.
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        found = [Path(entry) for entry in entries if _NUMBERED.match(entry.name) and entry.is_dir()]
        return sorted(found, key=read_step, reverse=True)
    return []


def read_step(path: Path) -> int:
    """Return the step in a step folder's name."""
    return int(path.name.removeprefix("step-"))


def is_complete(path: Path) -> bool:
    """Return whether the manifest and all sizes are right; the bytes are not read."""
    try:
        return bool(read_manifest(path))
    except StorageError:
        return False


def checkpoint_digest(path: Path) -> str:
    """Return the BLAKE3 of a checkpoint's manifest, and so of every byte in it.

    Raises:
        StorageError: the manifest cannot be read.
    """
    with convert_read_errors(path / MANIFEST, StorageError):
        return blake3(read_file(path / MANIFEST)).hexdigest()


def read_owner(path: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint, if it can be read."""
    try:
        return read_progress(path).run_id
    except StorageError:
        return None


def best_checkpoint(folder: Path) -> Path | None:
    """Return the target of the link `best`, or the best other one if that is damaged."""
    if (linked := linked_checkpoint(folder, "best")) is not None:
        return linked
    rated: list[tuple[float, int, Path]] = []
    for path in complete_checkpoints(folder):
        with suppress(StorageError):
            metric = read_run(path).get("metric")
            if metric is not None:
                rated.append((metric, -read_step(path), path))
    return max(rated)[-1] if rated else None


def linked_checkpoint(folder: Path, pointer: str) -> Path | None:
    """Return the target of a link in the folder, if it is complete."""
    link = folder / pointer
    try:
        target = folder / link.readlink().name
    except OSError:
        return None
    return target if is_complete(target) else None
