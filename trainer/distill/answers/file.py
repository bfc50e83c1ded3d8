"""Answers as a Parquet file, which is data of the shapes {messages} and {prompt, completion}.

A row is an answer. One without text would be a bad line of data, so it is no row: the file's
metadata names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.parquet_pages import check_plain_pages
from trainer.data.shards import ANSWERS_SCHEMA
from trainer.data.turns import ChatMessage
from trainer.distill.answers.answer import Answer
from trainer.distill.logits.description import ShardPlan
from trainer.distill.logits.shard import LEVEL, most_unpacked
from trainer.system.untrusted_data import validate_json

_TURN = pa.struct([("role", pa.string()), ("content", pa.string()), ("weight", pa.int8())])
_FIELDS = {
    "prompt": pa.string(),
    "completion": pa.string(),
    "messages": pa.list_(_TURN),
    "document": pa.int64(),
    "sample": pa.int32(),
    "prompt_length": pa.int32(),
    "tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "ended": pa.bool_(),
}


def encode_answers(dataset: str, plan: ShardPlan, answers: Sequence[Answer]) -> memoryview:
    """Return the file of a shard.

    Args:
        dataset: the digest of the folder's description.
    """
    blank = [_to_blank(answer) for answer in answers if answer.blank]
    metadata = {
        "motley.schema": ANSWERS_SCHEMA,
        "motley.dataset": dataset,
        "motley.shard": json.dumps(asdict(plan)),
        "motley.empty": json.dumps(blank),
    }
    rows = [_to_row(answer) for answer in answers if not answer.blank]
    schema = pa.schema(list(_FIELDS.items()), metadata=metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_pylist(rows, schema),
        sink,
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=False,  # its reader bounds the memory by what pages have
    )
    return memoryview(sink.getvalue())


@dataclass(frozen=True)
class _BlankAnswer:
    """An answer without text, as the metadata has it."""

    document: int
    sample: int
    prompt_length: int
    tokens: list[int]
    logprobs: list[float]
    ended: bool


def decode_answers(dataset: str, plan: ShardPlan, content: bytes) -> list[Answer]:
    """Return the answers of a shard's file.

    Raises:
        ValueError: it is not Parquet, not this shard of this folder, or its values do not fit each
            other; names the answer.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        metadata = file.schema_arrow.metadata or {}
        if not file.schema_arrow.equals(pa.schema(list(_FIELDS.items()))):
            raise ValueError("its columns are not those of answers")
        wanted = {"motley.dataset": dataset, "motley.shard": json.dumps(asdict(plan))}
        for key, value in wanted.items():
            if (there := metadata.get(key.encode())) != value.encode():
                raise ValueError(f"{key} is {there!r}, not {value!r}")
        check_plain_pages(BytesIO(content), file.metadata, most_unpacked(content))
        rows = file.read(use_threads=False).to_pylist()  # see `logits.shard.decode_windows`
    except pa.ArrowException as error:
        raise ValueError(f"not usable Parquet: {error}") from None
    try:
        blank = validate_json(list[_BlankAnswer], metadata[b"motley.empty"], "motley.empty")
        rows += [{"prompt": "", "completion": "", **vars(each)} for each in blank]
        answers = [_from_row(row) for row in rows]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a damaged answer: {error}") from None
    for answer in answers:
        if (
            not 0
            < answer.prompt_length
            < len(answer.tokens)
            == answer.prompt_length + len(answer.logprobs)
        ):
            raise ValueError(
                f"answer {answer.sample} to prompt {answer.document}: its tokens and"
                " their scores differ in number"
            )
    return sorted(answers, key=lambda answer: (answer.document, answer.sample))


def _to_row(answer: Answer) -> dict[str, Any]:
    row = _to_blank(answer)
    if isinstance(answer.prompt, str):
        return {**row, "prompt": answer.prompt, "completion": answer.text}
    turns = [_to_context(message) for message in answer.prompt]
    return {**row, "messages": [*turns, {"role": "assistant", "content": answer.text}]}


def _to_context(message: ChatMessage) -> dict[str, Any]:
    """Return a turn of a prompt: context, of which nothing is learned."""
    weight = {"weight": 0} if message.role == "assistant" else {}
    return {"role": message.role, "content": message.content, **weight}


def _to_blank(answer: Answer) -> dict[str, Any]:
    """Return what is kept of an answer beside its text."""
    return {
        "document": answer.document,
        "sample": answer.sample,
        "prompt_length": answer.prompt_length,
        "tokens": answer.tokens.tolist(),
        "logprobs": answer.logprobs.tolist(),
        "ended": answer.ended,
    }


def _from_row(row: dict[str, Any]) -> Answer:
    prompt, text = row["prompt"], row["completion"]
    if prompt is None:
        *asked, last = row["messages"]
        prompt = tuple(ChatMessage(turn["role"], turn["content"]) for turn in asked)
        text = last["content"]
    return Answer(
        document=row["document"],
        sample=row["sample"],
        prompt=prompt,
        text=text,
        tokens=np.array(row["tokens"], np.int32),
        prompt_length=row["prompt_length"],
        logprobs=np.array(row["logprobs"], np.float32),
        ended=row["ended"],
    )
