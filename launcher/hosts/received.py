"""Data from a host, checked before the launcher uses it.

A host may be compromised, so all received data must have the expected shape. Anything else raises a
ValueError of one line, which `fleet.ask_hosts` turns into that host's error.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def receive(kind: type[T], tree: object, what: str) -> T:
    """Convert a host's data to a type: a dataclass, a model, `list[str]`, `float`.

    Raises:
        ValueError: it is something else; the message says what and where.
    """
    try:
        return _adapter(kind).validate_python(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{what}: {where and f'{where}: '}{first['msg']}") from None
    except RecursionError:
        raise ValueError(f"{what}: nested too deep") from None


def parse(data: bytes, what: str) -> Any:
    """Return a JSON document that a host sent.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{what}: not JSON") from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
