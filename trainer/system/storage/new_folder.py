"""A new output folder, which appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import Disk, FolderWriter


def check_new(output: Path) -> None:
    """Check that an output does not exist or is an empty folder.

    Raises:
        InputError: it holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; give a new folder")


def write_new(output: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> Path:
    """Write a folder from the pieces of its files, with a manifest, and return its path.

    Raises:
        StorageError: the write failed; nothing is left.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        writer = FolderWriter(Disk(), output.parent.resolve(), output.name)
        try:
            for name, pieces in files.items():
                writer.write_file(name, pieces)
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}") from None
