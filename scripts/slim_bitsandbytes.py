"""Take out of bitsandbytes' wheel the libraries of all CUDA versions but one, in place.

    python scripts/slim_bitsandbytes.py WHEEL 130

A wheel lists its files with their hashes (PEP 427), so the list is written anew.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import sys
import zipfile
from pathlib import Path

_LIBRARY = re.compile(r"libbitsandbytes_(\w+)\.so$")


def slim(wheel: Path, cuda: str) -> None:
    """Leave the libraries of one CUDA version, such as `130`, and of the CPU.

    Raises:
        SystemExit: the wheel has no library of that version.
    """
    kept: dict[str, bytes] = {}
    record = ""
    builds: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if library := _LIBRARY.search(name):
                builds.add(library[1])
                if library[1] not in ("cpu", f"cuda{cuda}"):
                    continue
            if name.endswith(".dist-info/RECORD"):
                record = name
                continue
            kept[name] = archive.read(name)
    if f"cuda{cuda}" not in builds:
        raise SystemExit(f"{wheel}: no library for CUDA {cuda}; it has {', '.join(sorted(builds))}")
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, data in kept.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([record, "", ""])
    slimmed = wheel.with_suffix(".slim")
    with zipfile.ZipFile(slimmed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
        archive.writestr(record, lines.getvalue())
    slimmed.replace(wheel)


if __name__ == "__main__":
    slim(Path(sys.argv[1]), sys.argv[2])
