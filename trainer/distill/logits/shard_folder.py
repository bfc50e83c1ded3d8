"""A folder of shards, each complete or absent: its description, written before any, and its shards.

OUT/dataset.json              the description: what made the shards, of what, and their plan
OUT/shard-00000/              a Parquet file and manifest.json
OUT/teachers/NAME.json        heartbeats (`trainer.distill.logits.heartbeat`)
OUT/requests/shard-00003.json shards that a reader requests again
OUT/quarantine/               shards that a reader found damaged
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from blake3 import blake3

from trainer.distill.logits.description import Described, ShardPlan, find_difference, shard_name
from trainer.system.errors import InputError, RefusedError, StorageError, convert_read_errors
from trainer.system.regular_file import read_file
from trainer.system.storage import atomic_folder
from trainer.system.storage.atomic_file import replace_file
from trainer.system.storage.atomic_folder import Disk, FolderWriter
from trainer.system.storage.removal import sweep_leftovers

if TYPE_CHECKING:
    from trainer.distill.logits.shard_folder import ShardFolder

DATASET = "dataset.json"
_LARGEST = 8 << 30
"""Bytes of a shard's file: one column has at most 2^31 values."""
TEACHERS, REQUESTS, QUARANTINE = "teachers", "requests", "quarantine"

D = TypeVar("D", bound=Described)
Item = TypeVar("Item")


