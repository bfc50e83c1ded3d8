"""The least size of Arrow's values as JSON text, counted before Python's objects are made of them.

Arrow needs hardly any memory for empty elements, and for a text that many rows refer to; Python
needs it for each. So a row has the limit of a line of JSON.
"""

from __future__ import annotations

from typing import Any


def json_size(pa: Any, array: Any) -> int:
    """Return the bytes that an array's values have at least as JSON.

    Args:
        pa: the module pyarrow.

    Raises:
        ValueError: it is of a type whose elements share memory in other ways; names the type.
    """
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        sizes = _text_sizes(pa, array.dictionary)
        if sizes is None:
            return _plain_size(pa, array.dictionary.type, len(array))
        known = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return len(array) + int(sizes[known].sum())
    if types.is_struct(kind):
        names = sum(len(kind.field(index).name) + 4 for index in range(kind.num_fields))
        fields = (array.field(index) for index in range(kind.num_fields))  # of the slice alone
        return len(array) * (names + 2) + sum(json_size(pa, field) for field in fields)
    if types.is_map(kind):
        first, last = (array.offsets[index].as_py() for index in (0, len(array)))
        inner = (array.keys, array.items)
        return len(array) + sum(json_size(pa, each.slice(first, last - first)) for each in inner)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        flat = array.flatten()
        return len(array) + len(flat) + json_size(pa, flat)
    if (sizes := _text_sizes(pa, array)) is not None:
        return len(array) + int(sizes.sum())
    return _plain_size(pa, kind, len(array))


def _plain_size(pa: Any, kind: Any, count: int) -> int:
    if pa.types.is_nested(kind) or not (pa.types.is_null(kind) or _get_bit_width(kind)):
        raise ValueError(f"{kind} is not read")
    return count * (4 if pa.types.is_null(kind) else 1)


def _get_bit_width(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # of no fixed size
        return 0


def _text_sizes(pa: Any, array: Any) -> Any:
    """Return the bytes of each text or binary value; None of an array of other values."""
    # Not above: a worker decides on NumPy's threads before it is imported.
    import numpy as np
    from pyarrow import compute

    functions: Any = compute  # made at its import, so that its types lack them
    types, kind = pa.types, array.type
    if types.is_string_view(kind) or types.is_binary_view(kind):  # a view begins with its size
        views = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]
        return views[array.offset : array.offset + len(array)].astype(np.int64)
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(test(kind) for test in tests):
        return functions.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return None
