"""Samples become token ids, with the `tokenizers` library alone: no torch, no transformers."""

from __future__ import annotations

import json
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
    """The samples of a file in its order; each becomes token ids when it is first asked for.

    So a worker is ready when the file is read and checked: a shard is encoded in a millisecond or
    two, a whole file in seconds to minutes.

    Args:
        known: how many tokens the model has embeddings for; None where nobody knows.
    """

    def __init__(
        self, file: SampleFile, encoder: Encoder, max_seq_len: int, known: int | None
    ) -> None:
        self._path = file.path
        self._encoder = encoder
        self._max_seq_len = max_seq_len
        self._known = known
        self._rows: list[Sample | Encoded] = list(file.samples)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = self._rows[index]
        if isinstance(row, Sample):
            row = self._rows[index] = self._encode(row)
        return row

    def _encode(self, sample: Sample) -> Encoded:
        """Encode one sample, cut to its first `max_seq_len` tokens.

        Raises:
            InputError: it has no token, or one that the model has no embedding for.
        """
        if sample.messages:
            ids, labels = self._encoder.conversation(sample)
        else:
            (ids,) = self._encoder.texts([sample])
            end = self._encoder.end
            if sample.label is None and end is not None and ids and ids[-1] != end:
                ids = [*ids, end]
            labels = ids
        if not ids:
            raise InputError(f"{self._path}:{sample.line}: the tokenizer leaves no token of it")
        input_ids = np.array(ids[: self._max_seq_len], dtype=np.int32)
        if self._known is not None and (largest := int(input_ids.max())) >= self._known:
            # A device may not notice it.
            raise InputError(
                f"{self._path}:{sample.line}: the tokenizer makes token {largest} of it, the model"
                f" knows {self._known}; take the tokenizer that the model was trained with"
            )
        input_ids.flags.writeable = False
        if sample.label is not None:
            return Encoded(input_ids, sample.label)
        targets = np.array(labels[: self._max_seq_len], dtype=np.int32)
        targets[0] = IGNORED
        targets.flags.writeable = False
        return Encoded(input_ids, targets)


def load_dataset(
    path: Path, tokenizer_dir: Path, task: Task, num_classes: int | None, max_seq_len: int
) -> Dataset:
    """Read and check a whole data file.

    Samples are cut to their first `max_seq_len` tokens. A `causal-lm` text ends with the
    tokenizer's end-of-text token when it has one; a conversation is laid out by `chat.py`.

    Raises:
        DataError: lines are bad; every one is counted and the first ones are named.
        InputError: the file or the tokenizer cannot be used.
    """
    assert max_seq_len > 0
    file, encoder = read_file(path, task, num_classes), Encoder(tokenizer_dir)
    known = _known(tokenizer_dir)
    dataset = Dataset(file, encoder, max_seq_len, known)
    if known is not None and encoder.largest >= known:
        for index in range(len(dataset)):  # now, not in the middle of a run
            dataset[index]
    rows = (dataset[index] for index in range(len(dataset)))
    if task == "causal-lm" and not any(np.any(row.labels != IGNORED) for row in rows):
        raise InputError(
            f"{path}: no token is left to learn from within max_seq_len {max_seq_len}, raise it"
        )
    return dataset


def _known(model_dir: Path) -> int | None:
    """Return how many tokens a model has embeddings for; None when it does not say."""
    if not (model_dir / "config.json").is_file():
        return None
    known = read_config(model_dir).get("vocab_size")
    return known if isinstance(known, int) else None


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

    @property
    def largest(self) -> int:
        """The largest id that a text can become."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

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
