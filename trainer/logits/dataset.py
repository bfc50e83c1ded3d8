"""A folder of teacher logits: what it will hold, said before anything is scored, and its shards.

OUT/dataset.json              what was agreed on: teacher, tokenizer, corpus, scheme, the shards
OUT/shard-00000/              logits.parquet and manifest.json, whole or not there
OUT/teachers/NAME.json        heartbeats (`trainer.logits.heartbeat`)
OUT/requests/shard-00003.json shards that a student wants once more
OUT/quarantine/               shards that a student found damaged
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from trainer import storage
from trainer.errors import InputError, RefusedError, StorageError
from trainer.logits.scores import Scheme, Window
from trainer.records import replace_file
from trainer.storage import Disk, FolderWriter

SCHEMA = "motley.logits/1"
DATASET = "dataset.json"
SHARD_FILE = "logits.parquet"
TEACHERS, REQUESTS, QUARANTINE = "teachers", "requests", "quarantine"

Values = Literal["float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class TeacherInfo:
    """Who scores."""

    name: str
    """For people; not compared, since the same model lies elsewhere on another host."""
    digest: str
    dtype: str
    """Of the forward: `bfloat16` and `float32` do not give the same scores."""
    vocab_size: int
    """Rows of its output layer, padding included."""
    tokenizer_size: int
    """Tokens of its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The student's tokenizer: its ids are what the shards hold."""

    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """What is scored."""

    digest: str
    documents: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A range of documents, and how many windows and tokens it makes."""

    number: int
    first_document: int
    stop_document: int
    windows: int
    tokens: int

    @property
    def name(self) -> str:
        """The shard's folder."""
        return f"shard-{self.number:05d}"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a folder of logits will hold when it is complete.

    Raises:
        ValueError: the shards do not cover the corpus, each document once and in order.
    """

    teacher: TeacherInfo
    tokenizer: TokenizerInfo
    corpus: CorpusInfo
    scheme: Scheme
    values: Values
    """How probabilities are stored."""
    max_seq_len: int
    """Tokens of the longest window."""
    seed: int
    """Of the draws."""
    shards: tuple[ShardPlan, ...]

    def __post_init__(self) -> None:
        document = 0
        for number, shard in enumerate(self.shards):
            if (shard.number, shard.first_document) != (number, document):
                raise ValueError(f"shard {number} does not begin at document {document}")
            document = shard.stop_document
        if document != self.corpus.documents:
            raise ValueError(f"the shards end at document {document} of {self.corpus.documents}")

    @property
    def windows(self) -> int:
        """Windows of all shards."""
        return sum(shard.windows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def to_json(self) -> str:
        """Return the text of dataset.json."""
        tree = {"schema": SCHEMA, **_description.dump_python(self, mode="json")}
        return json.dumps(tree, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Read what `to_json` wrote.

        Raises:
            ValueError: names what is wrong.
        """
        tree: Any = json.loads(text)
        schema = tree.pop("schema", None) if isinstance(tree, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema is {schema!r}, this version reads {SCHEMA!r}")
        try:
            return _description.validate_python(tree)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None

    @property
    def digest(self) -> str:
        """BLAKE3 of everything that a student's run depends on."""
        return blake3(self.to_json().encode()).hexdigest()


_description = TypeAdapter(Description)


class LogitsFolder:
    """Reads and writes one folder of logits; any number of processes may do so at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: Description | None = None

    @property
    def description(self) -> Description:
        """What the folder will hold.

        Raises:
            InputError: there is no usable dataset.json.
        """
        if self._known is None:
            path = self.path / DATASET
            try:
                self._known = Description.from_json(path.read_bytes())
            except FileNotFoundError:
                raise InputError(f"{path}: not found, no teacher has begun here") from None
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: {error}") from None
        return self._known

    @property
    def digest(self) -> str:
        """BLAKE3 of what a student and its teachers must agree on."""
        return self.description.digest

    def describe(self, wanted: Description, disk: Disk | None = None) -> Description:
        """Write dataset.json, or compare with the one that is there; of two writers one wins.

        Raises:
            RefusedError: it says something else; names both values.
            InputError: the folder cannot be written.
            StorageError: the disk failed.
        """
        storage.prepare_folder(self.path)
        for part in (TEACHERS, REQUESTS, QUARANTINE):
            (self.path / part).mkdir(exist_ok=True)
        storage.sweep(disk or Disk(), self.path)
        if not (self.path / DATASET).exists():
            self._create(wanted.to_json().encode(), disk or Disk())
        self._known = None
        difference = _difference(self.description, wanted)
        if difference:
            field, there, here = difference
            raise RefusedError(
                f"{self.path / DATASET}: {field} is {there} there and {here} here; "
                "give the same, or another output folder"
            )
        return self.description

    def shard_path(self, number: int) -> Path:
        """Return where a shard is, or will be."""
        return self.path / self.description.shards[number].name

    def is_there(self, number: int) -> bool:
        """Whether a shard was published, whole or not; its manifest comes last."""
        return (self.shard_path(number) / storage.MANIFEST).exists()

    def is_complete(self, number: int) -> bool:
        """Whether a shard is there and every file has the size that its manifest names."""
        try:
            return SHARD_FILE in storage.read_manifest(self.shard_path(number))
        except StorageError:
            return False

    def missing(self) -> list[int]:
        """Return the shards that are not complete."""
        shards = self.description.shards
        return [shard.number for shard in shards if not self.is_complete(shard.number)]

    def verify(self, number: int) -> None:
        """Read every byte of a shard.

        Raises:
            StorageError: it differs from its manifest; names the file.
        """
        if SHARD_FILE not in storage.verify(self.shard_path(number)):
            raise StorageError(f"{self.shard_path(number)}: its manifest names no {SHARD_FILE}")

    def write(self, number: int, windows: Iterable[Window], disk: Disk | None = None) -> Path:
        """Write a shard, which appears whole or not at all, and drop the request for it.

        Raises:
            InputError: the windows are not those of the shard's plan.
            StorageError: the disk failed or is full.
        """
        from trainer.logits.shard import encode

        windows = list(windows)
        plan = self.description.shards[number]
        found = (len(windows), sum(len(window.tokens) for window in windows))
        if found != (plan.windows, plan.tokens):
            raise InputError(
                f"{self.shard_path(number)}: {found[0]} windows of {found[1]} tokens, planned were "
                f"{plan.windows} of {plan.tokens}; the corpus has changed"
            )
        content = encode(self.description, plan, windows)
        writer: FolderWriter | None = None
        try:
            writer = FolderWriter(disk or Disk(), self.path, plan.name)
            writer.add(SHARD_FILE, [content])
            path = writer.publish()
        except BaseException as error:
            if writer is not None:
                writer.abandon()
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise StorageError(f"{self.shard_path(number)}: not written: {reason}") from None
            raise
        with suppress(OSError):  # a request that stays is looked at, and found fulfilled
            (self.path / REQUESTS / f"{plan.name}.json").unlink(missing_ok=True)
        return path

    def read(self, number: int) -> Sequence[Window]:
        """Return a shard's windows after comparing its bytes with the manifest.

        Raises:
            StorageError: it is missing or damaged; nothing of it was used.
        """
        from trainer.logits.shard import decode

        folder = self.shard_path(number)
        record = storage.read_manifest(folder).get(SHARD_FILE)
        if record is None:
            raise StorageError(f"{folder}: its manifest names no {SHARD_FILE}")
        try:
            content = (folder / SHARD_FILE).read_bytes()
        except OSError as error:
            raise StorageError(f"{folder / SHARD_FILE}: cannot be read: {error.strerror}") from None
        if blake3(content).hexdigest() != record.blake3:
            raise StorageError(f"{folder / SHARD_FILE}: its bytes are not those in the manifest")
        try:
            return decode(self.description, self.description.shards[number], content)
        except ValueError as error:
            raise StorageError(f"{folder / SHARD_FILE}: {error}") from None

    def quarantine(self, number: int, reason: str) -> Path | None:
        """Move a damaged shard away and ask for it again.

        Returns where it lies now; None when somebody else moved it, or a teacher has replaced it.

        Raises:
            StorageError: the folder cannot be changed.
        """
        try:
            self.read(number)
        except StorageError:
            pass
        else:
            return None
        plan = self.description.shards[number]
        aside = self.path / QUARANTINE / f"{plan.name}-{secrets.token_hex(4)}"
        try:
            self.shard_path(number).rename(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{self.shard_path(number)}: damaged ({reason}), and cannot be moved away: "
                f"{error.strerror}"
            ) from None
        self.request(number, reason)
        return aside

    def request(self, number: int, reason: str) -> None:
        """Ask the teachers for a shard."""
        plan = self.description.shards[number]
        text = json.dumps({"shard": number, "reason": reason}) + "\n"
        path = self.path / REQUESTS / f"{plan.name}.json"
        try:
            replace_file(path, text)
        except OSError as error:
            if not path.exists():  # else another student asks for the same
                raise StorageError(f"{path}: not written: {error.strerror}") from None

    def requests(self) -> list[int]:
        """Return the shards that students ask for, in order."""
        names = {path.stem for path in (self.path / REQUESTS).glob("shard-*.json")}
        return [shard.number for shard in self.description.shards if shard.name in names]

    def _create(self, content: bytes, disk: Disk) -> None:
        """Let dataset.json appear whole, unless another process was first."""
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
            with suppress(FileExistsError):
                os.link(fresh, self.path / DATASET)  # unlike a rename it never replaces
            storage.sync_folder(disk, self.path)
        except OSError as error:
            raise StorageError(f"{self.path / DATASET}: not written: {error.strerror}") from None
        finally:
            with suppress(OSError):
                fresh.unlink()


def _difference(there: Description, here: Description) -> tuple[str, Any, Any] | None:
    """Return the first field that differs, and both values."""
    left, right = (_description.dump_python(each, mode="json") for each in (there, here))
    for section, value in left.items():
        if section == "shards":
            if value != right[section]:
                return "the split into shards", f"{len(value)} shards", f"{len(right[section])}"
        elif not isinstance(value, dict):
            if value != right[section]:
                return section, value, right[section]
        else:
            for key, inner in value.items():
                if (section, key) != ("teacher", "name") and inner != right[section][key]:
                    return f"{section}.{key}", inner, right[section][key]
    return None
