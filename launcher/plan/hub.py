"""Hub names such as `Qwen/Qwen3-4B`: which names are valid, and whether this machine has the model.

Standard library only, and no network: the trainer downloads. The cache has the layout of
huggingface_hub: `models--OWNER--NAME/refs/main` names a folder in `snapshots/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_hub_name(value: str, folder: Path) -> bool:
    """Whether a model has the form of a hub name, and `folder` holds nothing of that name."""
    return _NAME.fullmatch(value) is not None and not (folder / value).exists()


def cached_snapshot(name: str) -> Path | None:
    """Return the folder in which this user's hub cache has a model; it may be incomplete."""
    home = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        commit = (home / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = home / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def cache_folder() -> Path:
    """Return the hub cache, by the same variables as huggingface_hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return _expand_path(named)
    if named := os.environ.get("HF_HOME"):
        return _expand_path(named) / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expand_path(base) / "huggingface" / "hub"


def is_offline() -> bool:
    """Whether this machine is set offline for the hub."""
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return offline.upper() in ("1", "ON", "YES", "TRUE")


def _expand_path(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()
