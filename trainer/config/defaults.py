"""Settings that follow from the data, for who names a model and data alone. Torch-free."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def infer(data: str) -> dict[str, Any]:
    """Return the settings that a data file speaks for, by their dotted paths.

    Lines with a `label` are classified, in as many classes as the labels count; everything else is
    text. Nothing follows from what cannot be read: the reader of the data names file and line.
    """
    highest: int | None = None
    line: dict[str, Any] | None = None
    for line in _objects(Path(data)):
        label = line.get("label")
        if label is None and highest is None:
            break
        if type(label) is int:
            highest = max(label, highest or 0)
    if highest is None:
        return {} if line is None else {"task": "causal-lm"}
    return {"task": "classify", "num_classes": max(2, highest + 1)}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file as far as it can be read."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        for text in file:
            if text.strip():
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line
