"""A kernel's parameters by name, laid out as its code's `struct Params`."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import cache

_PACKERS = {
    "u32": struct.Struct("<I").pack,
    "i32": struct.Struct("<i").pack,
    "f32": struct.Struct("<f").pack,
}
"""By type; all are 4 bytes, so that fields follow each other without gaps."""
_COMMENT = re.compile(r"//.*")
_STRUCT = re.compile(r"\bstruct\s+Params\s*\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+)")


@cache
def param_fields(code: str) -> Mapping[str, str]:
    """Return name and type of each field in order; none if a code has no `struct Params`."""
    found = _STRUCT.search(_COMMENT.sub("", code))
    members = found.group(1).split(",") if found else []
    types: dict[str, str] = {}
    for member in filter(None, map(str.strip, members)):  # the last comma is followed by none
        field = _FIELD.fullmatch(member)
        assert field is not None, f"struct Params: {member!r} is no name and type"
        name, kind = field.groups()
        assert kind in _PACKERS, f"struct Params: {name} is {kind}, not {', '.join(_PACKERS)}"
        types[name] = kind
    return types


def pack_params(kernel: str, code: str, values: Mapping[str, float]) -> bytes:
    """Return the bytes of `struct Params`; every field has a value, every value a field.

    A bool is 0 or 1. `kernel` is its name in messages.
    """
    types = param_fields(code)
    wrong = [f"no value for {name}" for name in types if name not in values]
    wrong += [f"no field {name}" for name in values if name not in types]
    assert not wrong, f"{kernel}: {', '.join(wrong)}"
    packed = b""
    for name, kind in types.items():
        try:
            packed += _PACKERS[kind](values[name])
        except (struct.error, OverflowError) as error:
            raise AssertionError(f"{kernel}: {name} is {values[name]!r}, not {kind}") from error
    return packed
