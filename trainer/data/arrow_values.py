"""Values of Arrow as the author of a row wrote them in JSON.

A column of objects has one type, so each object has the keys of all others, with null: a null of an
object is a missing key. A null that the author wrote there cannot be told from those, and needs
JSON Lines or JSON in a text. The nulls of lists and of maps are the author's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_plain(pa: Any, kind: Any) -> bool:
    """Return whether JSON has all values of a type.

    Args:
        pa: the module pyarrow.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return is_plain(pa, kind.value_type)
    if types.is_nested(kind):
        return all(is_plain(pa, kind.field(index).type) for index in range(kind.num_fields))
    tests = (
        *(types.is_null, types.is_boolean, types.is_integer, types.is_floating),
        *(types.is_string, types.is_large_string, types.is_string_view),
    )
    return any(test(kind) for test in tests)


def value_reader(pa: Any, kind: Any) -> Callable[[Any], Any]:
    """Return what makes the values of a type those of JSON; what JSON lacks becomes a text."""
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        readers = {field.name: value_reader(pa, field.type) for field in fields}
        return _for_present(
            lambda value: {
                name: read(value[name]) for name, read in readers.items() if value[name] is not None
            }
        )
    if types.is_map(kind):
        read_item = value_reader(pa, kind.item_type)
        return _for_present(lambda value: {str(key): read_item(item) for key, item in value})
    if types.is_nested(kind):
        read_element = value_reader(pa, kind.value_type)
        return _for_present(lambda value: [read_element(element) for element in value])
    return _read_as_is if is_plain(pa, kind) else _for_present(_read_as_text)


def _for_present(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _read_as_is(value: Any) -> Any:
    return value


def _read_as_text(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
