"""Digests of model folders and data files, by which two hosts can compare them.

Hashing gigabytes takes seconds, so a digest is cached until the file changes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.agent.operation import operation
from launcher.files import make_private_folder
from trainer.system.storage.atomic_file import write_atomically

CACHE = "digests.json"
"""Name of the cache file, in the state folder."""

HASH_DEADLINE = 900.0
"""Seconds: the first time gigabytes are read from a disk; later the digests are cached."""

_SCHEMA = "motley.digests/1"
_MINIMUM_AGE = 3.0
"""Seconds that a file must have been unchanged: a change within a clock tick leaves no trace."""
_MOST = 4096


def hash_paths(
    paths: Sequence[Path], state_folder: Path, below: Path | None = None
) -> dict[str, str]:
    """Return `SIZE:BLAKE3` of each file by its name, or by its path below a folder.

    Raises:
        OSError: a file cannot be read.
    """
    from blake3 import blake3  # where nothing trains it need not be installed

    memory = _read_cache(state_folder / CACHE)
    known = dict(memory)
    result: dict[str, str] = {}
    for path in paths:
        before = path.stat()
        # Size and change time: mtime alone can be set back, as rsync and cp -p do.
        mark = f"{before.st_size}:{before.st_mtime_ns}:{before.st_ctime_ns}:{before.st_ino}"
        key = str(path.resolve())
        if known.get(key, ["", ""])[0] != mark:
            hasher = blake3(max_threads=blake3.AUTO).update_mmap(path)
            known[key] = [mark, f"{before.st_size}:{hasher.hexdigest()}"]
        name = path.relative_to(below) if below in path.parents and below else path.name
        result[str(name)] = known[key][1]
        if time.time() - before.st_ctime < _MINIMUM_AGE:
            del known[key]
    if known != memory:
        _write_cache(state_folder / CACHE, known)
    return result


@operation("file_content", deadline=HASH_DEADLINE)
def file_content(path: str, state_folder: str) -> dict[str, str]:
    """Return the digests of data: a file, or the files that are read of a folder.

    Empty for a data set of the hub: the trainer downloads it, and compares what it read.
    """
    from trainer.data.sources import HUB, find_data

    if HUB.fullmatch(path):
        return {}
    return hash_paths(find_data(Path(path)).files, Path(state_folder), Path(path))


def describe_difference(one: dict[str, str], other: dict[str, str]) -> str:
    """Return in words how `one` differs from `other`; empty when they are equal."""
    missing = sorted(other.keys() - one.keys())
    extra = sorted(one.keys() - other.keys())
    changed = sorted(name for name in one.keys() & other.keys() if one[name] != other[name])
    parts = [
        f"{text} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for text, names in (("lacks", missing), ("also has", extra), ("has another", changed))
        if names
    ]
    return ", ".join(parts)


def _read_cache(path: Path) -> dict[str, list[str]]:
    try:
        tree: dict[str, Any] = json.loads(path.read_bytes())
        files: dict[str, list[str]] = tree["files"] if tree["schema"] == _SCHEMA else {}
        return {key: [str(mark), str(digest)] for key, (mark, digest) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # damaged or of another program: it is only a cache


def _write_cache(path: Path, known: dict[str, list[str]]) -> None:
    latest = dict(list(known.items())[-_MOST:])
    with contextlib.suppress(OSError):  # a full disk: then it is hashed again
        make_private_folder(path.parent)
        write_atomically(path, json.dumps({"schema": _SCHEMA, "files": latest}).encode())
