"""A folder of shards of any kind, by its description."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.distill.answers.description import AnswersDescription
from trainer.distill.answers.folder import AnswersFolder
from trainer.distill.answers.student_answers import ANSWERS, RoundAnswers, RoundsFolder
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.shard_folder import DATASET, ShardFolder
from trainer.system.regular_file import read_file
from trainer.system.untrusted_data import parse_json


def open_shards(path: Path) -> ShardFolder[Any, Any]:
    """Return a folder of answers, or of logits, which says what is wrong with another one.

    Of a student's rounds these are the scores, checked against the answers, or the answers alone.
    """
    if path.name == ANSWERS and (path.parent / DATASET).is_file():
        return RoundAnswers(path)
    schema = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        schema = parse_json(read_file(path / DATASET), DATASET)["schema"]
    return AnswersFolder(path) if schema == AnswersDescription.schema else open_logits(path)


def open_logits(path: Path) -> LogitsFolder:
    """Return a folder of logits; of a student's rounds, whose plan is in its answers, too."""
    return RoundsFolder(path) if (path / ANSWERS / DATASET).is_file() else LogitsFolder(path)
