"""The label of a line as its class: its number, from 0 on, or a word.

`true` and `false` are words. The labels of a file are all numbers, or all words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from trainer.config.run import Classes
from trainer.data.values import BadLineError, describe_type, read_nonempty_text

TEXTS = ("input", "text", "sentence")
"""The keys of a text that is classified."""
LABEL = "label"
_ABSENT = frozenset(
    (
        *("NA", "N/A", "n/a", "<NA>", "#N/A", "#N/A N/A", "#NA", "NULL", "null", "None"),
        *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    )
)
"""Cells that pandas, and `datasets` with it, read as a missing value, beside an empty one."""
_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0*)?")
_FRACTION = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
_CONTROLS = frozenset(("Cc", "Zl", "Zp"))
_OF_TOOLS = frozenset(("accept", "annotation", "cats"))
"""Keys of labels in exports of annotation tools, with `NAME.responses` of Argilla."""
NAMED = 5
"""Lines, and words, that an error names of each kind."""

Kind = Literal["number", "word", "boolean"]


class ClassNumber(int):
    """A label of a file that names its classes in their order, as `datasets` writes it."""

    names: tuple[str, ...] = ()


class LabelColumn:
    """Reads the labels of one file as classes; they are all numbers, or all words."""

    def __init__(self, classes: Classes) -> None:
        names = classes if isinstance(classes, tuple) else ()
        self._indices = {name: index for index, name in enumerate(names)}
        self._count = classes if isinstance(classes, int) else len(classes)
        self.kind: Kind | None = None
        """Kind of the labels, once one is read."""
        self._first = ""

    def class_index(self, label: Any, where: str) -> int:
        """Return the class of a label; `where` names its line in a later error.

        Raises:
            BadLineError: it is none, or of another kind than the labels before it.
        """
        value, kind = read_label(self.as_named(label))
        if value in self._indices:
            index, kind = self._indices[str(value)], "word"
        elif (whole := whole_number(value)) is not None:
            index, kind = whole, "number"
        else:
            raise BadLineError(
                f"'label' must be {self._describe_allowed()}, got {format_label(value)}"
            )
        if not 0 <= index < self._count:
            raise BadLineError(f"'label' must be from 0 to {self._count - 1}, got {index}")
        if self.kind is None:
            self.kind, self._first = kind, where
        elif kind != self.kind:
            raise BadLineError(f"'label' is a {kind}, that of {self._first} is a {self.kind}")
        return index

    def as_named(self, label: Any) -> Any:
        """Return a class's name for its number if the file has these names in another order."""
        if not isinstance(label, ClassNumber) or not 0 <= label < len(label.names):
            return label
        same = label.names == tuple(self._indices)
        return label if same or self._indices.keys().isdisjoint(label.names) else label.names[label]

    def _describe_allowed(self) -> str:
        if not self._indices:
            return f"an integer from 0 to {self._count - 1}"
        return f"one of the classes {format_words([*map(format_label, self._indices)])}"


def parse_labelled(tree: dict[str, Any], where: str, labels: LabelColumn) -> tuple[str, int]:
    """Return the text and the class of a line.

    Raises:
        BadLineError: it has no label, or not one text.
    """
    if tree.get(LABEL) is None:
        close = near_misses(tree)
        raise BadLineError(
            "lacks the key 'label'" + (f"; is it '{close[0]}'? rename that" if close else "")
        )
    given = [key for key in TEXTS if key in tree]
    if not given:
        others = format_words([f"'{key[:40]}'" for key in tree if key != LABEL]) or "none"
        raise BadLineError(f"lacks the key 'input' (or 'text'); its other keys are {others}")
    if len(given) > 1:
        raise BadLineError(f"has {' and '.join(map(repr, given))}, of which one is the text")
    return read_nonempty_text(tree, given[0]), labels.class_index(tree[LABEL], where)


def near_misses(keys: Iterable[str]) -> list[str]:
    """Return the keys that may be meant as `label`."""
    return [key for key in keys if _is_near(key)]


@lru_cache(maxsize=1024)
def _is_near(key: str) -> bool:
    close = LABEL in key.lower() or get_close_matches(key.lower(), [LABEL], cutoff=0.79)
    close = close or key in _OF_TOOLS or key.endswith(".responses")
    return key != LABEL and bool(close)


def read_label(label: Any) -> tuple[int | str, Kind]:
    """Return a label and what it is.

    Raises:
        BadLineError: it is neither a word nor a whole number.
    """
    label = unwrap_single(label)
    if isinstance(label, bool):
        return ("true" if label else "false"), "boolean"
    if isinstance(label, int):
        return label, "number"
    if isinstance(label, float) and label.is_integer():
        return int(label), "number"
    if isinstance(label, str):
        word = read_nonempty_text({LABEL: label}, LABEL)
        if any(unicodedata.category(character) in _CONTROLS for character in word):
            raise BadLineError(
                f"'label' {format_label(word)} has a control character or a line end"
            )
        return word, "word"
    got = repr(label) if isinstance(label, float) else describe_type(label)
    if isinstance(label, list):
        got += f" of {len(label)}; a line is of one class"
    raise BadLineError(f"'label' must be a word or a whole number, got {got}")


def unwrap_single(label: Any) -> Any:
    """Return the label of a list of one, as doccano and Prodigy write it; any other as it is."""
    return label[0] if isinstance(label, list) and len(label) == 1 else label


def label_of_cell(cell: str) -> str | None:
    """Return the label of a table's row; an empty one is None.

    Raises:
        BadLineError: others would read it as missing, so that a class of this name surprises; or
            as a number that is no class.
    """
    label = cell.strip() or None
    if label in _ABSENT:
        raise BadLineError(
            f"'label' is {label!r}, which pandas and datasets read as no label; remove the row or"
            " rename the class (in JSON Lines any word is a class)"
        )
    is_number = label is not None and _FRACTION.fullmatch(label)
    if label and is_number and not _WHOLE.fullmatch(label) and not label.lstrip("+-").isdigit():
        raise BadLineError(
            f"'label' must be a word or a whole number, got {label[:40]} (in JSON Lines any string"
            " is a class)"
        )
    return label


def whole_number(value: int | str) -> int | None:
    """Return the number that a label is or spells; tables hold numbers as text."""
    if isinstance(value, int):
        return value
    return int(value.partition(".")[0]) if _WHOLE.fullmatch(value) else None


def format_label(value: int | str) -> str:
    """Return a label as messages write it."""
    return repr(value[:40]) if isinstance(value, str) else str(value)


def format_words(words: list[str]) -> str:
    """Return the first words in a line, and how many more there are."""
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more
