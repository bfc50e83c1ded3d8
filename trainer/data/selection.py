"""Which files of a folder, an archive or a data set of the hub are data of the training split.

One rule for every format:

1. Documentation beside data (`README.md`, `LICENSE.txt`) is not data.
2. Files with records are the data; plain texts are it if there are no such files.
3. If names tell splits apart, the data is that of the split `train`. A file or a folder of a path
   is named after its split; the last part that names one counts. Plain texts have free names: one
   of them names a split only if that is its whole name (`train.txt`, `train/pos/1.txt`), or if
   another has the same name for another split (`wiki.train.txt`, `wiki.valid.txt`).
4. In a split's folder with folders of plain texts, one for each label, the files beside those are
   lists of the texts (aclImdb) and no data; nor are the labels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath

from trainer.system.errors import InputError

RECORDS = frozenset((".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"))
"""Suffixes of a folder's data files."""
TEXTS = frozenset((".txt", ".md", ".text"))
"""Suffixes of plain texts, which are a folder's data if it has no other."""
PACKED = frozenset((".gz", ".bz2", ".xz", ".zst", ".zip"))
"""Suffixes that packing adds."""
_OF_TOOLS = frozenset(("dataset_info.json", "dataset_infos.json", "state.json"))
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|data_?card)"
    r"([-_. ].*)?"
)
_SPLITS = {
    "train": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "validation": re.compile(r"(?<![a-z])(validation|valid|dev|val)(?![a-z])"),
    "test": re.compile(r"(?<![a-z])(test|testing|eval|evaluation)(?![a-z])"),
}

LeftOut = dict[str, list[str]]
"""Names of files, and labels, that are not read, by reason."""


def choose_files(place: str, names: list[str]) -> tuple[list[str], LeftOut]:
    """Return the data files among the names below a folder, and why others are left out.

    Raises:
        InputError: there are none, or they are of several splits without `train`.
    """
    found, left_out = split_off_documentation(names)
    records = [name for name in found if file_suffix(name) in RECORDS]
    data = records or [name for name in found if file_suffix(name) in TEXTS]
    if not data:
        known = " ".join(sorted(RECORDS | TEXTS))
        beside = left_out.get("documentation")
        but = f" but {beside[0]}" if beside else ""
        raise InputError(f"{place}: contains no data files{but}, whose names end in one of {known}")
    put_aside(left_out, "other files", set(found).difference(data))
    chosen = choose_split(place, data, left_out)
    if not records:
        chosen = _without_lists(chosen, left_out)
    return chosen, left_out


def split_off_documentation(names: list[str]) -> tuple[list[str], LeftOut]:
    """Return the files that are not documentation, and those that are."""
    left_out: LeftOut = {}
    put_aside(left_out, "documentation", filter(_is_documentation, names))
    return [name for name in names if not _is_documentation(name)], left_out


def choose_split(place: str, names: list[str], left_out: LeftOut) -> list[str]:
    """Return the files of the split `train` if names tell splits apart; the others are left out.

    Raises:
        InputError: they are of several splits without `train`.
    """
    splits = _find_splits(names)
    there = sorted({split for split in splits.values() if split})
    chosen = "train" if "train" in there else None
    if chosen is None and None not in splits.values():
        chosen = only_split(place, there)
    for name, split in splits.items():
        if split != chosen:
            reason = "no split in the name" if split is None else f"split {split}"
            put_aside(left_out, reason, [name])
    return [name for name in names if splits[name] == chosen]


def only_split(place: str, splits: list[str]) -> str:
    """Return the one split that there is.

    Raises:
        InputError: there are several.
    """
    if len(splits) > 1:
        raise InputError(
            f"{place}: contains the splits {', '.join(splits)} and none is called train; name one "
            "of"
            " its files or folders"
        )
    return splits[0]


def put_aside(left_out: LeftOut, reason: str, names: Iterable[str]) -> None:
    """Add files that are not read."""
    if added := sorted(names):
        left_out.setdefault(reason, []).extend(added)


def file_suffix(name: str) -> str:
    """Return a file's suffix below those of packing; "" of what tools write beside data."""
    pure = _unpacked_name(name)
    return "" if pure.name in _OF_TOOLS else pure.suffix


def _unpacked_name(name: str) -> PurePath:
    pure = PurePath(name.lower())
    while pure.suffix in PACKED:
        pure = pure.with_suffix("")
    return pure


def _is_documentation(name: str) -> bool:
    pure = _unpacked_name(name)
    is_text = pure.suffix in TEXTS or pure.suffix not in RECORDS
    return is_text and _DOCUMENTATION.fullmatch(pure.name) is not None


def _find_splits(names: list[str]) -> dict[str, str | None]:
    """Return the split that each path below a folder names; None: it names none."""
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        if split := _search_split(_unpacked_name(name).stem):
            alike[_without_split(name)].add(split)
    found: dict[str, str | None] = {}
    for name in names:
        pure = _unpacked_name(name)
        is_free = pure.suffix in TEXTS and len(alike[_without_split(name)]) < 2
        parts = [pure.stem, *reversed(pure.parent.parts)]
        named = (_match_split(part) if is_free else _search_split(part) for part in parts)
        found[name] = next(filter(None, named), None)
    return found


def _search_split(part: str) -> str | None:
    return next((split for split, word in _SPLITS.items() if word.search(part)), None)


def _match_split(part: str) -> str | None:
    """Return the split if a part of a path is called like it, but for a number."""
    bare = re.sub(r"[-_.\d]*(of)?[-_.\d]*$", "", part)
    return next((split for split, word in _SPLITS.items() if word.fullmatch(bare)), None)


def _without_split(name: str) -> str:
    """Return what the names of several splits have in common; numbers do not count."""
    for word in _SPLITS.values():
        name = word.sub("*", name.lower())
    return re.sub(r"\d+", "#", name)


def _without_lists(names: list[str], left_out: LeftOut) -> list[str]:
    labels: defaultdict[PurePath, set[PurePath]] = defaultdict(set)
    for name in names:
        folder = PurePath(name).parent
        if _match_split(folder.parent.name.lower()):
            labels[folder.parent].add(folder)
    lists = {name for name in names if len(labels[PurePath(name).parent]) > 1}
    put_aside(left_out, "beside the folders of labels", lists)
    several = (folders for folders in labels.values() if len(folders) > 1)
    words = {folder.name for folders in several for folder in folders}
    put_aside(left_out, "labels in the names of folders", words)
    return [name for name in names if name not in lists]
