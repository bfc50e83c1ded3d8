import json

import pytest
from blake3 import blake3

from trainer.data import records
from trainer.data.records import DataError
from trainer.data.samples import hash_files, read_samples
from trainer.system.errors import InputError


def write(path, *lines):
    path.write_bytes(b"".join(lines))
    return path


def row(**keys):
    return json.dumps(keys).encode() + b"\n"


def test_a_mark_blank_lines_and_a_missing_last_newline_are_no_matter(tmp_path):
    content = b"\xef\xbb\xbf" + row(input="x", label=0) + b"\r\n" + row(input="y", label=1)[:-1]
    path = write(tmp_path / "a.jsonl", content)
    assert [sample.text for sample in read_samples(path, "classify", 2)] == ["x", "y"]
    assert hash_files([path]).digest() == blake3(content + b"\0").digest()


@pytest.mark.parametrize(
    "keys",
    [
        ["txt"],
        ["instruction"],
        ["instruction", "input"],  # each of these two would train on the input alone
        ["input", "output"],
        ["prompt", "text"],
        ["prompt"],
        ["text", "input"],
        ["text", "instruction", "context", "response"],
        ["input", "target"],
        ["text", "system"],
        ["prompt", "completion", "history"],
        ["prompt", "completion", "text"],
        ["messages", "conversations"],
    ],
)
def test_a_line_of_no_known_shape_or_of_two_is_refused(tmp_path, keys):
    values = {"messages": [{"role": "assistant", "content": "a"}]}
    values["conversations"] = values["messages"]
    tree = {key: values.get(key, "x") for key in keys}
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        read_samples(write(tmp_path / "a.jsonl", row(**tree)), "causal-lm")
    for shape in ("{text}", "{messages}", "{conversations}", "{prompt, completion}"):
        assert shape in str(caught.value)
    assert all(f"'{key}'" in str(caught.value) for key in keys)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{oops\n", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"[1]\n", "expected an object, got a list"),
        (b"null\n", "expected an object, got null"),
        (b'{"input": "x"\n', "not JSON: Expecting ',' delimiter at column 14"),
        (b'  {"input": }\r\n', "not JSON: Expecting value at column 13"),
        (b'{"input": "x\r\n', "Unterminated string starting at column 11"),
        (b'{"input": "x", "label": 0, "input": "y"}', "has the key 'input' twice"),
        (b'{"input": "x", "label": 0, "more": [{"a": 1, "a": 1}]}', "has the key 'a' twice"),
        (b"\xff{}\n", "not valid UTF-8 at byte 1"),
        (b"[" * 100_000 + b"\n", "nested too deep"),
        (b'{"label": ' + b"9" * 5000 + b"}\n", "a number too long"),
        (b'{"input": "\\ud800", "label": 0}\n', "lone surrogate"),
        (row(label=0), "lacks the key 'input'"),
        (row(input="x"), "lacks the key 'label'"),
        (row(input=3, label=0), "'input' must be a string, got an integer"),
        (row(input=" \n", label=0), "'input' is empty"),
        (row(input="x", label="a"), "'label' must be an integer from 0 to 4, got 'a'"),
        (row(input="x", label=True), "'label' must be an integer from 0 to 4, got 'true'"),
        (row(input="x", label=1.5), "'label' must be a word or a whole number, got 1.5"),
        (row(input="x", label=5), "'label' must be from 0 to 4, got 5"),
        (row(input="x", label=-1), "'label' must be from 0 to 4, got -1"),
    ],
)
def test_a_bad_classify_line_is_named(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", row(input="fine", label=0), line)
    with pytest.raises(DataError) as caught:
        read_samples(path, "classify", 5)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({}, "its keys (none) match no known shape"),
        (
            {"body": "x"},
            "('body') match no known shape; rename or remove keys, or name them with data.columns",
        ),
        (
            {"text": "x", "prompt": "y", "completion": "z"},
            "match several shapes; rename or remove",
        ),
        ({"instruction": "x", "output": " "}, "'output' is empty"),
        ({"instruction": "x", "input": 3, "output": "y"}, "'input' must be a string"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": ["x"], "completion": "y"}, "'prompt[0]' must be an object, got a string"),
        ({"conversations": [{"from": "boss", "value": "x"}]}, "got 'boss'"),
        ({"conversations": [{"from": "gpt"}]}, "'conversations[0]': lacks the key 'value'"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "no assistant turn"),
        ({"text": ""}, "'text' is empty"),
        ({"messages": []}, "must be a non-empty list"),
        ({"messages": "hi"}, "is a string that is not JSON"),
        ({"messages": ["hi"]}, "'messages[0]' must be an object"),
        ({"messages": [{"role": "user"}]}, "'messages[0]': lacks the key 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a string, got null"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "got 'boss'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
    ],
)
def test_a_bad_causal_lm_line_is_named(tmp_path, tree, problem):
    path = write(tmp_path / "a.jsonl", row(**tree))
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        read_samples(path, "causal-lm")
    assert problem in str(caught.value)


def test_each_problem_is_named_once_with_how_many_lines_have_it(tmp_path):
    bad = [b"?\n", row(input="x", label=7), b"?\n", b"?\n", b"[1]\n"]
    path = write(tmp_path / "a.jsonl", row(input="x", label=0), *bad)
    with pytest.raises(DataError) as caught:
        read_samples(path, "classify", 2)
    assert str(caught.value).startswith(f"{path}:2: not JSON")
    assert str(caught.value).endswith(f"; the same at {path}:4 and 1 more")
    assert [line.split(": ")[0] for line in caught.value.details] == [f"{path}:3", f"{path}:6"]


def test_ten_problems_are_named_and_further_lines_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", *[b" " * number + b"?\n" for number in range(23)])
    with pytest.raises(DataError) as caught:
        read_samples(path, "classify", 2)
    *named, rest = [str(caught.value), *caught.value.details]
    assert [line.split(": ")[0] for line in named] == [f"{path}:{n}" for n in range(1, 11)]
    assert rest == "and 13 more bad lines"


def test_a_line_above_the_limit_is_named_and_the_next_one_still_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 2 << 20)
    exact = b'{"input": "x", "label": 0}'.ljust(2 << 20) + b"\n"
    content = exact + b" " * (5 << 20) + b"\n" + b"?\n" + b"y" * (3 << 20)
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError) as caught:
        read_samples(path, "classify", 2)
    assert str(caught.value) == f"{path}:2: line is longer than 2 MiB; the same at {path}:4"
    assert caught.value.details == (f"{path}:3: not JSON: Expecting value at column 1",)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(InputError, match="no such data file"):
        read_samples(tmp_path / "none.jsonl", "causal-lm")
    for content in (b"", b"\n \n"):
        with pytest.raises(InputError, match="contains no samples"):
            read_samples(write(tmp_path / "empty.jsonl", content), "causal-lm")
