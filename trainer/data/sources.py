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
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from trainer.system.errors import InputError, readable
from trainer.system.process.announcement import announced

RECORDS = frozenset((".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"))
"""Suffixes of a folder's data files."""
TEXTS = frozenset((".txt", ".md", ".text"))
"""Suffixes of plain texts, which are a folder's data if it has no other."""
PACKED = frozenset((".gz", ".bz2", ".xz", ".zst", ".zip"))
"""Suffixes that packing adds."""
_STEP = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f]+"
HUB = re.compile(
    rf"hf:/+datasets/(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w.-]*))?(?:/({_STEP}(?:/{_STEP})*/?))?"
)
"""`hf://datasets/OWNER/NAME@REVISION/PATH`; a `Path` drops a slash. No step leads upwards."""
ANSWERS_SCHEMA = "motley.answers/1"
"""The schema of a folder of generated answers, which is data like any other."""
_DESCRIPTION = "dataset.json"
_OF_TOOLS = frozenset(("dataset_info.json", "dataset_infos.json", "state.json"))
_SPLITS = {
    "train": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "validation": re.compile(r"(?<![a-z])(validation|valid|dev|val)(?![a-z])"),
    "test": re.compile(r"(?<![a-z])(test|testing|eval|evaluation)(?![a-z])"),
}


@dataclass(frozen=True)
class DataFiles:
    """The files of a run's data, in their order."""

    files: list[Path]
    piped: bool = False
    """Whether the file is a copy of what a pipe gave."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Files of a folder that are not read, by reason."""
    revision: str = ""
    """The commit of a data set of the hub, which pins it."""

    def note(self, path: Path) -> str | None:
        """Return a line about a folder; None for a single file."""
        if self.piped or self.files == [path]:
            return None
        count = len(self.files)
        reads = f"{spelled(path)}: reads {self.files[0].name if count == 1 else f'{count:,} files'}"
        reads += f" of @{self.revision}" if self.revision else ""
        out = ", ".join(f"{name} ({count:,})" for name, count in self.left_out.items() if count)
        return f"{reads}; leaves out: {out}" if out else reads


def find_data(path: Path) -> DataFiles:
    """Return the files of a path to data.

    Of a folder its data files, in the order of their paths; only those of the split `train` if
    names tell splits apart. A pipe is read once, into a temporary file.

    Raises:
        InputError: there is nothing, or no data.
    """
    if named := HUB.fullmatch(str(path)):
        there, left_there = _from_hub(spelled(path), *named.groups())
        revision = next(p for p in (there, *there.parents) if p.parent.name == "snapshots").name
        found = _find_in_folder(path, there)
        return replace(found, revision=revision, left_out=found.left_out | left_there)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: no such data file{_hint(path)}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return _find_in_folder(path, path)
    if stat.S_ISREG(mode):
        return DataFiles([path])
    if stat.S_ISFIFO(mode):
        return DataFiles([_spooled(path)], piped=True)
    raise InputError(f"{path}: is a device or a socket, expected a file, a folder or a pipe")


def spelled(path: Path) -> str:
    """Return a path as it is given: of `hf://` a `Path` keeps one slash."""
    return re.sub(r"^hf:/+", "hf://", str(path))


def refuse_pipe(path: Path) -> None:
    """Refuse data that only one process can read, for a run that reads it in several.

    Raises:
        InputError: it is a pipe.
    """
    if path.is_fifo():
        raise InputError(f"{path}: is a pipe, which only one process can read; write it to a file")


def _hint(path: Path) -> str:
    if str(path).startswith("hf:"):
        return "; a data set of the hub is hf://datasets/OWNER/NAME, or a file or folder in one"
    if str(path) == "-":
        return "; standard input is /dev/stdin"
    if re.fullmatch(r"[\w-]+/[\w-]+", str(path)):
        return f"; a data set of the Hugging Face hub is hf://datasets/{path}"
    return ""


@cache
def _spooled(path: Path) -> Path:
    """Return a file with what a pipe gave; it is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="motley-data-"))
    owner = os.getpid()  # a forked child leaves it alone

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    file = folder / path.name
    with readable(path, InputError):
        said = announced(f"reading the pipe {path}")
        with said, path.open("rb") as pipe, file.open("wb") as copy:
            shutil.copyfileobj(pipe, copy, 1 << 20)
    return file


def _find_in_folder(path: Path, folder: Path) -> DataFiles:
    """Return the data files of a folder that a path names."""
    left_out: Counter[str] = Counter()
    if splits := _listed(folder / "dataset_dict.json", "splits"):
        split = "train" if "train" in splits else _only(path, splits)
        left_out |= {f"split {name}": 1 for name in splits if name != split}
        folder /= split
    if parts := _listed(folder / "state.json", "_data_files"):  # written by save_to_disk
        files = [folder / PurePath(str(part["filename"])).name for part in parts]
        return DataFiles(files, left_out=left_out)
    if plans := _answer_shards(folder):
        return DataFiles([folder / name / "answers.parquet" for name in plans])
    if folder.is_file():  # of the hub
        return DataFiles([folder])
    names, hidden = _visible(folder)
    chosen, others = choose_files(path, names)
    others["hidden"] = hidden
    return DataFiles([folder / name for name in chosen], left_out=others)


def find_texts(folder: Path) -> DataFiles | None:
    """Return all visible files of a folder, in the order of their paths; None if it holds data.

    Its data is then what `find_data` finds. JSON files do not make a folder of other texts data.
    """
    names, hidden = _visible(folder)
    kinds = {kind_of(name) for name in names}
    if kinds & RECORDS - {".json"} or (".json" in kinds and kinds <= RECORDS | TEXTS | {""}):
        return None
    return DataFiles([folder / name for name in names], left_out=Counter(hidden=hidden))


def choose_files(path: Path, names: list[str]) -> tuple[list[str], Counter[str]]:
    """Return the data files among the names below a folder, and why others are left out.

    Raises:
        InputError: there are none, or they are of several splits without `train`.
    """
    kinds = {name: kind_of(name) for name in names}
    found = [name for name in names if kinds[name] in RECORDS]
    if not found:
        found = [name for name in names if kinds[name] in TEXTS]
        if not found:
            known = " ".join(sorted(RECORDS | TEXTS))
            raise InputError(
                f"{spelled(path)}: holds no data files, whose names end in one of {known}"
            )
        return found, Counter({"other files": len(names) - len(found)})
    left_out = Counter({"other files": len(names) - len(found)})
    splits = {name: _split(name) for name in found}
    there = sorted({split for split in splits.values() if split})
    chosen = "train" if "train" in there else None
    if chosen is None and None not in splits.values():
        chosen = _only(path, there)
    for split in splits.values():
        if split != chosen:
            left_out["no split in the name" if split is None else f"split {split}"] += 1
    return [name for name in found if splits[name] == chosen], left_out


def kind_of(name: str) -> str:
    """Return a file's suffix below those of packing; "" of what tools write beside data."""
    pure = PurePath(name.lower())
    while pure.suffix in PACKED:
        pure = pure.with_suffix("")
    return "" if pure.name in _OF_TOOLS else pure.suffix


