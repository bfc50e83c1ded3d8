"""What a teacher is to score, agreed on with every other one before the first forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.vocabulary import Vocabulary, tokenizer_size
from trainer.distill.windows import Range, Windows
from trainer.errors import InputError
from trainer.headers import read_config
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
from trainer.model_files import model_digest, resolve_model

SHARD_BYTES = 1 << 19
"""Text of a shard: what a killed teacher loses. At 300 tokens a second it takes ten minutes."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What somebody wants to have scored."""

    model: str
    """A local folder, or a hub name."""
    data: Sequence[Path]
    """Files and folders, see `Documents`."""
    output: Path
    tokenizer: Path | None
    """The student's; None: the teacher's own."""
    scheme: Scheme
    values: Values = "float16"
    max_seq_len: int = 1024
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


def assign(wish: Wish) -> Assignment:
    """Write what is wanted into the output folder, or compare it with what is there.

    Raises:
        InputError: model, tokenizer or corpus cannot be used.
        RefusedError: the tokenizer is not of this teacher, or the folder holds something else;
            names both hashes, and nothing was changed.
        StorageError: the disk failed.
    """
    model_dir = resolve_model(wish.model)
    tokenizer_dir = wish.tokenizer or model_dir
    _check_length(model_dir, wish.max_seq_len)
    vocabulary = Vocabulary.load(tokenizer_dir, model_dir)
    documents = Documents(wish.data)
    windows = Windows(documents, Encoder(tokenizer_dir), wish.max_seq_len)
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
    known = _known_plan(folder, tokenizer, corpus, wish.max_seq_len, ranges)
    folder.describe(
        Description(
            teacher=teacher,
            tokenizer=tokenizer,
            corpus=corpus,
            scheme=wish.scheme,
            values=wish.values,
            max_seq_len=wish.max_seq_len,
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


def _check_length(model_dir: Path, max_seq_len: int) -> None:
    positions = read_config(model_dir).get("max_position_embeddings")
    if isinstance(positions, int) and max_seq_len > positions:
        raise InputError(
            f"--max-seq-len {max_seq_len}: the teacher knows {positions} positions, take no more"
        )
