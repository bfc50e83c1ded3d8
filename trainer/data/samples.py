"""Read JSON Lines as samples, or raise one error that lists the bad lines.

`shapes.py` defines the lines. Blank lines are skipped, a leading byte order mark is dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args

from blake3 import blake3

from trainer.config.run import Task
from trainer.data.formats import HEAD_BYTES, refuse_other_formats
from trainer.data.shapes import Sample, UnusedKeys, parse_sample
from trainer.data.values import BadLineError
from trainer.system.errors import InputError
from trainer.system.process.announcement import announced

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 10 * 1024 * 1024
"""A longer line is reported, not parsed."""
REPORTED_LINES = 10
"""Bad lines that an error lists; the others are counted."""


class DataError(InputError):
    """A data file has bad lines; the message names the first ones as `file:line: problem`."""


@dataclass(frozen=True)
class SampleFile:
    """All samples of one file and the BLAKE3 hex digest of its bytes."""

    path: Path
    samples: list[Sample]
    digest: str
    unused: list[str]
    """Lines on keys that are not used, for the summary at the start."""


def read_samples(path: Path, task: Task, num_classes: int | None = None) -> list[Sample]:
    """Return the samples of a JSON Lines file, in the file's order; log keys that are not used.

    Raises:
        DataError: lines are bad; all are counted and the first ones named.
        InputError: the file is missing, empty, or cannot be read.
    """
    file = read_file(path, task, num_classes)
    for line in file.unused:
        log.info("%s: %s", path, line)
    return file.samples


def read_prompts(path: Path) -> list[Sample]:
    """Return the samples of a file to continue, whose conversations may lack an answer.

    Raises:
        DataError: lines are bad; all are counted and the first ones named.
        InputError: the file is missing, empty, or cannot be read.
    """
    return read_file(path, "causal-lm", prompts=True).samples


def read_file(
    path: Path, task: Task, num_classes: int | None = None, *, prompts: bool = False
) -> SampleFile:
    """Return the samples of a JSON Lines file with the digest of its bytes; see `read_samples`."""
    assert task in get_args(Task)
    assert (num_classes is not None) == (task == "classify")
    if not path.exists():
        raise InputError(f"{path}: no such data file")
    if path.is_dir():
        raise InputError(f"{path}: is a folder, expected a JSON Lines file")
    hasher, unused = blake3(), UnusedKeys()
    with announced(f"reading {path}"):
        found = iterate(path, task, num_classes, hasher, unused, prompts=prompts)
        samples = [sample for _, sample in found]
    if not samples:
        raise InputError(f"{path}: holds no samples, expected one JSON object a line")
    return SampleFile(path, samples, hasher.hexdigest(), unused.report())


def hash_files(paths: Iterable[str | Path], hasher: blake3 | None = None) -> blake3:
    """Return the BLAKE3 hash of the bytes of files in their order; continues `hasher` if given.

    Raises:
        InputError: a file cannot be read.
    """
    hasher = hasher or blake3()
    for path in paths:
        try:
            with announced(f"hashing {path}"):
                hasher.update_mmap(path)
        except OSError as error:
            # The library's own errors carry a text, not an errno.
            reason = error.strerror or "no such file, or not readable"
            raise InputError(f"{path}: cannot be read: {reason}") from None
        hasher.update(b"\0")
    return hasher


def iterate(
    path: Path,
    task: Task,
    num_classes: int | None,
    hasher: blake3,
    unused: UnusedKeys,
    *,
    prompts: bool = False,
) -> Iterator[tuple[int, Sample]]:
    """Yield each sample and the byte at which its line begins.

    Hashes the file and counts unused keys on the way.

    Raises:
        DataError: after the last line, if lines are bad.
        InputError: the file cannot be read, or is not JSON Lines.
    """
    problems: list[str] = []
    begin = 0
    try:
        with path.open("rb") as file:
            refuse_other_formats(path, file.peek(HEAD_BYTES))
            for number, raw in _lines(file, hasher):
                try:
                    if raw is None:
                        raise BadLineError(f"line is longer than {MAX_LINE_BYTES >> 20} MiB")
                    if raw.strip():
                        tree = _tree(raw)
                        sample = parse_sample(tree, number, task, num_classes, prompts=prompts)
                        unused.add(tree, sample)
                        yield begin, sample
                except BadLineError as error:
                    problems.append(f"{path}:{number}: {error}")
                begin = file.tell()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if problems:
        shown = "\n".join(problems[:REPORTED_LINES])
        rest = len(problems) - REPORTED_LINES
        raise DataError(shown + (f"\nand {rest} more bad lines" if rest > 0 else ""))


def read_line(path: Path, begin: int, number: int) -> Sample:
    """Return the `causal-lm` sample whose line begins at a byte that `iterate` gave.

    Raises:
        DataError: the line has changed.
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            raw = file.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return parse_sample(_tree(_without_mark(raw, number)), number, "causal-lm", None)
    except BadLineError as error:
        raise DataError(f"{path}:{number}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a duplicate key: json would silently take the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise BadLineError(f"has the key {double[:40]!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _lines(file: BinaryIO, hasher: blake3) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number; None stands for a line above the limit."""
    number = 0
    while piece := file.readline(MAX_LINE_BYTES + 1):
        hasher.update(piece)
        number += 1
        if len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(MAX_LINE_BYTES)
                hasher.update(piece)
            yield number, None
        else:
            yield number, _without_mark(piece, number)


def _without_mark(raw: bytes, number: int) -> bytes:
    """Drop the byte order mark that some editors write."""
    return raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw


def _tree(raw: bytes) -> Any:
    """Return the JSON value of a line.

    Raises:
        BadLineError: it is not JSON, or not UTF-8.
    """
    try:
        # Without the newline, after which a column would belong to the next line.
        return _DECODER.decode(raw.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError(f"not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise BadLineError(f"not JSON: {problem} at column {error.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        raise BadLineError(
            "not JSON that can be read: a number too long or nested too deep"
        ) from None
