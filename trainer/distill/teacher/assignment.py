"""A teacher's assignment, the same for every teacher before the first forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.config.data import TEMPLATE_DATE, LostText
from trainer.config.run import Quantization
from trainer.data.document_tokens import Ids, Range, ReadDocuments, open_documents
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import (
    MOST_ENTRIES,
    CorpusInfo,
    Description,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
    Values,
)
from trainer.distill.logits.scores import Scheme
from trainer.distill.teacher.engines import describe_quantization, engine_kind
from trainer.distill.teacher.windows import SHARD_BYTES, WindowCutter, window_length
from trainer.distill.tokenizer.vocabulary import Vocabulary, tokenizer_size
from trainer.model.architecture import read_vocabulary
from trainer.model.files import model_digest, resolve_model
from trainer.model.formats import lasting_name
from trainer.system.errors import InputError, RefusedError
from trainer.system.process.slow_log import log_if_slow


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """A request to score a corpus."""

    model: str
    """A local folder, or a hub name."""
    data: Sequence[Path]
    """Files and folders, see `Documents`; none: only the answers that students write."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """See `data.columns`."""
    output: Path
    tokenizer: Path | None
    """The student's; None: the teacher's own."""
    scheme: Scheme
    values: Values = "float16"
    max_seq_len: int | None = None
    """Tokens of a window; None: 1,024, or the teacher's maximum if that is less."""
    lost_text: LostText | None = None
    """See `data.lost_text`; None: refuse."""
    date: str | None = None
    """See `data.date`; None: its default."""
    shard_bytes: int = SHARD_BYTES
    seed: int = 0
    engine: str = "torch"
    """See `distill.teacher.engines`."""
    dtype: str = "bfloat16"
    quantization: Quantization = "none"


@dataclass(frozen=True, eq=False)
class Assignment:
    """A request that fits its output folder."""

    model_dir: Path
    vocabulary: Vocabulary
    windows: WindowCutter
    folder: LogitsFolder
    description: Description
    """Description of the folder, which the first admitted teacher writes there."""

    def write_description(self, kl: float | None) -> None:
        """Write the description to the folder, or compare it with the existing one.

        Args:
            kl: see `TeacherInfo.kl`.

        Raises:
            RefusedError: the folder's description differs; names both values.
            InputError: the folder cannot be written.
            StorageError: the disk failed.
        """
        teacher = replace(self.description.teacher, kl=kl)
        self.folder.write_description(replace(self.description, teacher=teacher))

    def first_windows(self, tokens: int) -> list[NDArray[np.int32]]:
        """Return the corpus's first tokens in windows, as the teacher's ids, `[T]` each."""
        found: list[NDArray[np.int32]] = []
        windows = (
            window for plan in self.description.shards for window in self.windows.cut_shard(plan)
        )
        for window in windows:
            found.append(self.vocabulary.teacher_ids[window.tokens[:tokens]])
            tokens -= len(found[-1])
            if not tokens:
                break
        return found


def assign_request(request: ScoringRequest) -> Assignment:
    """Return what a request asks for, after comparing it with an existing output folder.

    Raises:
        InputError: model, tokenizer or corpus cannot be used.
        RefusedError: the tokenizer is not this teacher's, or the folder's description differs;
            names both hashes. Nothing was changed.
    """
    if not request.data and not engine_kind(request.engine).facts.is_reference:
        raise InputError(f"--engine {request.engine} is compared on the corpus first: give --data")
    model_dir = resolve_model(request.model)
    tokenizer_dir = request.tokenizer or model_dir
    max_seq_len = window_length(model_dir, request.max_seq_len)
    vocabulary = Vocabulary.load_map(tokenizer_dir, model_dir)
    if not request.data and not vocabulary.is_proven:
        raise InputError(
            f"--tokenizer {tokenizer_dir} is compared with that of a GGUF file on the corpus: give"
            " --data"
        )
    date = request.date or TEMPLATE_DATE
    encoder = Encoder(tokenizer_dir, request.lost_text or "refuse", date)
    documents = open_documents(request.data, request.columns, encoder)
    windows = WindowCutter(documents, max_seq_len)
    folder = LogitsFolder(request.output)
    is_local = Path(request.model).expanduser().exists()
    teacher = TeacherInfo(
        name=lasting_name(request.model, model_dir) if is_local else request.model,
        digest=model_digest(model_dir),
        engine=request.engine,
        quantization=describe_quantization(request.engine, model_dir, request.quantization),
        dtype=request.dtype,
        vocab_size=read_vocabulary(model_dir),
        tokenizer_size=tokenizer_size(model_dir),
    )
    tokenizer = TokenizerInfo(digest=vocabulary.tokenizer, size=vocabulary.size)
    corpus = CorpusInfo(digest=documents.digest, documents=len(documents), date=date)
    ranges = windows.split_documents(request.shard_bytes)
    known = _known_plan(folder, tokenizer, corpus, max_seq_len, ranges)
    if known is None and not vocabulary.is_proven:
        whole = Documents(request.data, request.columns)
        check_same_ids(whole, tokenizer_dir, model_dir, encoder)
    plans = known or windows.plan_shards(ranges)
    if request.scheme.kind == "full" and plans:
        _check_size(plans, vocabulary.size)
    description = Description(
        teacher=teacher,
        tokenizer=tokenizer,
        corpus=corpus,
        scheme=request.scheme,
        values=request.values,
        max_seq_len=max_seq_len,
        seed=request.seed,
        shards=plans,
    )
    if folder.is_described:
        folder.compare_description(description)
    return Assignment(model_dir, vocabulary, windows, folder, description)


