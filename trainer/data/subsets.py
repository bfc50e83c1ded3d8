"""The subsets of a data set of the hub, which `configs` in the first lines of its README names.

The hub's own loader takes the subset that is called `default` or marked so, or the only one, and
asks for a choice otherwise. So does Motley: `FOLDER/SUBSET` chooses one.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.data.selection import LeftOut, choose_files, only_split, put_aside
from trainer.system.errors import InputError
from trainer.system.regular_file import read_file

README = "README.md"
ANY = ""
_MOST_BYTES = 1 << 20
"""A longer README is not looked at."""


@dataclass(frozen=True)
class Subset:
    """One subset of a data set."""

    name: str
    patterns: dict[str, list[str]]
    """Patterns of each split's files; with `ANY` the names of files tell the split."""
    is_default: bool = False


def read_subsets(folder: Path) -> dict[str, Subset]:
    """Return the subsets that a folder's README names with their files; {} if it names none."""
    try:
        text = read_file(folder / README, _MOST_BYTES).decode("utf-8")
        begin, front, *_ = text.replace("\r\n", "\n").split("---\n", 2)
        configs = [] if begin else yaml.safe_load(front)["configs"]
        found = [_read_subset(each) for each in configs if isinstance(each, dict)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return {}
    return {each.name: each for each in found if each.patterns}


def _read_subset(tree: dict[str, Any]) -> Subset:
    name, files = str(tree.get("config_name", "default")), tree.get("data_files")
    folder = str(tree.get("data_dir", "")).strip("/")
    below = f"{folder}/" if folder else ""
    if files is None:
        splits: dict[str, Any] = {ANY: "**"} if folder else {}
    elif isinstance(files, dict):
        splits = files
    elif isinstance(files, list) and isinstance(files[0], dict):
        splits = {str(each["split"]): each["path"] for each in files}
    else:
        splits = {"train": files}
    patterns = {
        split: [below + str(one).removeprefix("./") for one in _as_list(each)]
        for split, each in splits.items()
    }
    return Subset(name, patterns, tree.get("default") is True)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def choose_subset(place: str, subsets: dict[str, Subset], chosen: str | None) -> Subset | None:
    """Return the subset to read: the chosen one, else the default or the only one.

    Raises:
        InputError: there are several, and none is chosen.
    """
    if chosen is not None:
        return subsets[chosen]
    if len(subsets) < 2:
        return next(iter(subsets.values()), None)
    default = [each for each in subsets.values() if each.is_default or each.name == "default"]
    if not default:
        raise InputError(
            f"{place}: contains the subsets {', '.join(subsets)}; choose one, such as"
            f" {place}/{next(iter(subsets))}"
        )
    return default[0]


def list_chosen_files(
    place: str, names: list[str], subset: Subset, subsets: dict[str, Subset]
) -> tuple[list[str], LeftOut]:
    """Return the files of a subset's training split, and why others are left out.

    Raises:
        InputError: there are none, or they are of several splits without `train`.
    """
    left_out: LeftOut = {}
    if ANY in subset.patterns:
        chosen, left_out = choose_files(place, _match_names(names, subset.patterns[ANY]))
    else:
        splits = {split: _match_names(names, each) for split, each in subset.patterns.items()}
        train = "train" if "train" in splits else only_split(place, sorted(splits))
        chosen = splits.pop(train)
        if not chosen:
            raise InputError(
                f"{place}: no file of it is one of the subset {subset.name}, whose files are called"
                f" {', '.join(subset.patterns[train])}"
            )
        for split, found in splits.items():
            put_aside(left_out, f"split {split}", set(found).difference(chosen))
    for other in subsets.values():
        files = {name for each in other.patterns.values() for name in _match_names(names, each)}
        put_aside(left_out, f"subset {other.name}", files.difference(chosen, *left_out.values()))
    put_aside(left_out, "other files", set(names).difference(chosen, *left_out.values()))
    return chosen, left_out


def _match_names(names: list[str], patterns: list[str]) -> list[str]:
    """Return the names that match: `*` stands for a part of a name, `**` for folders as well."""
    return [name for name in names if any(_is_match(name, pattern) for pattern in patterns)]


def _is_match(name: str, pattern: str) -> bool:
    deep = "**" in pattern
    return (deep or name.count("/") == pattern.count("/")) and fnmatch.fnmatchcase(
        name, pattern.replace("**/", "*")
    )
