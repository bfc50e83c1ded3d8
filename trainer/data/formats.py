"""Data in other formats than JSON Lines: recognised by the first bytes, with a conversion.

Each conversion is one command line that needs only the program that it begins with, or this Python.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from trainer.data.shapes import KEYS
from trainer.system.errors import InputError

HEAD_BYTES = 4096
"""Bytes that `refuse_other_formats` examines; a shorter head is a whole file."""

_PACKED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"PK\x03\x04": ("a ZIP archive", "unzip -p"),
}
_ENCODINGS = {  # the longer marks first: UTF-32's begins with UTF-16's
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16LE",
    b"\0{": "UTF-16BE",
}
_PARQUET = "import pyarrow.parquet as p; rows = p.read_table(sys.argv[1]).to_pylist()"
_ARRAY = 'rows = json.load(open(sys.argv[1], encoding="utf-8-sig"))'
_CSV = (
    'import csv; rows = csv.DictReader(open(sys.argv[1], encoding="utf-8-sig", newline=""){});'
    " rows = [{{k: int(v) if k == 'label' and v.isdigit() else v for k, v in row.items()}}"
    " for row in rows]"
)


def refuse_other_formats(path: Path, head: bytes) -> None:
    """Check that the first bytes of a file can be JSON Lines.

    Raises:
        InputError: they are another format, which is named with the command that converts it.
    """
    if (found := _recognised(path, head)) is None:
        return
    what, command = found
    source = shlex.quote(str(path))
    raise InputError(
        f"{path}: is {what}, expected JSON Lines in UTF-8; convert it: {command} {source}"
        f" > {shlex.quote(str(_converted(path)))}"
    )


def _recognised(path: Path, head: bytes) -> tuple[str, str] | None:
    """Return a file's format and the command that writes the named file as JSON Lines."""
    for start, (name, command) in _PACKED.items():
        if head.startswith(start):
            return name, command
    if head.startswith(b"PAR1"):
        return "Parquet", _python(_PARQUET)
    for start, encoding in _ENCODINGS.items():
        if head.startswith(start):
            return encoding, f"iconv -f {encoding} -t UTF-8"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "a JSON array", _python(_ARRAY)
    if not text.startswith(b"{") and (delimiter := _delimiter(path, text)):
        name, argument = ("TSV", ', delimiter="\\t"') if delimiter == "\t" else ("CSV", "")
        if delimiter == ";":
            argument = ', delimiter=";"'
        return name, _python(_CSV.format(argument))
    return None


def _delimiter(path: Path, text: bytes) -> str | None:
    """Return the delimiter of a table; None if it is not a table."""
    header = text.splitlines()[0].decode("utf-8", "replace") if text else ""
    for delimiter in "\t;,":
        columns = {column.strip().strip('"').lower() for column in header.split(delimiter)}
        if len(columns) > 1 and (columns & {*KEYS, "label"} or path.suffix in (".csv", ".tsv")):
            return delimiter
    return None


def _python(code: str) -> str:
    """Return a command that prints the `rows` that `code` reads from `sys.argv[1]`."""
    whole = f"import json, sys; {code}; [print(json.dumps(row)) for row in rows]"
    return f"{shlex.quote(sys.executable)} -P -c {shlex.quote(whole)}"


def _converted(path: Path) -> Path:
    """Return the name of a file's conversion, beside it."""
    bare = path.with_suffix("")
    found = bare if bare.suffix == ".jsonl" else bare.with_name(f"{bare.name}.jsonl")
    return found if found != path else bare.with_name(f"{bare.name}-utf8.jsonl")
