"""The proof that a GGUF file's tokenizer is a student's on every document of a corpus.

The tokenizer of a GGUF file is rebuilt from a vocabulary and the name of a way to cut text, so it
has another digest than the publisher's, and a wrong name would give other tokens.
"""

from __future__ import annotations

import copy
from itertools import zip_longest
from pathlib import Path

from trainer.data.document_tokens import Ids, ReadDocuments
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.system.errors import RefusedError
from trainer.system.process.slow_log import log_if_slow


def check_same_ids(
    documents: Documents, tokenizer_dir: Path, teacher_dir: Path, encoder: Encoder
) -> None:
    """Check that a teacher's tokenizer gives each document the ids that the student's gives.

    Conversations are laid out by the student's template for both.

    Args:
        encoder: of the student's tokenizer.

    Raises:
        RefusedError: names the first document that differs, and its first such token.
        InputError: a document has no token.
    """
    teachers = copy.copy(encoder)
    teachers.tokenizer = load_tokenizer(teacher_dir)
    count = len(documents)
    with log_if_slow(f"comparing the tokenizers of {tokenizer_dir} and {teacher_dir}"):
        pairs = zip(
            ReadDocuments(documents, encoder).tokens(0, count),
            ReadDocuments(documents, teachers).tokens(0, count),
            strict=True,
        )
        for (number, ours, _), (_, theirs, _) in pairs:
            if ours != theirs:
                place, here, there = _first_difference(ours, theirs)
                raise RefusedError(
                    f"{documents.source(number)}: token {place} is"
                    f" {_describe_token(encoder, here)} by {tokenizer_dir} and"
                    f" {_describe_token(teachers, there)} by the teacher {teacher_dir},"
                    " so their tokenizers differ; take the GGUF file's own, or one that `trainer"
                    " distill trim-tokenizer` makes of it"
                )


def _first_difference(ours: Ids, theirs: Ids) -> tuple[int, int | None, int | None]:
    """Return the first place, from 1, at which lists of ids differ, and both ids."""
    pairs = enumerate(zip_longest(ours, theirs), start=1)
    return next((place, here, there) for place, (here, there) in pairs if here != there)


def _describe_token(encoder: Encoder, token: int | None) -> str:
    return "nothing" if token is None else f"{encoder.tokenizer.id_to_token(token)!r} ({token})"
