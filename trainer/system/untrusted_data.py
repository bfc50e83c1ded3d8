"""Data from a host, a member of a run or a shared disk, checked before it is used.

The sender may be compromised, so the data must have the expected shape and contain only plain
values (F-IN-002): finite numbers of 64 bits, and text of one line without control characters.
Anything else raises a ValueError of one line, which readers turn into an error that names its
source. Messages of the exchange are models of their own (`exchange/protocol/messages.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from trainer.system.commandline.sanitize import sanitize_text

T = TypeVar("T")

LARGEST = 2**63
"""The absolute value that an integer stays below."""
LARGEST_FLOAT = 1e60
"""And any other number: the square is finite too, and a diverging run's figures are far below."""
LONGEST = 64 << 10
"""Characters of a text."""
DEEPEST = 64
"""Containers inside one another. JSON allows any number, and since Python 3.12 its reader takes
more than Python's own functions can follow."""
UnixTime = Annotated[float, Field(ge=0, le=1e11)]
"""Unix seconds that a calendar has: up to the year 5138."""
REPORTED = 8
"""Places of invalid values that a report lists."""
SHOWN = 200
"""Characters of a place in a message."""


def is_path_below(text: str) -> bool:
    """Return whether a text names a file in a folder, or in a folder of that, and none outside."""
    parts = PurePosixPath(text).parts
    return "/".join(parts) == text and 1 <= len(parts) <= 2 and ".." not in parts


def validate_data(
    kind: type[T], tree: object, what: str, *, lines: bool = False, least: float = -LARGEST
) -> T:
    """Convert a host's data to a type: a dataclass, a model, `list[str]`, `float`.

    Args:
        lines: texts may have line ends and control characters; who prints them escapes them.
        least: no number is less: 0 for sizes, counts, rates and times.

    Raises:
        ValueError: it is something else, or not plain; the message says what and where.
    """
    try:
        for path, problem in _odd_values(tree, lines, least):
            raise ValueError(f"{what}: {path and f'{path[:SHOWN]}: '}{problem}")
        return _type_adapter(kind).validate_python(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{what}: {where and f'{where}: '}{first['msg']}") from None


def validate_json(
    kind: type[T], data: bytes | str, what: str, *, lines: bool = False, least: float = -LARGEST
) -> T:
    """Convert a JSON document as `validate_data` does.

    Raises:
        ValueError: it is something else, or not plain; the message says what and where.
    """
    return validate_data(kind, parse_json(data, what), what, lines=lines, least=least)


def drop_odd_values(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a report of a process without the values that are not plain.

    Their places are listed under the key `invalid`, so that the rest of it can be shown.
    """
    odd = [path for path, _ in _odd_values(tree, True, -LARGEST)]
    if not odd:
        return tree
    return {**_drop_keys(tree, {*odd}, ""), "invalid": [path[:SHOWN] for path in odd[:REPORTED]]}


def _drop_keys(tree: dict[str, Any], odd: set[str], path: str) -> dict[str, Any]:
    """Return a tree without the keys, at any depth of dictionaries, that hold an odd value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _join_path(path, key)
        if isinstance(value, dict) and inner not in odd:
            found[key] = _drop_keys(cast("dict[str, Any]", value), odd, inner)
        elif not any(f"{one}.".startswith(f"{inner}.") for one in odd):
            found[key] = value
    return found


def parse_json(data: bytes | str, what: str) -> Any:
    """Return a JSON document as it is; numbers and texts may be anything.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{what}: not JSON") from None


def _odd_values(
    tree: object, lines: bool, least: float, path: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield where a value is not plain, and why."""
    if depth > DEEPEST:
        yield path, f"nested deeper than {DEEPEST} levels"
    elif isinstance(tree, dict):
        for key, value in cast("dict[object, object]", tree).items():
            yield from _odd_values(key, lines, least, _join_path(path, key), depth)
            yield from _odd_values(value, lines, least, _join_path(path, key), depth + 1)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(cast("list[object]", tree)):
            yield from _odd_values(value, lines, least, _join_path(path, number), depth + 1)
    elif isinstance(tree, str):
        if len(tree) > LONGEST:
            yield path, f"a text of {len(tree):,} characters; at most {LONGEST:,} are taken"
        elif not lines and sanitize_text(tree) != tree:
            yield path, f"{sanitize_text(tree)[:60]!r} has line ends or control characters"
    elif isinstance(tree, int | float) and not -_upper_bound(tree) < tree < _upper_bound(tree):
        yield path, "is not a finite number of 64 bits"  # NaN is in no range
    elif isinstance(tree, int | float) and tree < least:
        yield path, f"is {tree}, less than {least:g}"


def _upper_bound(number: float) -> float:
    return LARGEST_FLOAT if isinstance(number, float) else LARGEST


def _join_path(path: str, key: object) -> str:
    return f"{path}.{sanitize_text(str(key))[:60]}".lstrip(".")


@cache
def _type_adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
