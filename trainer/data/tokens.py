"""Samples become token ids, with the `tokenizers` library alone: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.config import Task
from trainer.data.chat import chat_format, pieces
from trainer.data.samples import Sample, SampleFile, read_file
from trainer.errors import InputError
from trainer.headers import read_config
from trainer.soft_targets import SoftTargets

IGNORED = -100
"""Marks a token that no loss is taken on, as in torch's cross-entropy."""
_CHUNK = 2048  # samples tokenised at once: bounds the memory of the library's own encodings


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One sample as a replica reads it."""

    input_ids: NDArray[np.int32]
    """`[T]`, at least one token."""
    labels: int | NDArray[np.int32]
    """The class, or `[T]` unshifted targets: `labels[t]` is `input_ids[t]`, predicted from what
    stands before it, or `IGNORED`. `labels[0]` is always ignored, so the valid ones count."""
    soft: SoftTargets | None = None
    """What a teacher expected in the place of each token, beside `labels`."""


class Dataset:
    """Encoded samples in the file's order, packed into flat arrays."""

    def __init__(self, path: Path, digest: str, encoded: Iterator[tuple[Encoded, bool]]) -> None:
        self.path = path
        self.digest = digest
        """BLAKE3 hex of the file's bytes: members of a run compare it."""
        self.truncated = 0
        """Samples that were cut at `max_seq_len`."""
        bounds = [0]
        tokens: list[NDArray[np.int32]] = []
        labels: list[int | NDArray[np.int32]] = []
        for sample, cut in encoded:
            bounds.append(bounds[-1] + len(sample.input_ids))
            tokens.append(sample.input_ids)
            labels.append(sample.labels)
            self.truncated += cut
        self._bounds = bounds
        self._tokens = np.concatenate(tokens)
        if isinstance(labels[0], int):
            self._labels = np.array(labels, dtype=np.int32)
            self._classes = True
        else:
            self._labels = np.concatenate([np.atleast_1d(row) for row in labels])
            self._classes = False
        self._tokens.flags.writeable = self._labels.flags.writeable = False

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        span = slice(self._bounds[index], self._bounds[index + 1])
        labels = int(self._labels[index]) if self._classes else self._labels[span]
        return Encoded(self._tokens[span], labels)

    @property
    def tokens(self) -> int:
        """Tokens of all samples together."""
        return self._bounds[-1]


def load_dataset(
    path: Path, tokenizer_dir: Path, task: Task, num_classes: int | None, max_seq_len: int
) -> Dataset:
    """Read, check and tokenise a whole data file.

    Samples are cut to their first `max_seq_len` tokens. A `causal-lm` text ends with the
    tokenizer's end-of-text token when it has one; a conversation is laid out by `chat.py`.

    Raises:
        DataError: lines are bad; every one is counted and the first ones are named.
        InputError: the file or the tokenizer cannot be used.
    """
    assert max_seq_len > 0
    file = read_file(path, task, num_classes)
    dataset = Dataset(path, file.digest, _encode(file, Encoder(tokenizer_dir), max_seq_len))
    _check_known(dataset, tokenizer_dir)
    if task == "causal-lm" and not np.any(dataset._labels != IGNORED):
        raise InputError(
            f"{path}: no token is left to learn from within max_seq_len {max_seq_len}, raise it"
        )
    return dataset


def _check_known(dataset: Dataset, model_dir: Path) -> None:
    """Refuse tokens that the model has no embedding for; a device may not notice them."""
    if not (model_dir / "config.json").is_file():
        return
    known = read_config(model_dir).get("vocab_size")
    largest = int(dataset._tokens.max())
    if isinstance(known, int) and largest >= known:
        raise InputError(
            f"{model_dir}: the tokenizer makes token {largest} of {dataset.path}, the model knows"
            f" {known}; take the tokenizer that the model was trained with"
        )


def load_tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """Return the tokenizer of a model folder, with its own truncation and padding off.

    Raises:
        InputError: `tokenizer.json` is missing or damaged.
    """
    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{path}: no such file; a model folder needs a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a usable tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_token(tokenizer_dir: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of the token that tokenizer_config.json gives a name, None without one."""
    path = tokenizer_dir / "tokenizer_config.json"
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    token = settings.get(name) if isinstance(settings, dict) else None
    if isinstance(token, dict):  # older files spell a token as an object
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


class Encoder:
    """A tokenizer with the few ids that laying out a sample needs."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self.tokenizer = load_tokenizer(tokenizer_dir)
        self.end = special_token(tokenizer_dir, self.tokenizer, "eos_token")
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.format = chat_format(frozenset(token.content for token in added if token.special))
        self.prefix = self.tokenizer.encode("").ids  # what the tokenizer puts first, such as BOS
        if self.end is not None and self.prefix[-1:] == [self.end]:
            self.prefix = self.prefix[:-1]  # some put the end-of-text token last by themselves

    def texts(self, samples: list[Sample]) -> list[list[int]]:
        """Return the ids of each text as `AutoTokenizer` gives them."""
        self.tokenizer.encode_special_tokens = False
        batch = self.tokenizer.encode_batch_fast([sample.text for sample in samples])
        return [encoding.ids for encoding in batch]

    def conversation(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Return ids and labels; a person's text cannot forge markup."""
        ids, labels = list(self.prefix), [IGNORED] * len(self.prefix)
        for piece in pieces(sample.messages, self.format):
            self.tokenizer.encode_special_tokens = not piece.markup
            part = self.tokenizer.encode(piece.text, add_special_tokens=False).ids
            ids += part
            labels += part if piece.target else [IGNORED] * len(part)
        return ids, labels

    def prompt(self, sample: Sample) -> list[int]:
        """Return what a model is to continue: a text, or a conversation without its last answer.

        Of a conversation the markup that begins an answer comes last.
        """
        if not sample.messages:
            (ids,) = self.texts([sample])
            return ids[:-1] if ids and ids[-1] == self.end else ids
        messages = sample.messages
        if messages[-1].role == "assistant":
            messages = messages[:-1]
        ids, _ = self.conversation(replace(sample, messages=messages))
        self.tokenizer.encode_special_tokens = False
        opening = self.format.before.format(role="assistant")
        return ids + self.tokenizer.encode(opening, add_special_tokens=False).ids

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a text or an answer."""
        ends = [self.end]
        if self.format.required:
            ends.append(self.tokenizer.token_to_id(self.format.end))
        return frozenset(token for token in ends if token is not None)


def _encode(file: SampleFile, encoder: Encoder, max_seq_len: int) -> Iterator[tuple[Encoded, bool]]:
    """Yield each sample in order, and whether it was cut."""
    for start in range(0, len(file.samples), _CHUNK):
        chunk = file.samples[start : start + _CHUNK]
        texts = iter(encoder.texts([sample for sample in chunk if not sample.messages]))
        for sample in chunk:
            if sample.messages:
                ids, labels = encoder.conversation(sample)
            else:
                ids = next(texts)
                if not ids:
                    raise InputError(
                        f"{file.path}:{sample.line}: the tokenizer leaves no token of it"
                    )
                if sample.label is None and encoder.end is not None and ids[-1] != encoder.end:
                    ids = [*ids, encoder.end]
                labels = ids
            input_ids = np.array(ids[:max_seq_len], dtype=np.int32)
            if sample.label is not None:
                yield Encoded(input_ids, sample.label), len(ids) > max_seq_len
            else:
                targets = np.array(labels[:max_seq_len], dtype=np.int32)
                targets[0] = IGNORED
                yield Encoded(input_ids, targets), len(ids) > max_seq_len
