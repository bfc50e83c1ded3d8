"""Folders that appear whole or not at all: temporary -> fsync -> manifest -> rename -> pointer.

A reader trusts the manifest (size and BLAKE3 of every file), never existence. The order of writes
makes a power cut harmless: a durable name never points to anything that is not yet durable.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from trainer.system.errors import InputError, StorageError, convert_read_errors
from trainer.system.process.slow_log import log_if_slow
from trainer.system.regular_file import read_file
from trainer.system.storage.host_identity import host_identity
from trainer.system.storage.progress import read_chunks
from trainer.system.untrusted_data import is_path_below, validate_json

MANIFEST = "manifest.json"
SCHEMA = "motley.manifest/1"
_CHUNK = 4 * 1024 * 1024


class Disk:
    """Every operation of a save, one method each, so that a test can fail at any of them."""

    def make_folder(self, path: Path) -> None:
        """Create a folder that must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a new file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some bytes; return how many."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until a file or folder is on the medium."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close; network file systems report late write errors here."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file or link at the target."""
        source.replace(target)

    def link(self, target: str, path: Path) -> None:
        """Create a symbolic link at `path`."""
        path.symlink_to(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it."""
        shutil.rmtree(path)


@dataclass(frozen=True)
class FileRecord:
    """A manifest's entry for one file."""

    size: int
    blake3: str


class FolderWriter:
    """Writes one folder under a temporary name; `publish` makes it appear, `abandon` removes it.

    The temporary folder is locked (flock) while its writer lives, and its name contains the host,
    so that `removal.sweep_leftovers` can tell leftovers from folders being written.

    Args:
        workspace: the parent of the temporary folder, on the same file system; None for `parent`.
            Once it is removed nothing can be published (`trainer.system.storage.lease`).
    """

    def __init__(self, disk: Disk, parent: Path, name: str, workspace: Path | None = None) -> None:
        self._disk = disk
        self.target = parent / name
        self.temporary = (workspace or parent) / hidden_name("tmp", name)
        self.records: dict[str, FileRecord] = {}
        self._files: list[int] = []
        self._folders: list[Path] = []
        self._lock = -1
        disk.make_folder(self.temporary)
        try:
            self._lock = open_folder(self.temporary)
            with suppress(OSError):  # a file system without locks; there is one writer anyway
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.abandon()
            raise

    def write_file(self, name: str, content: Iterable[bytes | memoryview]) -> FileRecord:
        """Write one file from consecutive chunks, hashing on the way; `publish` syncs it."""
        descriptor = self._disk.create(self.prepare_path(name))
        self._files.append(descriptor)
        hasher = blake3()
        size = 0
        for chunk in content:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                hasher.update(part)
                size += len(part)
                while part:
                    part = part[self._disk.write(descriptor, part) :]
        self.records[name] = FileRecord(size, hasher.hexdigest())
        return self.records[name]

    def prepare_path(self, name: str) -> Path:
        """Return the path of a new file; create a folder in its name."""
        path = self.temporary / name
        if path.parent != self.temporary and path.parent not in self._folders:
            self._disk.make_folder(path.parent)
            self._folders.append(path.parent)
        return path

    def adopt_file(self, name: str, record: FileRecord) -> None:
        """List a file that another process has written into the temporary folder, and synced."""
        self.records[name] = record

    def publish(self) -> Path:
        """Make the folder durable and visible, the manifest last; return its path."""
        self._sync_files()
        files = {name: asdict(record) for name, record in self.records.items()}
        text = json.dumps({"schema": SCHEMA, "files": files}, indent=2) + "\n"
        self.write_file(MANIFEST, [text.encode()])
        self._sync_files()
        for folder in self._folders:
            sync_folder(self._disk, folder)
        self._disk.sync(self._lock)
        replaced = self._set_aside()
        try:
            self._disk.rename(self.temporary, self.target)
        except OSError:
            if replaced is not None:
                replaced.replace(self.target)
            raise
        sync_folder(self._disk, self.target.parent)
        if replaced is not None:
            with suppress(OSError):  # the new one is safe; a sweep removes the old one
                self._disk.remove_tree(replaced)
        self._unlock()
        return self.target

    def abandon(self) -> None:
        """Remove what was written so far; if that fails, a later sweep does."""
        for descriptor in self._files:
            with suppress(OSError):
                os.close(descriptor)
        self._files.clear()
        with suppress(OSError):
            self._disk.remove_tree(self.temporary)
        self._unlock()

    def _sync_files(self) -> None:
        while self._files:
            self._disk.sync(self._files[-1])
            self._disk.close(self._files.pop())

    def _set_aside(self) -> Path | None:
        """Rename an older folder of the same name; after a crash it is restored."""
        if not self.target.exists():
            return None
        aside = self.temporary.with_name(hidden_name("old", self.target.name))
        self._disk.rename(self.target, aside)
        return aside

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def prepare_folder(folder: Path) -> None:
    """Create a folder and prove that it can be written.

    Raises:
        InputError: it is a file, or cannot be created or written.
    """
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may sweep here
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder}: is a file or inside one, choose another output") from None
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        if error.errno == errno.ENOSPC:
            raise StorageError(f"{folder}: the disk is full") from None
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from None


