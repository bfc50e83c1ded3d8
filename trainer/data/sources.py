"""Where data is: a file, a pipe, a folder of files, or a data set of the Hugging Face hub."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from trainer.data.selection import (
    RECORDS,
    TEXTS,
    LeftOut,
    choose_files,
    choose_split,
    file_suffix,
    only_split,
    put_aside,
    split_off_documentation,
)
from trainer.data.shards import ANSWERS_SCHEMA, DESCRIPTION, shards_schema
from trainer.data.subsets import README, Subset, choose_subset, list_chosen_files, read_subsets
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.process.slow_log import log_if_slow
from trainer.system.regular_file import read_file
from trainer.system.storage.progress import report_progress

_STEP = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f]+"
HUB = re.compile(
    rf"hf:/+datasets/(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w.-]*))?(?:/({_STEP}(?:/{_STEP})*/?))?"
)
"""`hf://datasets/OWNER/NAME@REVISION/PATH`; a `Path` drops a slash. No step leads upwards."""
NAMED = 3
"""Files that are left out for a reason and named; the others are counted."""


@dataclass(frozen=True)
class DataFiles:
    """The files of a run's data, in their order."""

    files: list[Path]
    piped: bool = False
    """Whether the file is a copy of what a pipe gave."""
    left_out: LeftOut = field(default_factory=LeftOut)
    revision: str = ""
    """The commit of a data set of the hub, which pins it."""

    def describe(self, path: Path) -> str | None:
        """Return a line about a folder; None for a single file."""
        if self.piped or self.files == [path]:
            return None
        count = len(self.files)
        files = self.files[0].name if count == 1 else f"{count:,} files"
        reads = f"{restore_scheme(path)}: reads {files}"
        reads += f" of @{self.revision}" if self.revision else ""
        out = ", ".join(
            f"{reason} ({len(names):,}: {', '.join(names[:NAMED])}"
            + (", ...)" if len(names) > NAMED else ")")
            for reason, names in self.left_out.items()
        )
        return f"{reads}; leaves out: {out}" if out else reads


