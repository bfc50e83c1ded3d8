"""What is wrong with a prompt is said with the place of that prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import Encoder
from trainer.data.prompts import SamplePrompts, encode_prompts
from trainer.data.samples import read_prompts
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.distill.answers.author import Prompts
from trainer.system.errors import InputError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
REFUSED = "the chat template refuses it: no"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder whose chat template refuses turns of the system."""
    folder = tmp_path / "model"
    byte_tokenizer(folder)
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    return folder


def write(path: Path, *roles: str, **more: Any) -> Path:
    """Write a good prompt and then one with turns of these roles."""
    turns = [{"role": role, "content": "a"} for role in roles]
    lines = {"messages": [{"role": "user", "content": "a"}]}, {"messages": turns, **more}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_refusal_of_the_chat_template_names_file_and_line(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "system", "user")
    encoder = Encoder(model)
    for read in (
        lambda: Prompts.read_prompts(path, {}, model),
        lambda: SamplePrompts(path, {}, encoder, model, 4, 64),
        lambda: encode_prompts(encoder, model, read_prompts(path)),
    ):
        with pytest.raises(InputError) as caught:
            read()
        assert str(caught.value) == f"{path}:2: {REFUSED}"


def test_a_prompt_of_a_folder_or_a_table_is_named_as_other_data_is(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = write(folder / "a.jsonl", "system", "user")
    with pytest.raises(InputError, match=f"^{path}:2: {REFUSED}"):
        Prompts.read_prompts(folder, {}, model)
    (table := tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}]')
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 65}')
    with pytest.raises(InputError, match=f" token 65 of {table}: element 2, the model has 65"):
        encode_prompts(Encoder(model), model, read_prompts(table))


def test_a_refusal_of_a_typed_prompt_names_its_number(model: Path) -> None:
    turns = ChatMessage("system", "a"), ChatMessage("user", "a")
    samples = [Sample("a"), Sample("", messages=turns)]
    with pytest.raises(InputError, match=f"^prompt 2: {REFUSED}"):
        encode_prompts(Encoder(model), model, samples)


def test_a_prompt_with_tools_names_file_and_line(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "user", tools=[{"name": "add"}])
    with pytest.raises(InputError, match=f"^{path}:2: has tools or other keys"):
        Prompts.read_prompts(path, {}, model)


def test_a_prompt_that_is_too_long_names_file_and_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "aaaa"}\n')
    with pytest.raises(InputError, match=f"^{path}:2: a prompt of 4 tokens and training"):
        SamplePrompts(path, {}, Encoder(model), model, 4, 7)
