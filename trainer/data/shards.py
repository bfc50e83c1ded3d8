"""The kind of a folder of shards, by its description: a teacher's logits, or generated answers.

An agent reads it on hosts that may have no packages. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.system.regular_file import read_file

ANSWERS_SCHEMA = "motley.answers/2"
"""The schema of a folder of generated answers, which is data like any other."""
DESCRIPTION = "dataset.json"


def has_logits(folder: Path) -> bool:
    """Return whether a folder has the description of a teacher's logits, or of an unknown kind."""
    return shards_schema(folder) not in (None, ANSWERS_SCHEMA)


def shards_schema(folder: Path) -> str | None:
    """Return the schema in a folder's dataset.json, "" if that names none; None without one."""
    try:
        schema = json.loads(read_file(folder / DESCRIPTION))["schema"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return schema if isinstance(schema, str) else ""
