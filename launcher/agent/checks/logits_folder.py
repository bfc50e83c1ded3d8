"""A teacher's logits as the data of a run: whether the folder is complete, and its digests.

Its format is that of `trainer.distill.logits`. A host reads only its JSON: the descriptions and
manifests, no scores.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from launcher.agent.checks.digests import HASH_DEADLINE, hash_paths
from launcher.agent.checks.finding import Finding
from launcher.agent.operation import operation
from trainer.data.shards import ANSWERS_SCHEMA, shards_schema
from trainer.system.regular_file import open_file, read_file

DATASET = "dataset.json"
"""Name of the file that lists the shards to expect; a folder with it holds logits."""

_MANIFEST = "manifest.json"
_SHARD_FILE = "logits.parquet"
_BRING = "let `trainer distill teacher` finish, or copy a complete folder there: launch sync inputs"


def check_logits(folder: Path) -> Finding:
    """Whether a folder of logits is readable and has every shard: a run counts all its samples."""
    description = folder / DATASET
    if shards_schema(folder) == ANSWERS_SCHEMA:
        detail = f"{folder}: contains answers, and the section `distillation` needs logits"
        remedy = "let `trainer distill teacher --data` score them, or --set distillation=null"
        return Finding("fail", detail, remedy)
    try:
        shards = _read_shards(folder)
    except NotADirectoryError:
        detail = f"{folder}: with a section `distillation`, data.train is a folder of logits"
        return Finding("fail", detail, "give --data DIR, or --set distillation=null")
    except OSError as error:
        return Finding("fail", f"{description}: {(error.strerror or '').lower()}", _BRING)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Finding("fail", f"{description}: not a description of shards", _BRING)
    if missing := [name for name, digest in shards.items() if digest is None]:
        detail = f"{folder}: {len(missing)} of {len(shards)} shards are missing or damaged"
        return Finding("fail", f"{detail}, such as {missing[0]}", _BRING)
    return Finding("ok", f"{folder}, {len(shards)} shards of a teacher's logits")


@operation("logits_content", deadline=HASH_DEADLINE)
def logits_content(path: str | Path, state_folder: str | Path) -> dict[str, str]:
    """Return the digests of what makes a folder of logits: its description, and every shard's.

    They are those that the members of a run compare when they join. A shard's digest is the one in
    its manifest, since reading a shard verifies its bytes. Empty if the folder is incomplete.
    """
    folder = Path(path)
    if check_logits(folder).status == "fail":
        return {}
    shards = _read_shards(folder)
    vouched = {name: digest for name, digest in shards.items() if digest is not None}
    return hash_paths([folder / DATASET], Path(state_folder)) | vouched


def _read_shards(folder: Path) -> dict[str, str | None]:
    """Return the digest of each expected shard, None for an incomplete one.

    Raises:
        OSError: dataset.json cannot be read.
        ValueError, KeyError, TypeError: it is none.
    """
    tree: Any = json.loads(read_file(folder / DATASET))
    names = [f"shard-{int(shard['number']):05d}" for shard in tree["shards"]]
    return {name: _read_digest(folder / name) for name in names}


def _read_digest(shard: Path) -> str | None:
    try:
        record: Any = json.loads(read_file(shard / _MANIFEST))["files"][_SHARD_FILE]
        with open_file(shard / _SHARD_FILE) as stream:  # size only
            size = stream.seek(0, os.SEEK_END)
        return str(record["blake3"]) if size == record["size"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
