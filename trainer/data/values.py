"""The values of a data line's keys, or the line's problem."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

SHOWN_CHARACTERS = 40
_IS_REPR = re.compile(r"\s*[\[{]+\s*'").match


class BadLineError(Exception):
    """The problem of one line."""


def read_nonempty_text(tree: dict[str, Any], key: str) -> str:
    """Return a text that is not empty.

    Raises:
        BadLineError: the key is missing, or its value is another.
    """
    text = read_string(tree, key)
    if not text.strip():
        raise BadLineError(f"'{key}' is empty")
    return text


def read_string(tree: dict[str, Any], key: str) -> str:
    """Return a string that is text.

    Raises:
        BadLineError: the key is missing, or its value is another.
    """
    if key not in tree:
        raise BadLineError(f"lacks the key '{key}'")
    value = tree[key]
    if not isinstance(value, str):
        raise BadLineError(f"'{key}' must be a string, got {describe_type(value)}")
    check_unicode(value, f"'{key}'")
    return value


def check_unicode(value: Any, what: str) -> None:
    """Check that a JSON value is text throughout.

    Raises:
        BadLineError: it has half a surrogate pair, which JSON can have and a tokenizer cannot.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise BadLineError(f"{what} contains a lone surrogate, which is not text") from None


def read_objects(value: Any, key: str) -> list[dict[str, Any]]:
    """Return a list of objects; some data has it as JSON in a string, and null is an empty one.

    Raises:
        BadLineError: it is something else.
    """
    if isinstance(value, str):
        value = decode_json(value, key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadLineError(f"'{key}' must be a list of objects")
    return value


def decode_json(text: str, key: str) -> Any:
    """Return the JSON value of a text; an empty one is an empty list.

    Raises:
        BadLineError: it is not JSON.
    """
    try:
        return json.loads(text or "[]", object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        hint = ", but as Python prints it: write it with json.dumps" if _IS_REPR(text) else ""
        raise BadLineError(f"'{key}' is a string that is not JSON{hint}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of pairs.

    Raises:
        BadLineError: a key is there twice: json would silently take the last one.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        double = find_duplicate(key for key, _ in pairs)
        raise BadLineError(f"has the key {str(double)[:40]!r} twice")
    return found


def find_duplicate(names: Iterable[str]) -> str | None:
    """Return the first name that is there twice, of any number; None if there is none."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def describe_type(value: Any) -> str:
    """Return what JSON calls a value, with an article."""
    kind: type = type(value)
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "an integer", type(None): "null"}
    return names.get(kind, "a number")


def format_value(value: object) -> str:
    """Return a value as a short part of an error line."""
    return repr(value)[:SHOWN_CHARACTERS]
