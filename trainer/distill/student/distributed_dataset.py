"""A folder of teacher logits as the samples of a run with any number of workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer.config.run import RunConfig
from trainer.data.order import permute_epoch
from trainer.data.shards import ANSWERS_SCHEMA, has_logits, shards_schema
from trainer.data.tokens import Encoded
from trainer.distill.logits.dataset import SHARD_FILE, LogitsFolder
from trainer.distill.logits.scores import Window
from trainer.distill.student.inputs import check_student
from trainer.distill.student.prefetch import Preparation
from trainer.system.errors import InputError
from trainer.system.storage import atomic_folder

GROUP = 4
"""Shards whose windows are mixed, and that a worker holds in memory."""


class DistillationDataset:
    """Every window of a folder is a sample; a shard is read when one of its samples is used.

    Args:
        prepare: converts a window to a sample.
    """

    def __init__(self, folder: LogitsFolder, prepare: Preparation) -> None:
        self._prepare = prepare
        sizes = [shard.windows for shard in folder.description.shards]
        self._starts = [0, *accumulate(sizes)]
        self._read = lru_cache(GROUP)(folder.read_shard)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Encoded:
        """Return a sample.

        Raises:
            StorageError: its shard is missing or damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._starts, index) - 1
        windows: Sequence[Window] = self._read(shard)
        return self._prepare(windows[index - self._starts[shard]])

    def permute_windows(self, seed: int, epoch: int, length: int) -> NDArray[np.int64]:
        """Return the permutation of `range(length)` that an epoch visits, `[length]`.

        The shards come in random order, and their windows are mixed within groups of `GROUP`
        shards, so that an epoch reads each shard once, not one for each sample.
        """
        assert length == len(self)
        draws = epoch * (len(self._starts) + 1)  # a separate stream for every drawn order
        shards = permute_epoch(seed, draws, len(self._starts) - 1)
        parts: list[NDArray[np.int64]] = []
        for start in range(0, len(shards), GROUP):
            group = np.concatenate(
                [
                    np.arange(self._starts[shard], self._starts[shard + 1])
                    for shard in shards[start : start + GROUP]
                ]
            )
            parts.append(group[permute_epoch(seed, draws + 1 + start // GROUP, len(group))])
        return np.concatenate(parts)


def logits_folder(config: RunConfig, model_dir: Path) -> LogitsFolder | None:
    """Return a run's folder of logits, None for a run without a teacher.

    The folder must be complete: a run of several workers assigns samples by their number.

    Raises:
        InputError: config and data do not fit together, or shards are missing.
        RefusedError: the logits are about another tokenizer than the model's.
    """
    path = Path(config.data.train)
    if config.distillation is None:
        if has_logits(path):
            raise InputError(
                f"{path}: contains a teacher's logits; set how to learn from them, such as"
                " --set distillation.alpha=0.7"
            )
        return None
    if not path.is_dir():
        raise InputError(
            f"{path}: with a section `distillation`, data.train is a folder that `trainer distill"
            " teacher` wrote"
        )
    if shards_schema(path) == ANSWERS_SCHEMA:
        raise InputError(
            f"{path}: contains generated answers, not logits; leave out the section "
            "`distillation`, or"
            " have them scored: trainer distill teacher --data"
        )
    folder = LogitsFolder(path)
    check_student(config, folder.description, model_dir)
    missing = folder.list_missing()
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(folder.description.shards)} shards are missing or"
            f" damaged, such as {folder.shard_path(missing[0]).name}; let `trainer distill teacher`"
            " finish, or learn with `trainer distill student`, which waits for them"
        )
    return folder


def content_digest(folder: LogitsFolder) -> str:
    """Return the BLAKE3 hex digest of a whole folder: its description and every shard's bytes.

    The bytes are those of the manifests; reading a shard compares them.

    Raises:
        StorageError: a shard is missing.
    """
    hasher = blake3(folder.digest.encode())
    for shard in folder.description.shards:
        record = atomic_folder.read_manifest(folder.shard_path(shard.number))[SHARD_FILE]
        hasher.update(record.blake3.encode())
    return hasher.hexdigest()