class ShardFolder(ABC, Generic[D, Item]):
    """Reads and writes one folder of shards; any number of processes may do so at once."""

    file: ClassVar[str]
    """The name of a shard's file."""

    @abstractmethod
    def _parse_description(self, text: bytes) -> D:
        """Return a description; raises ValueError."""

    @abstractmethod
    def _encode_shard(self, plan: ShardPlan, items: Sequence[Item]) -> memoryview:
        """Return a shard's file."""

    @abstractmethod
    def _decode_shard(self, plan: ShardPlan, content: bytes) -> Sequence[Item]:
        """Return what a shard's file holds; raises ValueError."""

    @abstractmethod
    def _find_faults(self, plan: ShardPlan, items: Sequence[Item]) -> list[str]:
        """Return what is missing, doubled or out of order in a shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: D | None = None

    @property
    def description(self) -> D:
        """The contents of the complete folder.

        Raises:
            InputError: there is no usable dataset.json.
        """
        if self._known is None:
            path = self.path / DATASET
            try:
                self._known = self._parse_description(read_file(path))
            except FileNotFoundError:
                raise InputError(f"{path}: not found, no teacher has started here") from None
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: {error}") from None
        return self._known

    @property
    def digest(self) -> str:
        """BLAKE3 of everything that a student and its teachers must agree on."""
        return self.description.digest

    def write_description(self, wanted: D, disk: Disk | None = None) -> D:
        """Write dataset.json, or compare with the existing one; of two writers one wins.

        Raises:
            RefusedError: its contents differ; names both values.
            InputError: the folder cannot be written.
            StorageError: the disk failed.
        """
        atomic_folder.prepare_folder(self.path)
        for part in (self.path / name for name in (TEACHERS, REQUESTS, QUARANTINE)):
            try:
                part.mkdir(exist_ok=True)
            except FileExistsError:
                raise InputError(f"{part}: is a file, choose another output") from None
            except OSError as error:
                raise StorageError(f"{part}: not made: {error.strerror}") from None
        if not (self.path / DATASET).exists():
            self._create_description(wanted.to_json().encode(), disk or Disk())
        return self.compare_description(wanted)

    def compare_description(self, wanted: D) -> D:
        """Return the existing description if it is the wanted one.

        Raises:
            RefusedError: its contents differ; names both values.
            InputError: there is no usable dataset.json.
        """
        self._known = None
        differs = find_difference(self.description, wanted)
        if differs:
            field, there, here = differs
            raise RefusedError(
                f"{self.path / DATASET}: {field} is {there} there and {here} here; "
                "use the same value, or another output folder"
            )
        return self.description

    @property
    def is_described(self) -> bool:
        """Whether a teacher has begun."""
        return _path_exists(self.path / DATASET)

    @property
    def teachers(self) -> Path:
        """The folder of the heartbeats of those that write here."""
        return self.path / TEACHERS

    @property
    def plans(self) -> Sequence[ShardPlan]:
        """The plans of all shards, in order."""
        return self.description.shards

    def shard_plan(self, number: int) -> ShardPlan:
        """Return the plan of a shard."""
        return self.description.shards[number]

    def shard_path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.path / shard_name(number)

    def has_shard(self, number: int) -> bool:
        """Whether a shard exists, complete or not; its manifest comes last."""
        return _path_exists(self.shard_path(number) / atomic_folder.MANIFEST)

    def is_complete(self, number: int) -> bool:
        """Whether a shard exists and every file has its manifest's size."""
        try:
            return self.file in atomic_folder.read_manifest(self.shard_path(number))
        except StorageError:
            return False

    def list_missing(self) -> list[int]:
        """Return the shards that are not complete."""
        return [plan.number for plan in self.plans if not self.is_complete(plan.number)]

    def verify_shard(self, number: int) -> None:
        """Read every byte of a shard, and check that each token occurs once.

        Raises:
            StorageError: it differs from its manifest or its plan; names the place.
        """
        found = self._find_faults(self.shard_plan(number), self.read_shard(number))
        if found:
            raise StorageError(f"{self.shard_path(number)}: {found[0]}")

    def write_shard(self, number: int, items: Iterable[Item], disk: Disk | None = None) -> Path:
        """Write a shard, which appears whole or not at all, and remove the request for it.

        An intact existing shard stays, a damaged one goes to quarantine.

        Raises:
            InputError: the items are not those of the shard's plan.
            StorageError: the disk failed or is full.
        """
        items = list(items)
        plan = self.shard_plan(number)
        found = self._find_faults(plan, items)
        if found:
            raise InputError(
                f"{self.shard_path(number)}: {found[0]}; has the corpus or tokenizer changed?"
            )
        if self.has_shard(number):
            self.quarantine_shard(number, "written again")
        if not self.has_shard(number):
            self._publish_shard(plan, self._encode_shard(plan, items), disk or Disk())
        with suppress(OSError):  # a request that stays is found fulfilled
            (self.path / REQUESTS / f"{plan.name}.json").unlink(missing_ok=True)
        return self.shard_path(number)

    def read_shard(self, number: int) -> Sequence[Item]:
        """Return what a shard holds after comparing its bytes with the manifest.

        Raises:
            StorageError: it is missing or damaged; none of it is returned.
        """
        folder = self.shard_path(number)
        record = atomic_folder.read_manifest(folder).get(self.file)
        if record is None:
            raise StorageError(f"{folder}: its manifest names no {self.file}")
        with convert_read_errors(folder / self.file, StorageError):
            content = read_file(folder / self.file, _LARGEST)
        if blake3(content).hexdigest() != record.blake3:
            raise StorageError(f"{folder / self.file}: it does not match the manifest")
        try:
            return self._decode_shard(self.shard_plan(number), content)
        except ValueError as error:
            raise StorageError(f"{folder / self.file}: {error}") from None

    def quarantine_shard(self, number: int, reason: str) -> Path | None:
        """Move a damaged shard away and request it again.

        Returns its new path; None if another process moved it, or a teacher has replaced it.

        Raises:
            StorageError: the folder cannot be changed.
        """
        try:
            self.read_shard(number)
        except StorageError:
            pass
        else:
            return None
        plan = self.shard_plan(number)
        aside = self.path / QUARANTINE / f"{plan.name}-{secrets.token_hex(4)}"
        try:
            for part in (QUARANTINE, REQUESTS):  # a copied folder may lack empty folders
                (self.path / part).mkdir(exist_ok=True)
            # Before the move: a missing shard that is not requested is never made again.
            self.request_shard(number, reason)
            self.shard_path(number).rename(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{self.shard_path(number)}: damaged ({reason}), and cannot be moved away: "
                f"{error.strerror}"
            ) from None
        # A teacher may have replaced it meanwhile, so that the new one was moved.
        if number not in self.list_requests():
            self.request_shard(number, reason)
        return aside

    def request_shard(self, number: int, reason: str) -> None:
        """Request a shard from the teachers."""
        plan = self.shard_plan(number)
        text = json.dumps({"shard": number, "reason": reason}) + "\n"
        path = self.path / REQUESTS / f"{plan.name}.json"
        try:
            replace_file(path, text)
        except OSError as error:
            if not path.exists():  # else another student requested it
                raise StorageError(f"{path}: not written: {error.strerror}") from None

    def list_requests(self) -> list[int]:
        """Return the requested shards, in order."""
        names = list_matching(self.path / REQUESTS, "shard-*.json")
        return [plan.number for plan in self.plans if f"{plan.name}.json" in names]

    def _publish_shard(self, plan: ShardPlan, content: memoryview, disk: Disk) -> None:
        writer: FolderWriter | None = None
        try:
            sweep_leftovers(disk, self.path, plan.name)  # left by an attempt that died
            writer = FolderWriter(disk, self.path, plan.name)
            writer.write_file(self.file, [content])
            writer.publish()
        except BaseException as error:
            if writer is not None:
                writer.abandon()
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise StorageError(f"{self.path / plan.name}: not written: {reason}") from None
            raise

    def _create_description(self, content: bytes, disk: Disk) -> None:
        """Create dataset.json whole, unless another process was first."""
        path = self.path / DATASET
        fresh = self.path / f".{DATASET}-{secrets.token_hex(4)}"
        try:
            descriptor = disk.create(fresh)
            try:
                view = memoryview(content)
                while view:
                    view = view[disk.write(descriptor, view) :]
                disk.sync(descriptor)
            finally:
                disk.close(descriptor)
            self._link_description(fresh, disk)
            atomic_folder.sync_folder(disk, self.path)
        except OSError as error:
            raise StorageError(f"{path}: not written: {error.strerror}") from None
        finally:
            # Now the temporary files of killed processes are not needed.
            for left in self.path.glob(f".{DATASET}-*") if path.exists() else [fresh]:
                left.unlink(missing_ok=True)

    def _link_description(self, fresh: Path, disk: Disk) -> None:
        """Link a file as dataset.json; unlike a rename this never replaces one."""
        try:
            os.link(fresh, self.path / DATASET)
        except (FileExistsError, FileNotFoundError):  # another process was first
            pass
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise
            # No hard links here (exFAT): of two simultaneous writers the later one wins.
            disk.rename(fresh, self.path / DATASET)


def list_matching(folder: Path, pattern: str) -> list[str]:
    """Return the names in a folder that match; none while its share is unreachable."""
    try:
        return sorted(path.name for path in folder.iterdir() if fnmatch(path.name, pattern))
    except OSError:
        return []


def _path_exists(path: Path) -> bool:
    """Whether a path exists; an unreachable share raises errors instead."""
    try:
        return path.exists()
    except OSError:
        return False


@dataclass(frozen=True)
class ShardVerdict:
    """The result for one shard."""

    number: int
    name: str
    state: Literal["whole", "missing", "damaged"]
    reason: str | None = None


def verify_shards(folder: ShardFolder[Any, Any]) -> Iterator[ShardVerdict]:
    """Read every byte of every shard, one after the other.

    Raises:
        InputError: the folder has no usable dataset.json.
    """
    for plan in folder.plans:
        try:
            folder.shard_plan(plan.number)  # of rounds: reads their answers
            if folder.has_shard(plan.number):
                folder.verify_shard(plan.number)
                yield ShardVerdict(plan.number, plan.name, "whole")
            else:
                yield ShardVerdict(plan.number, plan.name, "missing")
        except StorageError as error:
            yield ShardVerdict(plan.number, plan.name, "damaged", str(error))
