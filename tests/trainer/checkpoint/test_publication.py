"""The folder to publish: PEFT and transformers load it as it is; nothing of the run is in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.publication import model_card, write_publication
from trainer.checkpoint.reader import find_checkpoint
from trainer.checkpoint.trained_model import load_trained
from trainer.config.run import RunConfig, load_config
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import verify_folder

ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)


def labels_by_its_card(card: str, folder: Path) -> dict[int, str]:
    """Run the lines of a card beside its folder; use what they made and return its classes."""
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(card.partition("```python\n")[2].partition("```")[0], names)
    model = names["model"].eval()
    assert names["tokenizer"]("ls")["input_ids"]
    return model.config.id2label


def trained(tmp_path: Path, **settings: Any) -> RunConfig:
    data = write_data(tmp_path / "train.jsonl", count=12)
    model = write_model(tmp_path / "base", data)
    given = {
        "num_classes": 3,
        "class_names": ["good", "bad", "odd"],
        "model.path": str(model),
        "data.train": str(data),
        "data.validation": str(data),
        "output": str(tmp_path / "out"),
        "training.max_steps": 2,
    }
    config = load_config(None, {k: v for k, v in (given | settings).items() if v is not None})
    assert roles.run_local(config, "run", ALONE) == 0
    return config


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_classifier_is_loaded_by_the_lines_of_its_card(tmp_path: Path, method: str) -> None:
    config = trained(tmp_path, method=method)
    folder = tmp_path / "out" / ("adapter" if method == "lora" else "model")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"README.md", "tokenizer.json", "tokenizer_config.json", "manifest.json"}
    assert not names & {"optimizer.safetensors", "run.json"}
    verify_folder(folder)
    weights = next(folder.glob("*model.safetensors"))
    best = find_checkpoint(Path(config.output))
    assert weights.stat().st_ino == (best / weights.name).stat().st_ino, "linked, not copied"
    text = (folder / "README.md").read_text()
    about = yaml.safe_load(text.split("---")[1])
    assert about["library_name"] == {"lora": "peft", "full": "transformers"}[method]
    assert about["pipeline_tag"] == "text-classification"
    assert "base_model" not in about  # a folder of this machine means nothing on a hub
    local = f"`{tmp_path / 'base'}`, a folder or file of this computer"
    assert (local in text) == (method == "lora")
    assert labels_by_its_card(text, folder) == {0: "good", 1: "bad", 2: "odd"}
    assert load_trained(folder).config.class_names == ("good", "bad", "odd")


def test_a_base_of_a_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = trained(tmp_path, num_classes=None, class_names=None, task="causal-lm")
    hub = config.with_settings({"model.path": "Qwen/Qwen3-0.6B"})
    best = find_checkpoint(Path(config.output))
    folder = write_publication(best, hub, tmp_path / "base")
    tree = json.loads((folder / "adapter_config.json").read_text())
    assert tree["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    about = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert (about["base_model"], about["base_model_relation"]) == ("Qwen/Qwen3-0.6B", "adapter")
    assert about["pipeline_tag"] == "text-generation"
    card = model_card({"step": 2}, hub, tmp_path / "base")
    assert "AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')" in card
    assert "of this computer" not in card
    monkeypatch.setattr(os, "link", no_links)
    assert write_publication(best, hub, tmp_path / "base") == folder
    verify_folder(folder)
    (folder.parent / "file").write_text("")
    elsewhere = config.with_settings({"output": str(folder.parent / "file")})
    with pytest.raises(StorageError, match="cannot be written"):
        write_publication(best, elsewhere, tmp_path / "base")


HOSTILE = (
    "x\nlicense: mit\ntags: [evil]",
    "x\n---\n# Not the title",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "`` ` ```\n<b>x</b>",
    "a | b |\n| c",
    "https://evil.example www.evil.example @someone #1",
    "\x1b[31mred\x07 \u202eback",
    "''' \"\"\" ${x} {{ x }} %s",
    "!!python/object:os.system",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("place", ["folder", "hub", "classes"])
def test_a_card_shows_any_text_as_it_is(tmp_path: Path, text: str, place: str) -> None:
    folder = tmp_path / text.replace("/", "_")
    folder.mkdir()
    settings: dict[str, Any] = {
        "folder": {"model.path": str(folder)},
        "hub": {"model.path": f"owner/{text.replace('/', '_')}"},
        "classes": {"task": "classify", "class_names": [text, "other"], "num_classes": 2},
    }[place]
    config = load_config(
        None, {"model.path": "owner/name", "data.train": "d", "task": "causal-lm"} | settings
    )
    for method in ("lora", "full"):
        card = model_card({"step": 2}, config.with_settings({"method": method}), folder)
        card.encode()
        head, sign, body = card.removeprefix("---\n").partition("\n---\n")
        assert sign
        about = yaml.safe_load(head)
        known = {"library_name", "base_model", "base_model_relation", "pipeline_tag", "tags"}
        assert set(about) <= known
        assert about["tags"] == [*(["lora"] if method == "lora" else []), "motley"]
        if place == "hub":
            assert about["base_model"] == config.model.path
        # As a site shows it: the elements of this card and no others.
        shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(body)
        tags = set(re.findall(r"<\s*/?\s*([a-z0-9]+)", shown))
        table = {"table", "thead", "tbody", "tr", "th", "td"}
        assert tags <= table | {"h1", "p", "code", "pre"}
        assert shown.count("<h1>") == shown.count("<pre>") == 1
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", body)
        (code,) = re.findall(r"^(`{3,})python\n(.*?)\n\1$", body, re.DOTALL | re.MULTILINE)
        compile(code[1], "card", "exec")


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
def test_a_gguf_is_named_as_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="the launcher-only install has none")
    from tests.trainer.gguf_files import write_gguf

    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    data = write_data(tmp_path / "data.jsonl")
    models = (write_model(tmp_path / str(seed), data, seed) for seed in (1, 2))
    base, other = (write_gguf(model.with_suffix(".gguf"), model) for model in models)
    config = trained(tmp_path, **{"model.path": str(base)})
    output = Path(config.output)
    # What was derived from the file is gone; the file itself is found again.
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "emptied"))
    for folder in (output, output / "adapter"):
        adapter, _ = open_adapter(folder)
        assert adapter.tree["base_model_name_or_path"] == str(base)
        load_trained(folder, base=str(base))
        with pytest.raises(InputError, match=r"was trained on another base than .*/2\.gguf"):
            open_adapter(folder, str(other))
    with pytest.raises(InputError, match=r"1\.gguf: is a full model, there is no adapter"):
        open_adapter(base)
    # An output folder means its checkpoint, whatever lies beside that.
    shutil.copy(base, output)
    assert open_adapter(output)[0].path == find_checkpoint(output)
    assert load_trained(output).config.method == "lora"
    text = (output / "adapter" / "README.md").read_text()
    assert f"`{base}`, a folder or file of this computer" in text
    merge_adapter(open_adapter(output / "adapter")[0], output / "adapter" / "merged")
    labels = labels_by_its_card(text, output / "adapter")
    assert labels == {0: "good", 1: "bad", 2: "odd"}


def no_links(source: Path, target: Path) -> None:
    raise PermissionError(1, "Operation not permitted")
