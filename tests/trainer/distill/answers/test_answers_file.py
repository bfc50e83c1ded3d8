"""The Parquet file of a shard of answers: what is read is bounded by what the file has."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.turns import ChatMessage
from trainer.distill.answers.answer import Answer
from trainer.distill.answers.file import decode_answers, encode_answers
from trainer.distill.logits.description import ShardPlan

PLAN = ShardPlan(number=0, first_document=0, stop_document=1, windows=4, tokens=100)


def answer(sample: int, prompt: Any = "a question", text: str = "an answer") -> Answer:
    return Answer(
        document=0,
        sample=sample,
        prompt=prompt,
        text=text,
        tokens=np.array([1, 2, 3], np.int32),
        prompt_length=1,
        logprobs=np.array([-0.5, -0.25], np.float32),
        ended=True,
    )


def rewritten(rows: int = 1, **columns: Any) -> bytes:
    """Return a shard's file with other columns, as pyarrow writes it by itself."""
    told = {"motley.dataset": "abc", "motley.shard": json.dumps(asdict(PLAN)), "motley.empty": "[]"}
    schema = pq.ParquetFile(pa.BufferReader(encode_answers("abc", PLAN, [answer(0)]))).schema_arrow
    row = pq.read_table(pa.BufferReader(encode_answers("abc", PLAN, [answer(0)]))).to_pylist()[0]
    tree = {name: columns.get(name, [row[name]] * rows) for name in schema.names}
    table = pa.table(tree, schema=schema.with_metadata(told))
    sink = pa.BufferOutputStream()
    options = {"use_dictionary": False} | columns.get("options", {})
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue().to_pybytes()


def test_answers_come_back() -> None:
    turns = (ChatMessage("user", "q"), ChatMessage("assistant", "a"), ChatMessage("user", "r"))
    written = [answer(0), answer(1, turns), answer(2, text="")]
    content = bytes(encode_answers("abc", PLAN, written))
    found = decode_answers("abc", PLAN, content)
    assert [each.sample for each in found] == [0, 1, 2]
    assert [each.text for each in found] == ["an answer", "an answer", ""]
    assert found[1].prompt == turns
    assert decode_answers("abc", PLAN, rewritten())[0].text == "an answer"


BOMBS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": [np.zeros(5_000_000, np.int32)]},
    "lists without values": {"messages": [[None] * 1_000_000], "prompt": [None]},
    "a text": {"prompt": ["x" * (20 << 20)]},
    "rows": {"rows": 300_000},
    "a dictionary": {
        "prompt": ["x" * (4 << 20)] * 8,
        "rows": 8,
        "options": {"use_dictionary": True},
    },
    "shared beginnings": {
        "prompt": ["x" * (4 << 20)] * 8,
        "rows": 8,
        "options": {"column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}},
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_large_answers_is_not_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = rewritten(**BOMBS[name])
    assert len(content) < 300_000
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(ValueError, match=r"unpacks to more than|is not written plainly"):
        decode_answers("abc", PLAN, content)


def test_a_damaged_page_is_named() -> None:
    content = bytearray(encode_answers("abc", PLAN, [answer(0)]))
    content[4:12] = b"\xff" * 8  # the first page's header
    with pytest.raises(ValueError, match="a page's header is damaged"):
        decode_answers("abc", PLAN, bytes(content))
