"""A tokenizer's folder is read as `AutoTokenizer` reads it; what is not used is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.shapes import ChatMessage, Sample
from trainer.data.tokenizer_folder import TokenizerFolder
from trainer.system.errors import InputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "a<|im_start|><think> b<extra> </think>\n  <pad>c<|endoftext|><image> é"


def write(folder: Path, special: Sequence[str], **files: Any) -> Path:
    """Write a tokenizer.json with `special`, and JSON files by their names without `.json`."""
    tokenizer = byte_tokenizer(folder, list(special))
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    for name, tree in files.items():
        (folder / f"{name}.json").write_text(json.dumps(tree))
    return folder


def token(content: str, **properties: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **plain, **properties}


END = "<|endoftext|>"
MAP = {"eos_token": END, "pad_token": token("<pad>")}
FOLDERS: dict[str, dict[str, Any]] = {
    "names in the settings": {"tokenizer_config": {"eos_token": END, "pad_token": "<pad>"}},
    "names as objects": {
        "tokenizer_config": {"eos_token": {**token(END), "__type": "AddedToken"}, "bos_token": None}
    },
    "names in the older map alone": {"special_tokens_map": MAP},
    "both: the map wins": {
        "tokenizer_config": {"eos_token": "<|im_end|>"},
        "special_tokens_map": MAP,
    },
    "both: newer settings win": {
        "tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        "special_tokens_map": MAP,
    },
    "added tokens in their older file": {
        "tokenizer_config": {"eos_token": END},
        "added_tokens": {"<think>": 257, "</think>": 258, "<pad>": 259},
        "special_tokens_map": MAP,
    },
    "added tokens in the settings": {
        "tokenizer_config": {
            "eos_token": END,
            "added_tokens_decoder": {
                "258": token("</think>", special=False),
                "257": token("<think>", special=False, lstrip=True),
            },
        }
    },
    "extra tokens as a list": {
        "tokenizer_config": {"additional_special_tokens": ["<extra>", "<|im_end|>"]}
    },
    "extra tokens of the older map": {
        "special_tokens_map": {"eos_token": END, "extra_special_tokens": [token("<extra>")]}
    },
    "tokens with names of their own": {
        "tokenizer_config": {
            "eos_token": END,
            "image_token": "<image>",
            "extra_special_tokens": {"pad2_token": "<pad>"},
        }
    },
    "flags that a tokenizer.json overrides": {
        "tokenizer_config": {
            "eos_token": END,
            "add_bos_token": True,
            "add_eos_token": True,
            "bos_token": "<pad>",
        }
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_names_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the launcher-only install has none")
    folder = write(tmp_path / "m", [END], **FOLDERS[name])
    judge = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(folder)
    expected = judge(TEXT, truncation=False, padding=False)["input_ids"]
    assert encoder.encode_texts([Sample(TEXT)]) == [expected]
    assert encoder.end == judge.eos_token_id
    names = TokenizerFolder(folder).names
    assert {**names, **judge.special_tokens_map} == names
    assert encoder.unused == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"added_tokens": {"<a>": 300}}, "added_tokens.json: token '<a>' is number 300, but 257"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"4": token(END)}}},
            "tokenizer_config.json: token '<|endoftext|>' is number 4, but 256 in tokenizer.json",
        ),
        (
            {"tokenizer_config": {"add_prefix_space": True}},
            "'add_prefix_space' is true, but false in tokenizer.json",
        ),
        ({"special_tokens_map": ["x"]}, "special_tokens_map.json: not a JSON object"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, Any], problem: str
) -> None:
    folder = write(tmp_path / "m", [END], **files)
    with pytest.raises(InputError) as caught:
        Encoder(folder)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("older", [["merges.txt", "vocab.json"], ["tokenizer.model"], []])
def test_an_older_folder_is_named_with_what_to_do(tmp_path: Path, older: list[str]) -> None:
    for name in older:
        (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file; ") as caught:
        Encoder(tmp_path)
    assert ("save_pretrained" in str(caught.value)) == bool(older)
    assert " and ".join(older) in str(caught.value)


ANSWER = "def f(x):\n    if x:\n\n        return  1\n  "
TRIMMING = {
    "ByteLevel": processors.ByteLevel(trim_offsets=True),
    "in a sequence": processors.Sequence([processors.ByteLevel(trim_offsets=True)]),
    "Roberta": processors.RobertaProcessing(("</s>", 256), ("<s>", 257), trim_offsets=True),
}


@pytest.mark.parametrize("name", TRIMMING)
def test_white_space_is_learned_where_places_are_trimmed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    tokenizer = byte_tokenizer(folder, ["<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = TRIMMING[name]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = Encoder(folder)
    turns = ChatMessage("user", " a "), ChatMessage("assistant", ANSWER)
    _, labels = encoder.encode_conversation(Sample("", messages=turns))
    learned = [label for label in labels if label != IGNORED]
    assert encoder.tokenizer.decode(learned, skip_special_tokens=False) == f"{ANSWER}<|im_end|>"


THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
ENDS = ["<|im_start|>", "<|im_end|>", END, "<|return|>", "<think>", "</think>", "</answer>"]


@pytest.mark.parametrize(
    ("template", "files", "stops"),
    [
        (CHATML, {}, ["<|im_end|>"]),
        (THINKING, {}, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "</answer><|im_end|>"), {}, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "</answer>"), {}, ["</answer>"]),
        (CHATML.replace("<|im_end|>", "\n"), {}, []),
        (CHATML.replace("{{ m.content }}", "?"), {}, []),  # refuses any answer
        (CHATML, {"generation_config": {"eos_token_id": [259, 258]}}, ENDS[1:4]),
        (CHATML, {"config": {"eos_token_id": 258}}, ["<|im_end|>", END]),
        (CHATML, {"tokenizer_config": {"eos_token": END}}, ["<|im_end|>", END]),
        (None, {}, ["<|im_end|>"]),
    ],
)
def test_a_text_ends_at_end_tokens_alone(
    tmp_path: Path, template: str | None, files: dict[str, Any], stops: list[str]
) -> None:
    """256 is the first special token of `ENDS`."""
    folder = write(tmp_path / "m", ENDS, **files)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    for each in tree["added_tokens"]:  # Qwen3's are not special
        each["special"] = not each["content"].startswith(("<think", "</"))
    path.write_text(json.dumps(tree))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    encoder = Encoder(folder)
    assert {encoder.tokenizer.id_to_token(id) for id in encoder.stops} == set(stops)


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"config": {"eos_token_id": 257}}, 257),
        ({"config": {"eos_token_id": [256, 257]}}, 256),
        ({"generation_config": {"eos_token_id": 257}}, 257),
        ({}, None),
    ],
)
def test_a_tokenizer_that_names_no_end_has_the_models(
    tmp_path: Path, files: dict[str, Any], end: int | None
) -> None:
    encoder = Encoder(write(tmp_path / "m", [END, "<|im_end|>"], **files))
    assert encoder.end == end
    ids, labels = encoder.encode(Sample("ab"))
    assert ids == labels
    assert len(ids) == 2 + (end is not None)


def test_templates_in_files_replace_those_of_the_settings(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}old"}]}
    folder = write(tmp_path / "m", ENDS, tokenizer_config=settings)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} now")
    encoder = Encoder(folder)
    turns = (ChatMessage("user", "a"),)
    for tools, expected in (([], "a now"), ([{"name": "b"}], "tools: [{'name': 'b'}]")):
        ids = encoder.encode_prompt(Sample("", messages=turns, tools=tuple(tools)))
        assert encoder.tokenizer.decode(ids) == expected