def _check_size(plans: Sequence[ShardPlan], vocabulary: int) -> None:
    """Check before any work that a shard can hold all tokens' scores."""
    largest = max(plans, key=lambda plan: plan.tokens)
    most = MOST_ENTRIES // vocabulary
    if largest.tokens <= most:
        return
    where = f"--scheme full: {largest.name} has {largest.tokens:,} tokens, and scores of a "
    where += f"vocabulary of {vocabulary:,} fit for {most:,} only"
    if largest.stop_document - largest.first_document == 1:
        raise InputError(f"{where}; split document {largest.first_document}, or use topk")
    # A token has a byte or more, and a shard is longer than asked for by a document at most.
    raise InputError(f"{where}; give --shard-bytes {max(1, most // 2)}, or use topk")


def _known_plan(
    folder: LogitsFolder,
    tokenizer: TokenizerInfo,
    corpus: CorpusInfo,
    max_seq_len: int,
    ranges: Sequence[Range],
) -> tuple[ShardPlan, ...] | None:
    """Return the folder's plan if it must be the same, so that the corpus is tokenised once."""
    try:
        there = folder.description
    except InputError:
        return None  # missing or unusable: `write_description` reports it
    same = (there.tokenizer, there.corpus, there.max_seq_len) == (tokenizer, corpus, max_seq_len)
    same &= [(plan.first_document, plan.stop_document) for plan in there.shards] == ranges
    return there.shards if same else None


def check_same_ids(
    documents: Documents, tokenizer_dir: Path, teacher_dir: Path, encoder: Encoder
) -> None:
    """Check that a teacher's tokenizer gives each document the ids that the student's gives.

    The tokenizer of a GGUF file is rebuilt from a vocabulary and the name of a way to cut text, so
    it has another digest than the publisher's, and a wrong name would give other tokens.
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
            ReadDocuments(documents, encoder).iter_tokens(0, count),
            ReadDocuments(documents, teachers).iter_tokens(0, count),
            strict=True,
        )
        for (number, ours, _), (_, theirs, _) in pairs:
            if ours != theirs:
                place, here, there = _first_difference(ours, theirs)
                raise RefusedError(
                    f"{documents.describe_location(number)}: token {place} is"
                    f" {_describe_token(encoder, here)} by {tokenizer_dir} and"
                    f" {_describe_token(teachers, there)} by the teacher {teacher_dir},"
                    " so their tokenizers differ; use the GGUF file's own, or one that `trainer"
                    " distill trim-tokenizer` makes of it"
                )


def _first_difference(ours: Ids, theirs: Ids) -> tuple[int, int | None, int | None]:
    """Return the first place, from 1, at which lists of ids differ, and both ids."""
    pairs = enumerate(zip_longest(ours, theirs), start=1)
    return next((place, here, there) for place, (here, there) in pairs if here != there)


def _describe_token(encoder: Encoder, token: int | None) -> str:
    return "nothing" if token is None else f"{encoder.tokenizer.id_to_token(token)!r} ({token})"
