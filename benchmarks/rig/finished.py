"""The finished runs of a sweep, a line of JSON each: it can be stopped and started at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")
"""A frozen dataclass: what a run was asked for."""
Found = dict[str, Any]
"""What it found, `loss` among it."""


def read(path: Path, kind: type[Case]) -> dict[Case, Found]:
    """Return the finished runs of a file, less lines that were cut off."""
    done: dict[Case, Found] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [each.name for each in fields(kind)]  # pyright: ignore[reportArgumentType]
    for line in lines:
        with suppress(ValueError):
            found = json.loads(line)
            done[kind(**{key: found[key] for key in names})] = found
    return done


def keep(path: Path, case: Any, found: Found) -> None:
    """Add a run to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # An empty line ends one that was cut off.
        file.write("\n" * bool(file.tell()) + json.dumps({**asdict(case), **found}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def best(cases: Sequence[Case], done: Mapping[Case, Found]) -> Case:
    """Return the run with the least held-out loss."""
    return min(cases, key=lambda case: done[case]["loss"])
