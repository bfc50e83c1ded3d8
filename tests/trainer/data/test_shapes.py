"""Lines as data sets are published: every key of them is used, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.data.records import DataError
from trainer.data.samples import read_file
from trainer.data.shapes import ANSWERS, PREFERENCE, SHAPES, Sample, Shape, parse_sample
from trainer.data.values import BadLineError

REPOSITORY = Path(__file__).parents[3]


def parse(**tree: Any) -> Sample:
    return parse_sample(json.loads(json.dumps(tree)), 1)


def said(sample: Sample) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in sample.messages]


def turn(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def function(name: str = "clock", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def called(arguments: Any, name: str | None = "clock") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASK = turn("user", "q")
ANSWER = turn("assistant", "a")
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
QUESTION = [("user", "q"), ("assistant", "a")]
DOLLY = {"instruction": "q", "context": "", "response": "a", "category": "open_qa"}
SEED = {"id": "s", "name": "n", "instruction": "q", "is_classification": False}


@pytest.mark.parametrize(
    ("tree", "turns"),
    [
        ({"messages": [ASK, ANSWER], "system": "s"}, [("system", "s"), *QUESTION]),
        ({"messages": [ASK, ANSWER], "system": " "}, QUESTION),
        (
            {"messages": [turn("system", "s"), ASK, ANSWER], "system": "s"},
            [("system", "s"), *QUESTION],
        ),
        ({"messages": [turn("developer", "s"), ASK, ANSWER]}, [("system", "s"), *QUESTION]),
        ({"conversations": SHAREGPT, "system": "s"}, [("system", "s"), *QUESTION]),
        ({"conversations": [ASK, ANSWER]}, QUESTION),  # ShareGPT's key with the usual turns
        ({"prompt": "alone says nothing", "messages": [ASK, ANSWER]}, QUESTION),
        ({"instruction": "q", "input": "", "output": "a", "text": "q a"}, QUESTION),
        ({"instruction": "q", "input": None, "output": "a", "history": None}, QUESTION),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["1", "2"], ["3", "4"]]},
            [("system", "s"), *zip(["user", "assistant"] * 2, "1234", strict=True), *QUESTION],
        ),
        (DOLLY, QUESTION),
        ({**DOLLY, "context": "c"}, [("user", "q\n\nc"), ("assistant", "a")]),
        ({**SEED, "instances": [{"input": "", "output": "a"}]}, QUESTION),
        (
            {**SEED, "instances": [{"input": "i", "output": "a"}]},
            [("user", "q\n\ni"), ("assistant", "a")],
        ),
        ({"prompt": [ASK], "completion": [ANSWER]}, QUESTION),
        ({"messages": [ASK, ANSWER], "conversations": None, "text": None}, QUESTION),
        (
            {"messages": [turn("user", [{"type": "text", "text": "q"}]), turn("assistant", ["a"])]},
            QUESTION,
        ),
        (
            {"messages": [turn("user", [{"type": "text", "text": t} for t in "ab"]), ANSWER]},
            [("user", "ab"), ("assistant", "a")],
        ),
    ],
)
def test_published_lines_become_conversations(tree: dict[str, Any], turns: list[Any]) -> None:
    assert said(parse(**tree)) == turns


@pytest.mark.parametrize(
    ("key", "given", "tools"),
    [
        ("messages", {"tools": [called({})]}, (called({}),)),
        ("messages", {"tools": json.dumps([function()])}, (function(),)),
        ("messages", {"functions": [function()]}, ({"type": "function", "function": function()},)),
        ("messages", {"tools": None, "functions": []}, ()),
        ("messages", {"tools": ""}, ()),
        (
            "conversations",
            {"tools": json.dumps([function()])},
            ({"type": "function", "function": function()},),
        ),
        ("conversations", {"tools": [called({})]}, (called({}),)),
        ("instruction", {"tools": [function()]}, ({"type": "function", "function": function()},)),
    ],
)
def test_tools_beside_turns_reach_the_template(
    key: str, given: dict[str, Any], tools: tuple[Any, ...]
) -> None:
    rows = {
        "messages": {"messages": [ASK, ANSWER]},
        "conversations": {"conversations": SHAREGPT},
        "instruction": {"instruction": "q", "output": "a"},
    }
    assert parse(**rows[key], **given).tools == tools


@pytest.mark.parametrize(
    "turns",
    [
        [ASK, turn("assistant", None, function_call=function(arguments='{"a": "\\u00fc"}'))],
        [ASK, turn("assistant", None, tool_calls=[called('{"a": "ü"}')])],
        [ASK, turn("assistant", None, tool_calls=json.dumps([called({"a": "ü"})]))],
        [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(function(arguments={"a": "ü"}))},
        ],
    ],
)
def test_calls_of_all_forms_become_objects(turns: list[dict[str, Any]]) -> None:
    key = "conversations" if "from" in turns[0] else "messages"
    _, spoken = parse(**{key: turns}).messages
    assert spoken.more == {"tool_calls": [called({"a": "ü"})]}
    assert spoken.content == ""
    assert spoken.absent == (key == "messages"), "null is a missing key, LLaMA-Factory's is empty"


def test_an_empty_text_stays_and_null_is_a_missing_key() -> None:
    calls = {"tool_calls": [called("")]}
    empty, null = (
        parse(messages=[ASK, turn("assistant", content, **calls)]).messages[1]
        for content in ("", None)
    )
    assert (empty.content, empty.absent, null.content, null.absent) == ("", False, "", True)
    assert empty.more == {"tool_calls": [called({})]}, "no arguments are an empty object"


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}]
)
def test_a_turn_without_weight_is_context(flag: dict[str, Any]) -> None:
    asked, first, again, last = parse(
        messages=[ASK | flag, ANSWER | flag, ASK, ANSWER | {"weight": 1}]
    ).messages
    assert [t.target for t in (asked, first, again, last)] == [False, False, False, True]
    assert not first.more, "the flag is no text of a template"
    alike = parse(messages=[ASK, ANSWER, ASK, ANSWER])
    assert alike.digest() != parse(messages=[ASK, ANSWER | flag, ASK, ANSWER]).digest()


def test_of_turns_as_a_prompt_only_the_completion_is_learned() -> None:
    sample = parse(prompt=[ASK, ANSWER, ASK], completion=[ANSWER])
    assert [message.target for message in sample.messages] == [False, False, False, True]
    assert parse(prompt="", completion="4") == Sample("4", line=1)


GLAIVE = {
    "system": "SYSTEM: You may call these. Use them if required -\n"
    '{\n  "name": "rate",\n  "parameters": {}\n}\n\n{"name": "clock"}\n',
    "chat": "USER: 500 dollars in euros?\n\n\nASSISTANT: One moment. <functioncall> "
    """{"name": "rate", "arguments": '{"from": "USD"}'} <|endoftext|>\n\n\n"""
    'FUNCTION RESPONSE: {"rate": 0.9}\n\n\nASSISTANT: 450.\nASK: no\n <|endoftext|>\n\n\n',
}


def test_glaive_calls_are_calls_and_its_functions_tools() -> None:
    sample = parse(**GLAIVE)
    assert said(sample) == [
        ("system", "You may call these. Use them if required -"),
        ("user", "500 dollars in euros?"),
        ("assistant", "One moment."),
        ("tool", '{"rate": 0.9}'),
        ("assistant", "450.\nASK: no"),
    ]
    assert sample.messages[2].more == {"tool_calls": [called({"from": "USD"}, "rate")]}
    assert [tool["function"]["name"] for tool in sample.tools] == ["rate", "clock"]
    plain = parse(system="SYSTEM: No {braces} here.", chat="USER: q\nASSISTANT: a")
    assert said(plain) == [("system", "No {braces} here."), *QUESTION]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"messages": [ASK, ANSWER | {"weight": 0}]}, "only turns of weight 0"),
        ({"messages": [ASK, ANSWER | {"weight": 0.5}]}, "'weight' must be 0 or 1, got 0.5"),
        ({"messages": [ASK, ANSWER | {"train": "no"}]}, "'train' must be true or false"),
        ({"messages": [ASK | {"weight": 1}, ANSWER]}, "requests to learn a turn of user"),
        ({"messages": [ASK, ANSWER], "tools": [1]}, "'tools' must be a list of objects"),
        ({"messages": [ASK, ANSWER], "tools": "x"}, "'tools' is a string that is not JSON"),
        (
            {"messages": [ASK, ANSWER], "tools": [function()], "functions": [function()]},
            "has both 'tools' and 'functions'",
        ),
        (
            {"messages": [turn("system", "t"), ASK, ANSWER], "system": "s"},
            "has two system texts",
        ),
        (
            {"messages": [ASK, turn("assistant", "", tool_calls=[called("{a")])]},
            "'messages[1]': a call's 'arguments' are text that is not JSON: '{a'",
        ),
        (
            {
                "messages": [
                    ASK,
                    turn("assistant", "", function_call=function(), tool_calls=[called({})]),
                ]
            },
            "has both 'function_call' and 'tool_calls'",
        ),
        ({"messages": [ASK, turn("assistant", "a", function_call="auto")]}, "must be an object"),
        ({"messages": [ASK, turn("assistant", "", tool_calls=[{"function": 3}])]}, "a 'name'"),
        ({"messages": [ASK, turn("assistant", "", tool_calls=[called({}, None)])]}, "a 'name'"),
        (
            {"messages": [ASK, turn("assistant", "", tool_calls=[called({"a": ["\ud800"]})])]},
            "a key of the turn contains a lone surrogate",
        ),
        ({"messages": [ASK, ANSWER], "tools": [{"function": "f"}]}, "'function' that is not an "),
        ({"messages": [ASK, ANSWER], "tools": [function("\ud800")]}, "'tools' contains a lone"),
        ({"messages": [ASK, turn("assistant", "a", reasoning_content=["b"])]}, "must be a string"),
        (
            {"messages": [turn("user", [{"type": "image_url", "image_url": {}}]), ANSWER]},
            "a part of its content is 'image_url', only text is learned",
        ),
        ({"messages": [turn("user", [3]), ANSWER]}, "a part of its content must be an object"),
        ({"messages": [turn("user", [{"type": "text"}]), ANSWER]}, "lacks the key 'text'"),
        (
            {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "clock()"}]},
            "must be JSON of a call",
        ),
        ({"instruction": "q", "output": "a", "history": [["1"]]}, "must be a list of pairs"),
        ({"instruction": "q", "output": "a", "history": "1"}, "must be a list of pairs"),
        (
            {"instruction": "q", "output": "a", "history": [["1", 2]]},
            "'history' answer' must be a string",
        ),
        ({**SEED, "instances": [{"output": "a"}] * 2}, "has 2 examples, a line is one"),
        ({"chat": "Hello. USER: q"}, "must begin with 'USER: '"),
        ({"chat": "USER: q\nASSISTANT: <functioncall> clock()"}, "a call that cannot be read"),
        ({"chat": "USER: q"}, "no assistant turn"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadLineError) as caught:
        parse(**tree)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


EXAMPLES: dict[tuple[str, ...], dict[str, Any]] = {
    ("messages",): {"messages": [ASK, ANSWER]},
    ("conversations",): {"conversations": SHAREGPT},
    ("prompt", "completion"): {"prompt": [ASK], "completion": [ANSWER]},
    ("chosen", "rejected"): {
        "prompt": [ASK],
        "chosen": [ANSWER],
        "rejected": [turn("assistant", "no")],
    },
}
WITH_TURNS = [(shape, key) for shape in (*SHAPES, PREFERENCE) for key in shape.turns]


def example(shape: Shape, key: str) -> dict[str, Any]:
    """Return a line of a shape with turns in a key."""
    tree = EXAMPLES[shape.keys]
    if key in tree:
        return tree
    asked = {"conversations": SHAREGPT[:1], "messages": [ASK]}[key]
    return {name: each for name, each in tree.items() if name != "prompt"} | {key: asked}


def read_as(shape: Shape, tree: dict[str, Any]) -> Sample:
    return parse_sample(tree, 1, pairs=shape is PREFERENCE)


@pytest.mark.parametrize(("shape", "key"), WITH_TURNS)
@pytest.mark.parametrize("indent", [None, 1])
def test_turns_in_a_text_are_read_as_turns(shape: Shape, key: str, indent: int | None) -> None:
    tree = example(shape, key)
    text = json.dumps(tree[key], indent=indent)
    assert read_as(shape, tree | {key: text}) == read_as(shape, tree)


@pytest.mark.parametrize(("shape", "key"), WITH_TURNS)
@pytest.mark.parametrize("what", ["python", "numpy", "cut"])
def test_a_text_that_begins_like_turns_is_never_learned(shape: Shape, key: str, what: str) -> None:
    tree = example(shape, key)
    texts = {
        "python": repr(tree[key]),
        "numpy": repr(tree[key] * 2).replace("}, {", "}\n {"),
        "cut": json.dumps(tree[key])[:-3],
    }
    with pytest.raises(BadLineError, match=f"'{key}' is a string that is not JSON"):
        read_as(shape, tree | {key: texts[what]})


@pytest.mark.parametrize(
    "text",
    [
        *("[1, 2]", "[INST] q [/INST]", "[]", '{"city": "Bonn"}', '{"value": 3}', "{'role'"),
        *('[{"name": "clock", "arguments": {}}]', '{"role": "mayor", "name": "x"}'),
    ],
)
def test_json_that_is_no_turns_is_text(text: str) -> None:
    assert parse(prompt="q", completion=text).text == text
    assert parse(prompt=text, completion="a").prompt == text


def test_a_history_in_a_cell_is_json() -> None:
    row = {"instruction": "q", "output": "a"}
    rounds = [["1", "2"]]
    assert parse(**row, history=json.dumps(rounds)) == parse(**row, history=rounds)
    assert parse(**row, history="") == parse(**row)
    with pytest.raises(BadLineError, match="'history' is a string that is not JSON"):
        parse(**row, history="[['1', '2']]")


@pytest.mark.parametrize("key", sorted(ANSWERS | {"answer", "target", "summary"}))
def test_an_input_beside_an_answer_is_not_learned_alone(key: str) -> None:
    with pytest.raises(BadLineError, match=key):
        parse(input="q", **{key: "a"})


def test_keys_that_are_in_no_table_are_counted(tmp_path: Path) -> None:
    line = {"messages": [ASK, ANSWER | {"mood": "good"}], "lable": 1, "id": 7}
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(line) + "\n") * 3)
    assert read_file(path, "causal-lm").unused == [
        "keys of a data line that are not used: 'lable' (3 times)",
        "keys of a turn that only some chat templates use: 'mood' (3 times)",
    ]


def test_the_first_line_is_not_alone_in_being_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "x", "images": ["y"]}))
    with pytest.raises(DataError, match=r"a\.jsonl:2: 'images' is not text"):
        read_file(path, "causal-lm")


def test_every_shape_is_documented_with_its_keys() -> None:
    documented = (REPOSITORY / "docs/config.md").read_text()
    rows = [row for row in documented.splitlines() if row.startswith("| `")]
    for shape in SHAPES:
        keys = ", ".join(f"`{key}`" for key in shape.keys)
        optional = ", ".join(f"`{key}`" for key in shape.optional)
        row = f"| {keys} | {optional} | {shape.learned} |"
        assert row in rows, row
