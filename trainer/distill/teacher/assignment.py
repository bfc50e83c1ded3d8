"""What a teacher is to score, agreed on with every other one before the first forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.teacher.windows import Range, Windows
from trainer.distill.tokenizer.vocabulary import Vocabulary, tokenizer_size
from trainer.errors import InputError
from trainer.logits.dataset import LogitsFolder
from trainer.logits.description import (
    CorpusInfo,
    Description,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
    Values,
)
from trainer.logits.scores import Scheme
from trainer.model.files import model_digest, resolve_model
from trainer.model.safetensors_headers import positions_of, read_config

log = logging.getLogger(__name__)

WINDOW = 1024
"""Default number of tokens of a window."""
SHARD_BYTES = 1 << 19
"""Text of a shard: what a killed teacher loses. At 300 tokens a second it takes ten minutes."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A request to score a corpus."""

    model: str
    """A local folder, or a hub name."""
    data: Sequence[Path]
    """Files and folders, see `Documents`."""
    output: Path
    tokenizer: Path | None
    """The student's; None: the teacher's own."""
    scheme: Scheme
    values: Values = "float16"
    max_seq_len: int | None = None
    """Tokens of a window; None: 1,024, or as many as the teacher knows positions."""
    shard_bytes: int = SHARD_BYTES
    seed: int = 0
    dtype: str = "bfloat16"


@dataclass(frozen=True, eq=False)
class Assignment:
    """A wish that fits the folder it goes to."""

    model_dir: Path
    vocabulary: Vocabulary
    windows: Windows
    folder: LogitsFolder


def assign(wish: ScoringRequest) -> Assignment:
    """Write what is wanted into the output folder, or compare it with what is there.

    Raises:
        InputError: model, tokenizer or corpus cannot be used.
        RefusedError: the tokenizer is not of this teacher, or the folder holds something else;
            names both hashes, and nothing was changed.
        StorageError: the disk failed.
    """
    model_dir = resolve_model(wish.model)
    tokenizer_dir = wish.tokenizer or model_dir
    max_seq_len = _window_length(model_dir, wish.max_seq_len)
    vocabulary = Vocabulary.load(tokenizer_dir, model_dir)
    documents = Documents(wish.data)
    windows = Windows(documents, Encoder(tokenizer_dir), max_seq_len)
    folder = LogitsFolder(wish.output)
    is_local = Path(wish.model).expanduser().is_dir()
    teacher = TeacherInfo(
        name=str(model_dir) if is_local else wish.model,
        digest=model_digest(model_dir),
        dtype=wish.dtype,
        vocab_size=read_config(model_dir)["vocab_size"],
        tokenizer_size=tokenizer_size(model_dir),
    )
    tokenizer = TokenizerInfo(digest=vocabulary.tokenizer, size=vocabulary.size)
    corpus = CorpusInfo(digest=documents.digest, documents=len(documents))
    ranges = windows.ranges(wish.shard_bytes)
    known = _known_plan(folder, tokenizer, corpus, max_seq_len, ranges)
    folder.describe(
        Description(
            teacher=teacher,
            tokenizer=tokenizer,
            corpus=corpus,
            scheme=wish.scheme,
            values=wish.values,
            max_seq_len=max_seq_len,
            seed=wish.seed,
            shards=known or windows.plan(ranges),
        )
    )
    return Assignment(model_dir, vocabulary, windows, folder)


def _known_plan(
    folder: LogitsFolder,
    tokenizer: TokenizerInfo,
    corpus: CorpusInfo,
    max_seq_len: int,
    ranges: Sequence[Range],
) -> tuple[ShardPlan, ...] | None:
    """Return the folder's plan where it must be ours, so that the corpus is tokenised once."""
    try:
        there = folder.description
    except InputError:
        return None  # nothing there, or nothing usable: `describe` says so
    same = (there.tokenizer, there.corpus, there.max_seq_len) == (tokenizer, corpus, max_seq_len)
    same &= [(plan.first_document, plan.stop_document) for plan in there.shards] == ranges
    return there.shards if same else None


def _window_length(model_dir: Path, wanted: int | None) -> int:
    """Return the tokens of a window: what was asked for, else what the teacher can read."""
    positions = positions_of(read_config(model_dir))
    if positions is None or (wanted or WINDOW) <= positions:
        return wanted or WINDOW
    if wanted is not None:
        raise InputError(
            f"--max-seq-len {wanted}: the teacher knows {positions} positions, take no more"
        )
    log.info("windows of %d tokens, not %d: the teacher knows no more positions", positions, WINDOW)
    return positions
