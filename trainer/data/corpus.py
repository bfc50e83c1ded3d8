"""Write generated and converted data as a complete folder with a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.data.shell_safety.generator import Script, generate
from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import (
    MANIFEST,
    Disk,
    FolderWriter,
    prepare_folder,
    read_manifest,
)

FILES = ("train.jsonl", "validation.jsonl", "test.jsonl")
Lines = Iterable[dict[str, object]]


def write_shell_safety(output: Path, count: int, validation_count: int, seed: int) -> Path:
    """Write labelled scripts; see `write_corpus`."""

    def iter_rows(scripts: Iterable[Script]) -> Lines:
        return ({"input": script.text, "label": script.label} for script in scripts)

    parts = {
        "train": iter_rows(generate("train", count, seed)),
        "validation": iter_rows(generate("validation", validation_count, seed)),
    }
    return write_corpus(output, parts)


def write_corpus(output: Path, parts: Mapping[str, Lines]) -> Path:
    """Write `NAME.jsonl` for each part into `output`, replacing an earlier corpus.

    Raises:
        InputError: `output` holds something else, or cannot be written.
        StorageError: the disk failed; an earlier corpus is unchanged.
    """
    output = output.resolve()
    _check_output(output)
    prepare_folder(output.parent)
    writer: FolderWriter | None = None
    try:
        writer = FolderWriter(Disk(), output.parent, output.name)
        for name, lines in parts.items():
            writer.write_file(
                f"{name}.jsonl", (json.dumps(line).encode() + b"\n" for line in lines)
            )
        return writer.publish()
    except OSError as error:
        if writer is not None:
            writer.abandon()
        raise StorageError(f"{output}: cannot be written: {error.strerror or error}") from None
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _check_output(output: Path) -> None:
    """Check that only an empty folder or an earlier corpus is replaced, never other files."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output}: is a file, choose another output folder")
    if output.samefile("."):
        raise InputError(f"{output}: is the current folder, which is replaced; give one below it")
    present = {path.name for path in output.iterdir()}
    ours: set[str] = set()
    if MANIFEST in present:
        try:
            ours = {MANIFEST, *read_manifest(output)}
        except StorageError:
            ours = {MANIFEST, *FILES}  # an earlier corpus with a damaged or edited file
    if not present <= ours or not ours <= {MANIFEST, *FILES}:
        raise InputError(f"{output}: contains other files; choose an empty or new folder")
