"""A tokenizer beside an adapter is what the adapter was trained with; merged models stop at a turn.

The merged folder's template and ends are those that gguf's converter reads, too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.trainer.data.families import FAMILIES
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.generation_file import generation_file
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.trained_model import load_trained
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.system.errors import InputError

TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:{% endif %}"
)
ASKED = [Sample("", messages=(ChatMessage("user", "hi"),))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a base model whose texts end with <|endoftext|>, and that has no chat template."""
    folder = write_model(tmp_path / "base", write_data(tmp_path / "train.jsonl"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings["eos_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_adapter(base: Path, folder: Path, **saved: np.ndarray) -> Path:
    folder.mkdir()
    found: dict[str, np.ndarray] = {}
    for name, value in load_file(base / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"] = np.ones((2, value.shape[1]), np.float32)
            found[f"{stem}.lora_B.weight"] = np.ones((value.shape[0], 2), np.float32)
    found |= {f"base_model.model.{name.replace('__', '.')}": each for name, each in saved.items()}
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}
    settings |= {"lora_alpha": 2, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def with_tokenizer(adapter: Path, base: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, adapter)
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    return adapter


def test_it_is_used_and_merged(base: Path, tmp_path: Path) -> None:
    adapter = with_tokenizer(write_adapter(base, tmp_path / "adapter"), base)
    merged = merge_adapter(open_adapter(adapter)[0], tmp_path / "merged")
    for folder in (adapter, merged):
        encoder = load_trained(folder).open_encoder()
        text = encoder.tokenizer.decode(encoder.encode_prompt(ASKED[0]), skip_special_tokens=False)
        assert text == "### user:hi<|im_end|>### assistant:"
        assert encoder.tokenizer.token_to_id("<|im_end|>") in encoder.stops
    assert (merged / "chat_template.jinja").read_text() == TEMPLATE
    gguf = pytest.importorskip("gguf", reason="the launcher-only install has none")
    assert gguf.SpecialVocab(merged).chat_template == TEMPLATE


def test_the_cache_of_merged_adapters_knows_tokenizers(base: Path, tmp_path: Path) -> None:
    """An adapter with whole tables is merged into the cache before it is used."""
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    tables = {"model__embed_tokens__weight": table, "lm_head__weight": table}
    adapter = with_tokenizer(write_adapter(base, tmp_path / "adapter", **tables), base)
    found: list[str] = []
    for role in ("user", "person"):
        (adapter / "chat_template.jinja").write_text(TEMPLATE.replace("m.role", f"'{role}'"))
        encoder = load_trained(adapter).open_encoder()
        found.append(encoder.tokenizer.decode(encoder.encode_prompt(ASKED[0]))[:8])
    assert found == ["### user", "### pers"]


def test_a_template_without_its_tokenizer_is_named(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    (line,) = open_adapter(adapter)[1]
    assert "chat_template.jinja are not used without a tokenizer.json beside them" in line


@pytest.mark.parametrize("has_file", [False, True])
def test_a_merged_model_ends_where_a_turn_ends(base: Path, tmp_path: Path, has_file: bool) -> None:
    adapter = with_tokenizer(write_adapter(base, tmp_path / "adapter"), base)
    encoder = load_trained(adapter).open_encoder()
    text, turn = (encoder.tokenizer.token_to_id(n) for n in ("<|endoftext|>", "<|im_end|>"))
    assert text is not None
    assert turn is not None
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": text}))
    given = {"eos_token_id": text, "temperature": 0.7, "do_sample": True}
    (base / "generation_config.json").unlink(missing_ok=True)
    if has_file:
        (base / "generation_config.json").write_text(json.dumps(given))
    merged = merge_adapter(open_adapter(adapter)[0], tmp_path / "merged")
    tree = json.loads((merged / "generation_config.json").read_text())
    assert tree["eos_token_id"] == [text, turn]
    assert ("temperature" in tree) == has_file
    assert generation_file(merged) == {}  # it is complete


def test_tables_with_more_rows_are_the_merged_models(base: Path, tmp_path: Path) -> None:
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    more = np.concatenate([table, np.ones((3, table.shape[1]), table.dtype)])
    tables = {"model__embed_tokens__weight": more, "lm_head__weight": more}
    adapter = write_adapter(base, tmp_path / "adapter", **tables)
    merged = merge_adapter(open_adapter(adapter)[0], tmp_path / "merged")
    stored = load_file(merged / "model.safetensors")
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], more)
    np.testing.assert_array_equal(stored["lm_head.weight"], more)
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == len(more)
    assert load_trained(adapter).layout.size == load_trained(merged).layout.size
    for tables in (
        {"model__embed_tokens__weight": more},
        {"model__embed_tokens__weight": more, "lm_head__weight": more[:-1]},
    ):
        alone = write_adapter(base, tmp_path / f"adapter-{len(tables)}", **tables)
        with pytest.raises(InputError, match=r"resize the base first \(resize_token_embeddings"):
            merge_adapter(open_adapter(alone)[0], tmp_path / "none")


def test_the_template_of_a_family_is_not_needed_for_the_ends(base: Path) -> None:
    """A model that ends as its template does keeps its file."""
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "generation_config.json").unlink(missing_ok=True)
    settings |= {"chat_template": FAMILIES["qwen3"].plain, "eos_token": "<|im_end|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    end = next(
        each["id"]
        for each in json.loads((base / "tokenizer.json").read_text())["added_tokens"]
        if each["content"] == "<|im_end|>"
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    assert generation_file(base) == {}
