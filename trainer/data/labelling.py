"""The labels of a data file: whether its lines are classified, and as which classes.

The whole file decides. Every line has a label, or none has. A label is the number of its class,
from 0 on, or a word; `true` and `false` are words. The classes of words have names, in the words'
order, or in that of a base model that has all of them; so have those that the file itself names.

JSON Lines in which the bytes of the key `label` do not occur have no label: of many such lines only
the first ones are parsed, for keys that may be meant as it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.run import MOST_CLASSES, Classes, RunConfig, Task
from trainer.data.formats import is_json_lines, read_records
from trainer.data.labels import (
    LABEL,
    NAMED,
    TEXTS,
    ClassNumber,
    Kind,
    format_label,
    format_words,
    near_misses,
    read_label,
    unwrap_single,
    whole_number,
)
from trainer.data.records import Problems, Record
from trainer.data.shapes import ANSWERS
from trainer.data.sources import find_data
from trainer.data.values import BadLineError
from trainer.system.errors import InputError
from trainer.system.regular_file import open_file

HEAD_BYTES = 4 << 20
"""Bytes of a file without labels whose lines are parsed."""
_PIECE = 1 << 20
_OF_TOOLS = {"annotation_id": "name the key of the choice with data.columns.label"}
"""Keys of annotation tools beside a label that has a name of the project: Label Studio's."""


@dataclass(frozen=True)
class Labelling:
    """The kind of all lines of a file."""

    task: Task
    classes: Classes | None = None
    """Classes of a classification."""
    absent: tuple[int, ...] = ()
    """Classes below the highest that no line has."""


def find_labels(
    path: Path, base: Sequence[str] = (), columns: Mapping[str, str] | None = None
) -> Labelling | None:
    """Return what all lines of a file are; None if it has no line that can be read.

    The file's reader reports bad lines, so they are passed over.

    Args:
        base: the names of the base model's classes, if it is a classifier.
        columns: `data.columns`.

    Raises:
        InputError: some lines have labels and some have none; a key may be meant as `label`; or the
            labels are no classes.
    """
    found = _Findings(path)
    if not _may_have_labels(path, columns):
        for record in iter_objects(path, columns, HEAD_BYTES):
            found.add(record)
        if found.has_only_texts:
            return found.decide(tuple(base))
        found = _Findings(path)
    for record in iter_objects(path, columns):
        found.add(record)
    return found.decide(tuple(base))


def with_names(config: RunConfig, base: Sequence[str]) -> RunConfig:
    """Return a config with the names of its classes: the words of its data, or the base's.

    Raises:
        InputError: the data has no labels, others, or another number of words than of classes.
    """
    count, data = config.num_classes, Path(config.data.train)
    if count is None or config.class_names is not None:
        return config
    labels = (record.tree.get(LABEL) for record in iter_objects(data, config.data.columns))
    first = unwrap_single(next((label for label in labels if label is not None), None))
    found = None
    # Numbers without names need no other look: the reader refuses words among them.
    if first is None or isinstance(first, str | bool | ClassNumber):
        found = find_labels(data, base, config.data.columns)
    if found is not None and found.task != "classify":
        raise InputError(
            f"{data}: no line has a 'label', and task is classify; to learn its texts give"
            " --set task=causal-lm --set num_classes=null"
        )
    names = found.classes if found is not None else None
    if not isinstance(names, tuple):
        names = tuple(base)
        return config.with_settings({"class_names": names}) if len(names) == count else config
    check_count(data, names, count)
    return config.with_settings({"class_names": names})


def check_count(data: Path, names: Sequence[str], count: int) -> None:
    """Check that there are as many words as classes.

    Raises:
        InputError: there are not.
    """
    if len(names) != count:
        raise InputError(
            f"{data}: its labels are {len(names)} words"
            f" ({format_words([*map(format_label, names)])}), and num_classes is {count}; set it to"
            f" {len(names)}, or name all classes in class_names"
        )


