"""Read data files as samples, or raise one error that lists the bad lines.

`formats.py` reads files of many formats as records, `shapes.py` defines the records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from blake3 import blake3

from trainer.config.run import Classes, Task
from trainer.data.formats import KEYS, count_lines, read_records
from trainer.data.labels import LabelColumn
from trainer.data.records import Problems, Record
from trainer.data.sample_file import SampleFile
from trainer.data.shapes import KeyCounts, Sample, parse_sample
from trainer.data.sources import find_data
from trainer.data.values import BadLineError
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.process.slow_log import log_if_slow
from trainer.system.storage.progress import Progress, read_chunks, report_progress

log = logging.getLogger(__name__)

_OVERHEAD = 300
"""Bytes of the objects around a sample's text and around each of its turns; rather too many."""
_LATER = 400
"""Bytes that a sample needs later: its digest, where repetitions are sought or some held out."""
_LOOK = 16 << 20
"""Bytes of samples after which the free memory is looked at again."""
_SPARE = 64 << 20


def read_samples(
    path: Path,
    task: Task,
    classes: Classes | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Sample]:
    """Return the samples of a data file, in the file's order; log keys that are not used.

    Args:
        classes: of a `classify` task.

    Raises:
        DataError, InputError: see `read_file`.
    """
    file = read_file(path, task, classes, columns)
    for line in file.unused:
        log.info("%s: %s", path, line)
    return file.samples


def read_prompts(path: Path, columns: Mapping[str, str] | None = None) -> list[Sample]:
    """Return the samples of a file to continue, whose conversations may lack an answer.

    Each has the `source` that a message about it begins with.

    Raises:
        DataError, InputError: see `read_file`.
    """
    file = read_file(path, "causal-lm", columns=columns, prompts=True)
    for line in file.unused:
        log.info("%s", line)
    return [replace(each, source=each.source or f"{path}:") for each in file.samples]


def read_file(
    path: Path,
    task: Task,
    classes: Classes | None = None,
    columns: Mapping[str, str] | None = None,
    *,
    prompts: bool = False,
) -> SampleFile:
    """Return the samples of a data file, in the file's order.

    Raises:
        DataError: lines are bad; all are counted and the first ones named.
        InputError: the file is missing, empty, or cannot be read.
    """
    assert task in get_args(Task)
    assert (classes is not None) == (task == "classify")
    if note := find_data(path).describe(path):
        log.info(note)
    labels = None if classes is None else LabelColumn(classes)
    pairs = task == "dpo"
    unused = KeyCounts(labels, pairs=pairs)
    with (
        log_if_slow(f"reading {path}"),
        report_progress(f"reading {path.name}", count_lines(path)) as rows,
    ):
        found = iter_samples(path, labels, unused, columns, prompts=prompts, pairs=pairs)
        samples = _read_all(path, (sample for _, sample in found), rows)
    if not samples:
        raise InputError(f"{path}: contains no samples")
    return SampleFile(path, samples, unused.report(), labels and labels.kind, unused.shapes)


def _read_all(path: Path, found: Iterator[Sample], progress: Progress) -> list[Sample]:
    """Return all samples of a file.

    Raises:
        InputError: they do not fit into the free memory; an allocation would end the process.
    """
    import psutil  # of the extras that train

    samples: list[Sample] = []
    unseen = 0
    for sample in found:
        samples.append(sample)
        progress.advance()
        for answer in sample.answers:
            turns = sum(_OVERHEAD + len(turn.content) for turn in answer.messages)
            unseen += _OVERHEAD + len(answer.prompt) + len(answer.text) + turns
        if unseen < _LOOK:
            continue
        unseen = 0
        free = free_memory(psutil.virtual_memory().available)
        if free < _SPARE + _LATER * len(samples):
            raise InputError(
                f"{path}: does not fit into memory: {len(samples):,} samples are read, and"
                f" {free >> 20:,} MiB are free; train on a part of it, or with fewer processes on"
                " this machine"
            )
    return samples


def hash_files(paths: Iterable[str | Path], hasher: blake3 | None = None) -> blake3:
    """Return the BLAKE3 hash of the bytes of data in their order; continues `hasher` if given.

    Of a folder the bytes of its data files count, their names do not.

    Raises:
        InputError: a file cannot be read.
    """
    hasher = hasher or blake3()
    for path in paths:
        for found in find_data(Path(path)).files:
            with convert_read_errors(found, InputError), log_if_slow(f"hashing {path}"):
                for piece in read_chunks(found, "hashing"):
                    hasher.update(piece)
            hasher.update(b"\0")
    return hasher


def check_columns(columns: Mapping[str, str] | None) -> None:
    """Check that `data.columns` names keys of a data line.

    Raises:
        InputError: a name is none.
    """
    for key in columns or ():
        if key not in KEYS:
            known = ", ".join(sorted(KEYS))
            raise InputError(f"data.columns: {key!r} is not a key of a data line ({known})")


def columns_of_run(path: Path, columns: dict[str, str]) -> dict[str, str]:
    """Return the `data.columns` of a run if data has the keys that they name, else none."""
    if not columns:
        return columns
    try:
        next(read_records(path, Problems(), columns), None)
    except InputError:  # what else is wrong with the data is wrong without them, too
        log.info("%s: lacks the data.columns of the run, so its own keys are read", path)
        return {}
    return columns


def iter_samples(
    path: Path,
    labels: LabelColumn | None,
    unused: KeyCounts,
    columns: Mapping[str, str] | None = None,
    *,
    prompts: bool = False,
    pairs: bool = False,
) -> Iterator[tuple[Record, Sample]]:
    """Yield each record with its sample, and count unused keys.

    Raises:
        DataError: after the last line, if lines are bad.
        InputError: the file cannot be read, is of a format that is not read, or `columns` names
            what is no key of a line.
    """
    check_columns(columns)
    problems = Problems()
    usual = f"{path}:"
    for record in read_records(path, problems, columns):
        try:
            where = record.locate_in(path)
            kind = {"prompts": prompts, "pairs": pairs}
            sample = parse_sample(record.tree, record.number, labels, where=where, **kind)
            unused.add(record.tree, sample)
        except BadLineError as error:
            problems.add_problem(record.location, error)
            continue
        if record.source != usual:
            sample = replace(sample, source=record.source)
        yield record, sample
    problems.raise_if_any()
