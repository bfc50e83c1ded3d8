"""The description of a folder of logits, fixed before anything is scored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self

from blake3 import blake3
from pydantic import TypeAdapter

from trainer.config.data import TEMPLATE_DATE
from trainer.distill.logits.scores import Scheme
from trainer.system.untrusted_data import validate_data, validate_json

SCHEMA = "motley.logits/1"

Values = Literal["float16", "float32"]

MOST_ENTRIES = 2**31 - 1
"""Scores that a shard can hold: Arrow counts those of a column in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class TeacherInfo:
    """The model that scores."""

    name: str
    """For people; not compared, since its path differs between hosts."""
    digest: str
    engine: str
    """The program that computes, see `distill.teacher.engines`."""
    quantization: str
    """Quantization of its weights, such as `nf4`; `none` for those of the model."""
    dtype: str
    """Type of the forward: `bfloat16` and `float32` give different scores."""
    vocab_size: int
    """Rows of its output layer, padding included."""
    tokenizer_size: int
    """Tokens of its tokenizer."""
    kl: float | None = None
    """KL(transformers || engine) in nats a position, of the teacher that described the folder; None
    for the engine that needs no admission. Of weights in NF4 both have them. Not compared:
    processors round differently."""


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The student's tokenizer, whose ids the shards hold."""

    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """The scored texts."""

    digest: str
    documents: int
    date: str = TEMPLATE_DATE
    """Date of their chat template, which may write it: see `data.date`."""


def shard_name(number: int) -> str:
    """Return the name of a shard's folder."""
    return f"shard-{number:05d}"


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A range of documents, with its number of windows and tokens."""

    number: int
    first_document: int
    stop_document: int
    windows: int
    tokens: int

    @property
    def name(self) -> str:
        """The shard's folder."""
        return shard_name(self.number)


class Described:
    """The contents of a complete folder of shards, a dataclass; dataset.json holds it.

    Raises:
        ValueError: the shards do not cover the corpus, each document once and in order.
    """

    schema: ClassVar[str]
    lines: ClassVar[bool] = False
    """Whether a text of it may have line ends and control characters."""
    corpus: CorpusInfo
    shards: tuple[ShardPlan, ...]

    def __post_init__(self) -> None:
        document = 0
        for number, shard in enumerate(self.shards):
            if (shard.number, shard.first_document) != (number, document):
                raise ValueError(f"shard {number} does not begin at document {document}")
            document = shard.stop_document
        if document != self.corpus.documents:
            raise ValueError(f"the shards end at document {document} of {self.corpus.documents}")

    def to_json(self) -> str:
        """Return the text of dataset.json."""
        return json.dumps({"schema": self.schema, **self.to_tree()}, indent=1) + "\n"

    def to_tree(self) -> dict[str, Any]:
        """Return every field as JSON has it."""
        return _type_adapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: names what is wrong.
        """
        tree = validate_json(dict[str, Any], text, "description", lines=cls.lines, least=0)
        schema = tree.pop("schema", None)
        if schema != cls.schema:
            raise ValueError(f"schema is {schema!r}, this version reads {cls.schema!r}")
        return validate_data(cls, tree, "description", lines=cls.lines)

    @property
    def digest(self) -> str:
        """BLAKE3 of everything that a reader depends on."""
        return blake3(self.to_json().encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Description(Described):
    """The contents of a complete folder of logits."""

    schema = SCHEMA

    teacher: TeacherInfo
    tokenizer: TokenizerInfo
    corpus: CorpusInfo
    scheme: Scheme
    values: Values
    """The stored form of probabilities."""
    max_seq_len: int
    """Tokens of the longest window."""
    seed: int
    """Seed of the draws."""
    shards: tuple[ShardPlan, ...]

    @property
    def windows(self) -> int:
        """Windows of all shards."""
        return sum(shard.windows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def __str__(self) -> str:
        windows, tokens, documents = self.windows, self.tokens, self.corpus.documents
        return (
            f"{tokens:,} tokens of {documents:,} documents in {windows:,} windows of at most"
            f" {self.max_seq_len:,}"
        )


@cache
def _type_adapter(kind: type[Described]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


_NOT_COMPARED = {("teacher", "name"), ("teacher", "kl")}


def find_difference(there: Described, here: Described) -> tuple[str, Any, Any] | None:
    """Return the first field that differs, and both values; None if all are equal."""
    left, right = (each.to_tree() for each in (there, here))
    for section, value in left.items():
        if section == "shards":
            if value != right[section]:
                return "the split into shards", f"{len(value)} shards", f"{len(right[section])}"
        elif not isinstance(value, dict):
            if value != right[section]:
                return section, value, right[section]
        else:
            for key, inner in value.items():
                if (section, key) not in _NOT_COMPARED and inner != right[section][key]:
                    return f"{section}.{key}", inner, right[section][key]
    return None
