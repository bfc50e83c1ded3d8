"""Tools and calls reach the template as their author wrote them, whatever the type of a column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.test_arrow import FORMATS
from trainer.data.samples import read_samples

pa = pytest.importorskip("pyarrow", reason="the launcher-only install has none")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = tool("weather", city={"type": "string", "enum": ["Bonn", None]})
CLOCK = tool("clock", zone={"type": "string"}, utc={"type": "boolean"})
ASK = {"role": "user", "content": "q"}
ROWS = [
    {
        "messages": [
            ASK,
            {"role": "assistant", "tool_calls": [called("weather", city="Bonn", days=[1, None])]},
            {"role": "tool", "name": "weather", "content": ""},
            {"role": "assistant", "content": "fine", "reasoning_content": "sun"},
        ],
        "tools": [WEATHER, CLOCK],
    },
    {
        "messages": [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [called("clock", zone="x", at={})]},
            {"role": "assistant", "content": "", "tool_calls": [called("clock", at={"hour": 1})]},
        ],
        "tools": [CLOCK],
    },
    {"messages": [ASK, {"role": "assistant", "content": "a"}], "tools": None},
]


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_a_table_reads_as_its_json_lines(tmp_path: Path, form: str, key: str) -> None:
    rows = [{"messages": row["messages"], key: row["tools"]} for row in ROWS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a").write_bytes(FORMATS[form](pa.Table.from_pylist(rows)))
    expected = read_samples(tmp_path / "a.jsonl", "causal-lm")
    found = read_samples(tmp_path / "a", "causal-lm")
    assert [each.tools for each in found] == [each.tools for each in expected]
    assert [each.messages for each in found] == [each.messages for each in expected]


def test_nulls_of_a_map_and_of_a_list_are_the_authors(tmp_path: Path) -> None:
    """Arrow fills structs alone."""
    arguments = pa.map_(pa.string(), pa.list_(pa.int64()))
    function = pa.struct({"name": pa.string(), "arguments": arguments})
    turn = {"role": pa.string(), "content": pa.string()}
    turn["tool_calls"] = pa.list_(pa.struct({"function": function}))
    call = {"function": {"name": "f", "arguments": [("a", None), ("b", [1, None])]}}
    row = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    schema = pa.schema({"messages": pa.list_(pa.struct(turn))})
    (tmp_path / "a").write_bytes(FORMATS["parquet"](pa.Table.from_pylist([row], schema=schema)))
    (sample,) = read_samples(tmp_path / "a", "causal-lm")
    (found,) = sample.messages[1].more["tool_calls"]
    assert found["function"]["arguments"] == {"a": None, "b": [1, None]}
