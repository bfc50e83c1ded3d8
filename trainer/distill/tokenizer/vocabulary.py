"""The map from a student's tokens to its teacher's.

A trimmed tokenizer (see `trim.py`) holds a part of its teacher's tokens under compact ids; its
`vocabulary.json` says which:

    {"schema": "motley.vocabulary/1", "teacher_tokenizer": BLAKE3 of the teacher's tokenizer.json,
     "tokenizer": BLAKE3 of the tokenizer.json beside it, "teacher_ids": [...]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer.data.tokenizer_folder import load_tokenizer
from trainer.model.architecture import read_vocabulary
from trainer.model.gguf.source import is_converted
from trainer.system.errors import InputError, RefusedError, convert_read_errors
from trainer.system.regular_file import read_file

FILE = "vocabulary.json"
SCHEMA = "motley.vocabulary/1"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A student's tokens, each of them one of the teacher's."""

    teacher_ids: NDArray[np.int32]
    """`[size]`: the teacher's id of each of the student's tokens; each id once, ascending."""
    tokenizer: str
    """BLAKE3 hex of the student's tokenizer.json."""
    teacher_tokenizer: str
    """BLAKE3 hex of the teacher's; equal to `tokenizer` if the student uses it unchanged."""
    is_proven: bool = True
    """Whether the files show that both cut every text alike; else each text has to."""

    @property
    def size(self) -> int:
        """Tokens of the student's tokenizer; its model may have more rows (a padded vocabulary)."""
        return len(self.teacher_ids)

    @classmethod
    def load_map(cls, tokenizer_dir: Path, teacher_dir: Path) -> Vocabulary:
        """Return the map from one folder's tokenizer to the teacher's.

        A tokenizer that was rebuilt from a GGUF file is never its publisher's byte for byte: there
        each of the student's tokens must have the teacher's id, and nothing is proven of texts.

        Raises:
            RefusedError: the tokenizer was not made from this teacher's; names both hashes, or of a
                GGUF file's the first token that differs.
            InputError: a file is missing or damaged, or the teacher's tokenizer makes tokens that
                its model lacks.
        """
        theirs, ours = tokenizer_digest(teacher_dir), tokenizer_digest(tokenizer_dir)
        teacher_size = _check_known(teacher_dir)
        if ours == theirs:
            return cls(np.arange(teacher_size, dtype=np.int32), ours, theirs)
        if not (tokenizer_dir / FILE).is_file():
            if is_converted(teacher_dir):
                size = _check_ids(tokenizer_dir, teacher_dir)
                return cls(np.arange(size, dtype=np.int32), ours, theirs, is_proven=False)
            raise RefusedError(
                f"{tokenizer_dir}: its tokenizer is not the teacher's ({ours[:16]}, that of"
                f" {teacher_dir} is {theirs[:16]}), and no {FILE} maps one to the other;"
                " make one with `trainer distill trim-tokenizer`"
            )
        vocabulary = _read_vocabulary(tokenizer_dir / FILE)
        if vocabulary.tokenizer != ours:
            raise RefusedError(
                f"{tokenizer_dir}: tokenizer.json ({ours[:16]}) is not the one that {FILE} was"
                f" written for ({vocabulary.tokenizer[:16]})"
            )
        if vocabulary.teacher_tokenizer != theirs:
            raise RefusedError(
                f"{tokenizer_dir}: was trimmed from the tokenizer"
                f" {vocabulary.teacher_tokenizer[:16]}, that of {teacher_dir} is {theirs[:16]}"
            )
        return vocabulary


def tokenizer_digest(folder: Path) -> str:
    """Return the BLAKE3 hex digest of a folder's tokenizer.json.

    Raises:
        InputError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    with convert_read_errors(path, InputError):
        return blake3(read_file(path)).hexdigest()


def tokenizer_size(folder: Path) -> int:
    """Return how many ids a folder's tokenizer can make: its largest one plus one.

    Raises:
        InputError: there is no usable tokenizer.json.
    """
    return max(load_tokenizer(folder).get_vocab().values()) + 1


def _check_known(teacher_dir: Path) -> int:
    """Return the size of the teacher's tokenizer, all of which its model must have."""
    size, known = tokenizer_size(teacher_dir), read_vocabulary(teacher_dir)
    if size > known:
        raise InputError(
            f"{teacher_dir}: its tokenizer makes {size} tokens, its model has {known}; use the "
            "tokenizer that the model was trained with"
        )
    return size


def _check_ids(tokenizer_dir: Path, teacher_dir: Path) -> int:
    """Return the size of a student's tokenizer, whose tokens have the same ids in the teacher's.

    The teacher may have more of them behind.
    """
    ours, theirs = (_by_id(folder) for folder in (tokenizer_dir, teacher_dir))
    for number, token in sorted(ours.items()):
        if token != theirs.get(number):
            there = f"is {theirs[number]!r}" if number in theirs else "does not exist"
            raise RefusedError(
                f"{tokenizer_dir}: its tokenizer is not that of {teacher_dir}: the token {number}"
                f" is {token!r} here and {there} there; use the GGUF file's own, or one that"
                " `trainer distill trim-tokenizer` makes of it"
            )
    return max(ours) + 1


def _by_id(folder: Path) -> dict[int, str]:
    return {number: token for token, number in load_tokenizer(folder).get_vocab().items()}


def _read_vocabulary(path: Path) -> Vocabulary:
    try:
        tree: Any = json.loads(read_file(path))
        if tree["schema"] != SCHEMA:
            raise InputError(f"{path}: unknown schema {tree['schema']!r}")
        ids = np.array(tree["teacher_ids"], dtype=np.int32)
        vocabulary = Vocabulary(ids, str(tree["tokenizer"]), str(tree["teacher_tokenizer"]))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise InputError(f"{path}: damaged") from None
    if ids.ndim != 1 or not ids.size or ids[0] < 0 or np.any(np.diff(ids) <= 0):
        raise InputError(f"{path}: damaged: teacher_ids must ascend")
    return vocabulary
