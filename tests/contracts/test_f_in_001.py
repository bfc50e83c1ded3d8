"""F-IN-001: what a person brings is used, or refused by its name; the rest is said once.

Every reader has a `KeyTable`. Here each of them is given a key that is in no part of its table,
through the code that reads real files, and each refused key is refused by its name.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import launcher
import trainer
from launcher.errors import ConfigError
from launcher.inventory.hosts import load_inventory, parse_answer
from launcher.inventory.variables import INVENTORY_KEYS
from tests.trainer.data.test_tokens import byte_tokenizer
from tests.trainer.gguf_files import write_gguf
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import ADAPTER_KEYS, open_adapter
from trainer.data.encoder import Encoder
from trainer.data.records import DataError
from trainer.data.samples import read_file
from trainer.data.shapes import LABELLED_KEYS, LINE_KEYS
from trainer.data.turns import TURN_KEYS
from trainer.model.files import resolve_model
from trainer.model.gguf.description import GGUF_KEYS
from trainer.system.errors import InputError
from trainer.system.key_table import KeyTable


def key_tables() -> dict[str, KeyTable]:
    """Return the tables of all modules, by `module.NAME`."""
    found: dict[str, KeyTable] = {}
    for package in (trainer, launcher):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, KeyTable) and value not in found.values():
                    found[f"{module.name}.{name}"] = value
    return found


TABLES = key_tables()


@pytest.mark.parametrize("name", TABLES)
def test_every_refusal_says_what_to_do(name: str) -> None:
    table = TABLES[name]
    for key in table.refused:
        refusal = table.explain_refusal([key])
        assert refusal is not None
        assert refusal.startswith(f"'{key}' ")
        assert "\n" not in refusal


def line(key: str, *, turn: bool) -> dict[str, object]:
    """Return a data line with one more key of itself or of its answer."""
    tree: dict[str, object] = {"role": "assistant", "content": "a"}
    return {"messages": [tree | {key: "x"}]} if turn else {"messages": [tree], key: "x"}


@pytest.mark.parametrize("turn", [False, True])
def test_a_data_line_and_its_turns(tmp_path: Path, turn: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line("lable", turn=turn)) + "\n")
    (report,) = read_file(path, "causal-lm").unused
    assert report.endswith("'lable' (1 time)")
    for key in (TURN_KEYS if turn else LINE_KEYS).refused:
        path.write_text(json.dumps(line(key, turn=turn)) + "\n")
        with pytest.raises(DataError, match=rf"a\.jsonl:1: .*'{key}' "):
            read_file(path, "causal-lm")


def test_a_tokenizers_folder(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"eos_token": "<|endoftext|>", "split_tokens": true}')
    (tmp_path / "tokens.txt").touch()
    files, keys = Encoder(tmp_path).unused
    assert "'tokens.txt' (1 time)" in files
    assert "'split_tokens' (1 time)" in keys
    for key in TABLES["trainer.data.tokenizer_folder.SETTINGS"].refused:
        settings.write_text(json.dumps({key: True}))
        with pytest.raises(InputError, match=rf"tokenizer_config\.json: '{key}' "):
            Encoder(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder / "base", write_data(folder / "data.jsonl"))


def in_gguf(key: str) -> str:
    return key if key.startswith(("tokenizer.", "split.")) else f"ARCH.{key}"


@pytest.mark.parametrize("key", GGUF_KEYS.refused)
def test_a_gguf_file_with_a_refused_key(model: Path, tmp_path: Path, key: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, keys={in_gguf(key): 1})
    with pytest.raises(InputError, match=f"'{key}' {GGUF_KEYS.refused[key]}"):
        resolve_model(str(file))


def test_a_gguf_file_with_unknown_keys(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = dict.fromkeys(["ARCH.attention.new", "tokenizer.ggml.new", "other.new"], 1)
    resolve_model(str(write_gguf(tmp_path / "m.gguf", model, keys=keys)))
    (line,) = (record.message for record in caplog.records if "not used" in record.message)
    for key in ("'attention.new' (1 time)", "'tokenizer.ggml.new' (1", "'other.new' (1 time)"):
        assert key in line


def test_a_line_with_a_label(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tree = {"input": "x", "label": 0}
    path.write_text(json.dumps(tree | {"colour": "red"}) + "\n")
    (report,) = read_file(path, "classify", 2).unused
    assert report.endswith("'colour' (1 time)")
    for key in LABELLED_KEYS.refused:
        path.write_text(json.dumps(tree | {key: "x"}) + "\n")
        with pytest.raises(DataError, match=rf"a\.jsonl:1: '{key}' "):
            read_file(path, "classify", 2)
    path.write_text(json.dumps(tree) + "\n")
    (report,) = read_file(path, "causal-lm").unused
    assert report.endswith("'label' (1 time)")


@pytest.mark.long
def test_an_inventory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.yml"
    here = {"ansible_connection": "local"}

    def write(**variables: object) -> None:
        path.write_text(json.dumps({"all": {"hosts": {"box": here | variables}}}))

    write(ansible_become=True, ansible_hots="box", other=1)
    for _ in range(2):
        load_inventory(path)
    said = "keys of the inventory that are not used: 'ansible_hots' (1 time)"
    assert capsys.readouterr().err == f"{path}: {said}\n"
    write(motley_prot=1)
    with pytest.raises(
        ConfigError, match=r"unknown variable motley_prot .did you mean motley_port"
    ):
        load_inventory(path)
    for key in INVENTORY_KEYS.refused:
        answer = {"hosts": [{"name": "box", "variables": {}, "errors": {}, "keys": [key]}]}
        with pytest.raises(ConfigError, match=f"host box: '{key}' is not used"):
            parse_answer(str(path), "all", json.dumps(answer), "")
    write(ansible_ssh_pass="x")
    with pytest.raises(ConfigError, match="'ansible_ssh_pass' is not used: log in with a key"):
        load_inventory(path)


@pytest.mark.parametrize("key", ADAPTER_KEYS.refused)
def test_an_adapter_with_a_refused_key(tmp_path: Path, key: str) -> None:
    tree = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1}
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({**tree, key: [1]}))
    with pytest.raises(InputError, match=rf"config\.json: '{key}' is not read; merge it with"):
        open_adapter(tmp_path)
    settings.write_text(json.dumps({**tree, key: None}))  # as PEFT writes what is not used
    with pytest.raises(InputError, match=r"adapter_model\.safetensors: no such file"):
        open_adapter(tmp_path)
