"""The GGUF file that a model folder was converted from: where it is, and how it stores weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.model.safetensors_headers import read_object
from trainer.system.errors import InputError, convert_read_errors

TYPES_FILE = "gguf.json"
"""In a converted folder: `{"schema": "motley.gguf/1", "types": {"Q4_1": weights}}`."""
_SCHEMA = "motley.gguf/1"


@dataclass(frozen=True)
class Source:
    """A GGUF file as it was when its digest was computed."""

    path: Path
    state: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> Source:
        """Return a file as it is now.

        Raises:
            InputError: it cannot be read.
        """
        with convert_read_errors(path, InputError):
            return cls(path, _read_state(path))

    def check_unchanged(self) -> None:
        """Check that the file is still the same.

        Raises:
            InputError: it is not.
        """
        try:
            same = _read_state(self.path) == self.state
        except OSError:
            same = False
        if not same:
            raise InputError(
                f"{self.path}: was changed, replaced or removed while it was read; start again"
            )


_SOURCES: dict[Path, Source] = {}  # of the folders that this process converted or found converted


def remember_source(folder: Path, source: Source) -> None:
    """Note which file a folder was converted from."""
    _SOURCES[folder] = source


def find_source(folder: Path) -> Source | None:
    """Return the file that this process resolved to a folder; None for any other folder."""
    return _SOURCES.get(folder)


def is_converted(folder: Path) -> bool:
    """Whether a model folder was made of a GGUF file."""
    return (folder / TYPES_FILE).is_file()


def types_text(weights: Mapping[str, int]) -> str:
    """Return the content of `TYPES_FILE`.

    Args:
        weights: how many are stored in each type, of matrices alone.
    """
    return json.dumps({"schema": _SCHEMA, "types": dict(weights)}, indent=2)


def stored_types(folder: Path) -> str:
    """Return the types of a converted folder's matrices in its file, such as `Q4_K+Q6_K`.

    The one of most weights is first.
    """
    weights: Mapping[str, int] = read_object(folder / TYPES_FILE)["types"]
    return "+".join(sorted(weights, key=lambda name: (-weights[name], name)))


def _read_state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
