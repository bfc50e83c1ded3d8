"""Data sets that configs of other trainers name; of LLaMA-Factory entries of dataset_info.json.

A local file becomes `data.train` or `data.validation`, and its columns `data.columns`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.system.key_table import KeyTable
from trainer.system.regular_file import read_file

FILE = "dataset_info.json"
_REMOTE = "is not on this machine; download it and set data.train"
_PART = "takes a part of the data; make a file of it"
ENTRY_KEYS = KeyTable(
    f"an entry of {FILE}",
    used=frozenset(("file_name", "formatting", "columns", "tags")),
    harmless=frozenset(("split",)),
    refused={
        **dict.fromkeys(("hf_hub_url", "ms_hub_url", "om_hub_url"), _REMOTE),
        **dict.fromkeys(("script_url", "cloud_file_name"), _REMOTE),
        **dict.fromkeys(("num_samples", "subset", "folder"), _PART),
        "ranking": "is of preference training: give its file as data.train, and task dpo",
    },
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DATA_ENDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_EXTRA_COLUMNS = {"system": "system", "tools": "tools", "history": "history"}
_TURNS = {
    ("from", "value", "human", "gpt"): "conversations",
    ("role", "content", "user", "assistant"): "messages",
}
"""The tags of a turn, and the key of a data line that has such turns."""


class NoSettingError(Exception):
    """A value that no setting stands for; the message says why, and what to do."""


def resolve_data_set(
    name: Any, setting: str, tree: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the settings of the data set that a config names.

    Args:
        setting: `data.train` or `data.validation`.
        tree: the config, whose `dataset_dir` has the descriptions.
        folder: the config's; they may also lie there.

    Raises:
        NoSettingError: it is not one local file that can be read as it is.
    """
    if not isinstance(name, str) or "," in name:
        raise NoSettingError(f"{name!r}: join the files of several data sets and set {setting}")
    named = Path(str(tree.get("dataset_dir") or "data"))
    for home in (named, folder / named, folder):
        if (home / FILE).is_file():
            break
    else:
        raise NoSettingError(f"{name!r} is a name in {FILE}, which is not here; set {setting}")
    where = f"{name!r} in {home / FILE}"
    try:
        entry = json.loads(read_file(home / FILE))[name]
        given = {key: entry[key] for key in entry if entry[key] not in (None, False)}
        unknown = "".join(f"'{key}' is not known" for key in ENTRY_KEYS.find_unknown(given)[:1])
        if why := ENTRY_KEYS.explain_refusal(given) or unknown:
            raise NoSettingError(f"{where}: {why}")
        columns = _map_columns(given, tree.get("stage") == "pt")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NoSettingError(f"{where}: is not described there; set {setting}") from None
    file = home / str(given.get("file_name"))
    if not file.exists():
        raise NoSettingError(f"{where}: there is no {file}; set {setting}")
    return {setting: str(file), "data.columns": columns}


def _map_columns(entry: Mapping[str, Any], pretrains: bool) -> dict[str, str]:
    """Return `data.columns` for an entry; {} if the lines have our keys."""
    named, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if entry.get("formatting", "alpaca") == "alpaca":
        keys = {"prompt": "text"} if pretrains else _ALPACA | _EXTRA_COLUMNS
        named = named or {"prompt": "instruction"} if pretrains else named
    else:
        form = ("role_tag", "from"), ("content_tag", "value"), ("user_tag", "human")
        turn = tuple(tags.get(tag, usual) for tag, usual in (*form, ("assistant_tag", "gpt")))
        if (key := _TURNS.get(turn)) is None:
            raise NoSettingError(f"turns tagged {', '.join(map(str, turn))} are not read")
        keys = {"messages": key} | _EXTRA_COLUMNS
        named = {"messages": "conversations"} | named
    if other := [key for key in named if key not in keys]:
        raise NoSettingError(f"has a column of {other[0]}, which is not read; prepare a file")
    columns = {keys[key]: column for key, column in named.items()}
    return {} if all(key == column for key, column in columns.items()) else columns


def make_list_rule(setting: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    """Return the rule of a list of data sets, of which one is taken with its path alone."""

    def convert(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
        match value:
            case str(path) | [str(path)]:
                return {setting: _resolve_data_path(path)}
            case {"path": str(path), **more} | [{"path": str(path), **more}]:
                unread = map(str, more.keys() - {"type", "ds_type"})
            case _:
                raise NoSettingError(f"not one data set; join their files and set {setting}")
        if unread := ", ".join(sorted(unread)):
            raise NoSettingError(f"has {unread}; prepare a file, set {setting}")
        return {setting: _resolve_data_path(path)}

    return convert


def _resolve_data_path(path: str) -> str:
    """Return a path as Motley names it: OWNER/NAME is a data set of the hub unless it is here."""
    local = Path(path).exists() or path.endswith(_DATA_ENDS)
    return path if local or not _HUB_NAME.fullmatch(path) else f"hf://datasets/{path}"
