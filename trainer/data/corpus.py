"""Generated data as files: a folder that appears whole, with a manifest of what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trainer.data.shell_safety.generator import Script, generate
from trainer.errors import InputError, StorageError
from trainer.storage.atomic_folder import (
    MANIFEST,
    Disk,
    FolderWriter,
    prepare_folder,
    read_manifest,
)

FILES = ("train.jsonl", "validation.jsonl")


def write_shell_safety(output: Path, count: int, validation_count: int, seed: int) -> Path:
    """Write `train.jsonl` and `validation.jsonl` into `output`, replacing an earlier corpus.

    Raises:
        InputError: `output` holds something else, or cannot be written.
        StorageError: the disk failed; an earlier corpus is left as it was.
    """
    output = output.resolve()
    _check(output)
    prepare_folder(output.parent)
    writer: FolderWriter | None = None
    try:
        writer = FolderWriter(Disk(), output.parent, output.name)
        writer.add("train.jsonl", _lines(generate("train", count, seed)))
        writer.add("validation.jsonl", _lines(generate("validation", validation_count, seed)))
        return writer.publish()
    except OSError as error:
        if writer is not None:
            writer.abandon()
        raise StorageError(f"{output}: cannot be written: {error.strerror or error}") from None
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _check(output: Path) -> None:
    """Let only an empty folder or an earlier corpus be replaced, never other files."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output}: is a file, choose another output folder")
    present = {path.name for path in output.iterdir()}
    ours: set[str] = set()
    if MANIFEST in present:
        try:
            ours = {MANIFEST, *read_manifest(output)}
        except StorageError:
            ours = {MANIFEST, *FILES}  # an earlier corpus with a damaged or edited file
    if not present <= ours or not ours <= {MANIFEST, *FILES}:
        raise InputError(f"{output}: holds other files, choose an empty or a new folder")


def _lines(scripts: list[Script]) -> Iterator[bytes]:
    for script in scripts:
        yield json.dumps({"input": script.text, "label": script.label}).encode() + b"\n"