class _Findings:
    """Counts what the lines of a file have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._labelled = _Lines()
        self._unlabelled = _Lines()
        self._near: dict[str, _Lines] = {}
        self._kinds: dict[Kind, _Lines] = {}
        self._values: set[int | str] = set()
        self._names: tuple[str, ...] = ()

    def add(self, record: Record) -> None:
        tree, place = record.tree, record.locate_in(self._path)
        label = tree.get(LABEL)
        is_text = ANSWERS.isdisjoint(tree)  # else a label is a rating
        if label is None:
            self._unlabelled.add(place)
            near = [*near_misses(tree), *(key for key in _OF_TOOLS if key in tree)]
            for key in near if is_text and not tree.keys().isdisjoint(TEXTS) else ():
                self._near.setdefault(key, _Lines()).add(place)
            return
        self._labelled.add(place)
        try:
            if not is_text:
                beside = next(key for key in tree if key in ANSWERS)
                raise BadLineError(
                    f"has a 'label' beside '{beside}', and answers are not classified; remove the"
                    " label, or learn every answer with --task causal-lm"
                )
            if isinstance(label, ClassNumber):
                if self._names not in ((), label.names):
                    raise BadLineError("names other classes than the files before it; give one")
                self._names = label.names
            value, kind = read_label(label)
            self._kinds.setdefault(kind, _Lines()).add(place)
            if value not in self._values:
                self._values.add(value)
                self._check(value)
        except BadLineError as error:
            raise InputError(f"{record.location}: {error}") from None

    def _check(self, value: int | str) -> None:
        if isinstance(value, int) and not 0 <= value < MOST_CLASSES:
            raise BadLineError(
                f"'label' {value}: classes have numbers from 0 to {MOST_CLASSES - 1}, or words"
            )
        if len(self._values) > MOST_CLASSES:
            raise BadLineError(
                f"'label' {format_label(value)} is one too many: there are at most {MOST_CLASSES}"
                " classes; a text to learn is 'completion' after a 'prompt'"
            )

    @property
    def has_only_texts(self) -> bool:
        """Whether there are lines, and none has a key that may be meant as a label."""
        return bool(self._unlabelled.count) and not (self._labelled.count or self._near)

    def decide(self, base: tuple[str, ...]) -> Labelling | None:
        if not self._labelled.count:
            if not self._unlabelled.count:
                return None
            for key, lines in self._near.items():
                what = _OF_TOOLS.get(key, "rename it to 'label'")
                raise InputError(
                    f"{self._path}: no line has a 'label', but '{key[:40]}' is in {lines}: {what},"
                    " or learn the texts with --task causal-lm"
                )
            return Labelling("causal-lm")
        if self._unlabelled.count:
            near = next(iter(self._near), None)
            raise InputError(
                f"{self._path}: a 'label' is in {self._labelled}, and none in {self._unlabelled}"
                + (f", but '{near[:40]}'" if near else "")
                + ": give every line one, or learn the texts with --task causal-lm"
            )
        if len(self._kinds) > 1:
            kinds = ", ".join(f"a {kind} in {lines}" for kind, lines in self._kinds.items())
            raise InputError(f"{self._path}: the labels are of several kinds: {kinds}")
        return self._decide_classes(base)

    def _decide_classes(self, base: tuple[str, ...]) -> Labelling:
        kind = next(iter(self._kinds))
        if self._names:
            return Labelling("classify", base if set(self._names) <= set(base) else self._names)
        numbers = {whole_number(value) for value in self._values}
        if numbers <= set(range(MOST_CLASSES)):
            highest = max(filter(None, numbers), default=0)
            count = len(base) if highest < len(base) else max(2, highest + 1)
            absent = tuple(number for number in range(highest) if number not in numbers)
            return Labelling("classify", count, absent)
        words = ("false", "true") if kind == "boolean" else tuple(sorted(map(str, self._values)))
        if set(words) <= set(base):
            return Labelling("classify", base)
        if len(words) < 2:
            raise InputError(
                f"{self._path}: every label is {format_label(min(words))}; a classifier needs two"
                " or more classes"
            )
        return Labelling("classify", words)


class _Lines:
    """Counts lines and keeps the first ones' places."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, place: str) -> None:
        self.count += 1
        if len(self._first) < NAMED:
            self._first.append(place)

    def __str__(self) -> str:
        more = ", ..." if self.count > NAMED else ""
        noun = "line" if self.count == 1 else "lines"
        places = ", ".join(self._first)
        if all(place.startswith("line ") for place in self._first):
            places = f"{noun} {places.replace('line ', '')}"
        return f"{self.count:,} {noun} ({places}{more})"


def iter_objects(
    path: Path, columns: Mapping[str, str] | None = None, head: int | None = None
) -> Iterator[Record]:
    """Yield the objects of a data file; those that cannot be read are left to its reader.

    Args:
        head: of JSON Lines, only those that begin in so many bytes of each file.
    """
    with contextlib.suppress(InputError):
        for part in [path] if head is None else find_data(path).files:
            for record in read_records(part, Problems(), columns):
                if head is not None and record.begin >= head:
                    break
                if isinstance(record.tree, dict):
                    yield record


def _may_have_labels(path: Path, columns: Mapping[str, str] | None) -> bool:
    """Return whether data is no JSON Lines, or has the key of a label or an escaped one."""
    name = columns.get(LABEL) if columns else LABEL
    keys = rb"\\u00[2-7]"  # an ASCII letter that nobody escapes, as in "\u006cabel"
    if name is not None:
        keys += b"|" + re.escape(json.dumps(name).encode())
        keys += b"|" + re.escape(json.dumps(name, ensure_ascii=False).encode())
    longest = 8 * len(name or "") + 8
    try:
        found = find_data(path)
        if found.piped or not all(map(is_json_lines, found.files)):
            return True
        return any(_has_match(file, re.compile(keys), longest) for file in found.files)
    except (InputError, OSError):
        return True  # its reader reports it


def _has_match(path: Path, pattern: re.Pattern[bytes], longest: int) -> bool:
    """Return whether a file has a match of a pattern, of at most so many bytes."""
    rest = b""
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            if pattern.search(rest + piece):
                return True
            rest = piece[-longest:]
    return False