def point_link(
    disk: Disk, folder: Path, pointer: str, name: str, workspace: Path | None = None
) -> None:
    """Point the symbolic link `folder/pointer` at `name`, atomically and durably."""
    fresh = (workspace or folder) / f".link-{pointer}-{secrets.token_hex(4)}"
    disk.link(name, fresh)
    try:
        disk.rename(fresh, folder / pointer)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(disk, folder)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return a folder's manifest after checking the sizes.

    Raises:
        StorageError: no usable manifest, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    try:
        tree = validate_json(dict[str, Any], read_file(path), str(path), lines=True, least=0)
        if tree["schema"] != SCHEMA:
            raise StorageError(f"{path}: unknown schema {tree['schema']!r}")
        records = {
            str(name): FileRecord(int(entry["size"]), str(entry["blake3"]))
            for name, entry in tree["files"].items()
        }
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StorageError(f"{path}: damaged manifest") from None
    for name, record in records.items():
        if not is_path_below(name):
            raise StorageError(f"{path}: damaged manifest, names {name!r}")
        with convert_read_errors(folder / name, StorageError):
            size = (folder / name).stat().st_size
        if size != record.size:
            raise StorageError(f"{folder / name}: has {size} bytes, the manifest {record.size}")
    return records


def verify_folder(folder: Path) -> dict[str, FileRecord]:
    """Read every file of a folder and compare it with the manifest.

    Raises:
        StorageError: names the first file that differs.
    """
    records = read_manifest(folder)
    with log_if_slow(f"hashing {folder}"):
        for name, record in records.items():
            verify_file(folder / name, record)
    return records


def verify_file(path: Path, record: FileRecord) -> None:
    """Compare a file's bytes with a manifest's entry.

    Raises:
        StorageError: they differ, or cannot be read.
    """
    with convert_read_errors(path, StorageError):
        digest = _hash_file(path)
    if digest != record.blake3:
        raise StorageError(f"{path}: it does not match the manifest")


def make_record(path: Path) -> FileRecord:
    """Return a manifest's entry for a file as it is."""
    return FileRecord(path.stat().st_size, _hash_file(path))


def hidden_name(kind: str, name: str) -> str:
    """Return a new name for a hidden folder: `.tmp-NAME-HOST.RANDOM`."""
    return f".{kind}-{name}-{host_identity()}.{secrets.token_hex(4)}"


def original_name(hidden: str) -> str:
    """Return the NAME in a hidden folder's name."""
    return hidden.lstrip(".").partition("-")[2].rpartition("-")[0]


def sync_folder(disk: Disk, folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = open_folder(folder)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder, to sync or lock it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _hash_file(path: Path) -> str:
    hasher = blake3()
    for chunk in read_chunks(path, "hashing"):
        hasher.update(chunk)
    return hasher.hexdigest()