def find_data(path: Path) -> DataFiles:
    """Return the files of a path to data.

    Of a folder its data files, in the order of their paths; see `selection.py` and `subsets.py`.
    A pipe is read once, into a temporary file.

    Raises:
        InputError: there is nothing, or no data.
    """
    if named := HUB.fullmatch(str(path)):
        there, subset, left_there = _from_hub(restore_scheme(path), *named.groups())
        revision = next(p for p in (there, *there.parents) if p.parent.name == "snapshots").name
        found = _find_in_folder(path, there, subset)
        return replace(found, revision=revision, left_out=found.left_out | left_there)
    if str(path).startswith("hf:"):
        raise InputError(
            f"{restore_scheme(path)}: neither a data set of the hub nor a file or folder in one; "
            "write"
            " it as hf://datasets/OWNER/NAME/PATH, without .."
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.name in read_subsets(path.parent):
            return _find_in_folder(path.parent, path.parent, path.name)
        raise InputError(f"{path}: no such data file{_suggest_source(path)}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return _find_in_folder(path, path)
    if stat.S_ISREG(mode):
        return DataFiles([path])
    if stat.S_ISFIFO(mode):
        return DataFiles([_spool_pipe(path)], piped=True)
    raise InputError(f"{path}: is a device or a socket, expected a file, a folder or a pipe")


def restore_scheme(path: Path) -> str:
    """Return a path as it is given: of `hf://` a `Path` keeps one slash."""
    return re.sub(r"^hf:/+", "hf://", str(path))


def refuse_pipe(path: Path) -> None:
    """Refuse data that only one process can read, for a run that reads it in several.

    Raises:
        InputError: it is a pipe.
    """
    if path.is_fifo():
        raise InputError(f"{path}: is a pipe, which only one process can read; write it to a file")


def _suggest_source(path: Path) -> str:
    if str(path) == "-":
        return "; standard input is /dev/stdin"
    if re.fullmatch(r"[\w-]+/[\w-]+", str(path)):
        return f"; a data set of the Hugging Face hub is hf://datasets/{path}"
    return ""


@cache
def _spool_pipe(path: Path) -> Path:
    """Return a file with what a pipe gave; it is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="motley-data-"))
    owner = os.getpid()  # a forked child leaves it alone

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    file = folder / path.name
    what = f"reading the pipe {path}"
    with (
        convert_read_errors(path, InputError),
        log_if_slow(what),
        report_progress(what, unit="bytes") as progress,
        path.open("rb", buffering=0) as pipe,  # what little a slow one has counts at once
        file.open("wb") as copy,
    ):
        while piece := pipe.read(1 << 20):
            copy.write(piece)
            progress.advance(len(piece))
    return file


def _find_in_folder(path: Path, folder: Path, subset: str | None = None) -> DataFiles:
    """Return the data files of a folder that a path names, and of a subset if one is chosen."""
    left_out: LeftOut = {}
    if splits := _read_list(folder / "dataset_dict.json", "splits"):
        split = "train" if "train" in splits else only_split(restore_scheme(path), splits)
        left_out = {f"split {name}": [name] for name in splits if name != split}
        folder /= split
    if parts := _read_list(folder / "state.json", "_data_files"):  # written by save_to_disk
        files = [folder / PurePath(str(part["filename"])).name for part in parts]
        return DataFiles(files, left_out=left_out)
    if plans := _answer_shards(folder):
        return DataFiles([folder / name / "answers.parquet" for name in plans])
    if folder.is_file():  # of the hub
        return DataFiles([folder])
    names, hidden = _list_visible(folder)
    chosen, others = _choose_files(restore_scheme(path), names, read_subsets(folder), subset)
    put_aside(others, "hidden", hidden)
    return DataFiles([folder / name for name in chosen], left_out=others)


def _choose_files(
    place: str, names: list[str], subsets: dict[str, Subset], subset: str | None
) -> tuple[list[str], LeftOut]:
    """Choose among the names below a folder, whose README may name subsets."""
    found = choose_subset(place, subsets, subset)
    if found is None:
        return choose_files(place, names)
    return list_chosen_files(place, names, found, subsets)


def find_texts(folder: Path) -> DataFiles | None:
    """Return all visible files of a folder, in the order of their paths; None if it holds data.

    Its data is then what `find_data` finds. JSON files do not make a folder of other texts data.
    """
    names, hidden = _list_visible(folder)
    kinds = {file_suffix(name) for name in names}
    if kinds & RECORDS - {".json"} or (".json" in kinds and kinds <= RECORDS | TEXTS | {""}):
        return None
    left_out: LeftOut = {}
    if kinds <= TEXTS | {""}:  # otherwise a program's `test` is no split, and its README a text
        names, left_out = split_off_documentation(names)
        names = choose_split(restore_scheme(folder), names, left_out)
    put_aside(left_out, "hidden", hidden)
    return DataFiles([folder / name for name in names], left_out=left_out)


def _list_visible(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths below a folder in the order of their bytes, and those that are hidden.

    A folder behind a link is one of them, as `launch sync` brings it, unless it holds the link.
    """
    names: list[str] = []
    hidden: list[str] = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        here = Path(parent).resolve()
        folders[:] = [name for name in folders if not here.is_relative_to((here / name).resolve())]
        every = (Path(parent, name) for name in (*folders, *files))
        hidden += (str(path.relative_to(folder)) for path in every if path.name.startswith("."))
        folders[:] = [name for name in folders if name[0] != "."]
        for name in files:
            path = Path(parent, name)
            if name[0] != "." and path.is_file():  # no sockets, no broken links
                names.append(str(path.relative_to(folder)))
    return sorted(names, key=os.fsencode), hidden


def _answer_shards(folder: Path) -> list[str]:
    """Return the shards of what `trainer distill generate` wrote; [] for another folder.

    Raises:
        InputError: some are missing: data of which a part is not there yet would be another.
    """
    if shards_schema(folder) != ANSWERS_SCHEMA:
        return []
    try:
        tree = json.loads(read_file(folder / DESCRIPTION))
        names = [f"shard-{plan['number']:05d}" for plan in tree["shards"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    missing = [name for name in names if not (folder / name / "manifest.json").is_file()]
    if missing:
        raise InputError(
            f"{restore_scheme(folder)}: {len(missing)} of {len(names)} shards are missing, such as"
            f" {missing[0]}; let `trainer distill generate` finish"
        )
    return names


def _read_list(file: Path, key: str) -> list[Any]:
    """Return a list of a JSON file that `datasets` wrote; [] if there is no such file or list."""
    try:
        found = json.loads(read_file(file))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return found if isinstance(found, list) else []


@cache
def _from_hub(
    given: str, name: str, revision: str | None, inner: str | None
) -> tuple[Path, str | None, LeftOut]:
    """Return the folder or file in the hub's cache that holds a data set, downloaded if needed.

    And the subset that is named, and which of its files are not downloaded, as of a folder.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ModuleNotFoundError:
        raise InputError(
            f"{given}: this Python has no huggingface_hub to download it: pip install"
            " huggingface_hub"
        ) from None
    wanted: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    patterns = [inner, f"{inner}/*"] if inner else None
    left_out: LeftOut = {}
    subset = None
    try:
        with contextlib.suppress(OSError):  # without a connection: what the cache has
            names = sorted(HfApi().list_repo_files(name, **wanted), key=os.fsencode)
            subsets: dict[str, Subset] = {}
            if README in names:
                subsets = read_subsets(Path(hf_hub_download(name, README, **wanted)).parent)
            if inner in subsets and not any(n == inner or n.startswith(f"{inner}/") for n in names):
                subset, inner = inner, None
            if inner is None:
                whole = given.removesuffix(f"/{subset}")
                patterns, left_out = _choose_files(whole, names, subsets, subset)
        with log_if_slow(f"downloading {given}"):
            folder = Path(snapshot_download(name, allow_patterns=patterns, **wanted))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise InputError(f"{given}: the hub has no such data set or revision") from None
    except InputError:
        raise
    except Exception as error:  # the hub's client raises dozens of kinds for "cannot reach it"
        reason = str(error).strip().split("\n", 1)[0]
        raise InputError(f"{given}: the hub cannot be reached ({reason})") from None
    found = folder / (inner or "")
    if inner in read_subsets(folder) and not found.exists():
        found, subset = folder, inner
    if not found.exists():
        raise InputError(f"{given}: the data set has no {inner}")
    return found, subset, left_out