def _split(name: str) -> str | None:
    """Return the split that a path below a folder names, its last part first."""
    for part in reversed(PurePath(name.lower()).parts):
        for split, pattern in _SPLITS.items():
            if pattern.search(part):
                return split
    return None


def _only(path: Path, splits: list[str]) -> str:
    if len(splits) > 1:
        raise InputError(
            f"{spelled(path)}: holds the splits {', '.join(splits)} and none is called train; name"
            " one of its files or folders"
        )
    return splits[0]


def _visible(folder: Path) -> tuple[list[str], int]:
    """Return the paths below a folder in the order of their bytes, and how many are hidden.

    A folder behind a link is one of them, as `launch sync` brings it, unless it holds the link.
    """
    names: list[str] = []
    hidden = 0
    for parent, folders, files in os.walk(folder, followlinks=True):
        here = Path(parent).resolve()
        folders[:] = [name for name in folders if not here.is_relative_to((here / name).resolve())]
        every = [*folders, *files]
        hidden += sum(name.startswith(".") for name in every)
        folders[:] = [name for name in folders if name[0] != "."]
        for name in files:
            path = Path(parent, name)
            if name[0] != "." and path.is_file():  # no sockets, no broken links
                names.append(str(path.relative_to(folder)))
    return sorted(names, key=os.fsencode), hidden


def holds_logits(folder: Path) -> bool:
    """Return whether a folder has the description of a teacher's logits, or of an unknown kind."""
    return shards_schema(folder) not in (None, ANSWERS_SCHEMA)


def shards_schema(folder: Path) -> str | None:
    """Return the schema in a folder's dataset.json, "" if that names none; None without one."""
    try:
        schema = json.loads((folder / _DESCRIPTION).read_bytes())["schema"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return schema if isinstance(schema, str) else ""


def _answer_shards(folder: Path) -> list[str]:
    """Return the shards of what `trainer distill generate` wrote; [] for another folder.

    Raises:
        InputError: some are missing: data of which a part is not there yet would be another.
    """
    if shards_schema(folder) != ANSWERS_SCHEMA:
        return []
    try:
        tree = json.loads((folder / _DESCRIPTION).read_bytes())
        names = [f"shard-{plan['number']:05d}" for plan in tree["shards"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    missing = [name for name in names if not (folder / name / "manifest.json").is_file()]
    if missing:
        raise InputError(
            f"{spelled(folder)}: {len(missing)} of {len(names)} shards are missing, such as"
            f" {missing[0]}; let `trainer distill generate` finish"
        )
    return names


def _listed(file: Path, key: str) -> list[Any]:
    """Return a list of a JSON file that `datasets` wrote; [] if there is no such file or list."""
    try:
        found = json.loads(file.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []


@cache
def _from_hub(
    given: str, name: str, revision: str | None, inner: str | None
) -> tuple[Path, Counter[str]]:
    """Return the folder or file in the hub's cache that holds a data set, downloaded if needed.

    And which of its files are not downloaded, by reason, as of a folder.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ModuleNotFoundError:
        raise InputError(
            f"{given}: this Python has no huggingface_hub to download it: pip install"
            " huggingface_hub"
        ) from None
    wanted: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    patterns = [inner, f"{inner}/*"] if inner else None
    left_out: Counter[str] = Counter()
    try:
        if inner is None:
            with contextlib.suppress(OSError):  # without a connection: what the cache has
                names = sorted(HfApi().list_repo_files(name, **wanted), key=os.fsencode)
                patterns, left_out = choose_files(Path(given), names)
        with announced(f"downloading {given}"):
            folder = Path(snapshot_download(name, allow_patterns=patterns, **wanted))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise InputError(f"{given}: the hub has no such data set or revision") from None
    except InputError:
        raise
    except Exception as error:  # the hub's client raises dozens of kinds for "cannot reach it"
        reason = str(error).strip().split("\n", 1)[0]
        raise InputError(f"{given}: the hub cannot be reached ({reason})") from None
    found = folder / (inner or "")
    if not found.exists():
        raise InputError(f"{given}: the data set has no {inner}")
    return found, left_out
