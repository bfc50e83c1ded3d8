"""A model's chat templates with names are in every folder that is written from it, and are used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.publication import write_publication
from trainer.checkpoint.reader import find_checkpoint
from trainer.config.run import RunConfig, load_config
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.distill.student.from_scratch import fresh_model
from trainer.distill.tokenizer.trim import trim_to_size
from trainer.model.files import model_digest
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.system.storage.atomic_folder import verify_folder

ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
TEMPLATE = "{% for m in messages %}NAME{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "clock"}},)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "base", write_data(tmp_path / "rows.jsonl"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("NAME", "plain "))
    (folder / WITH_TOOLS).parent.mkdir()
    (folder / WITH_TOOLS).write_text(TEMPLATE.replace("NAME", "tools "))
    return folder


def trained(base: Path, tmp_path: Path, method: str) -> RunConfig:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n' * 4)
    settings = {"task": "causal-lm", "method": method, "num_classes": None, "model.path": str(base)}
    settings |= {"data.train": str(tmp_path / "train.jsonl"), "output": str(tmp_path / method)}
    config = load_config(None, {**settings, "training.max_steps": 1})
    assert roles.run_local(config, "run", ALONE) == 0
    return config


def check(folder: Path) -> None:
    """Check that a folder has both templates, and that they are used as transformers does."""
    transformers = pytest.importorskip("transformers", reason="the launcher-only install has none")
    verify_folder(folder)
    encoder, judge = Encoder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "hi"}]
    for tools, begin in (((), "plain "), (TOOLS, "tools ")):
        sample = Sample("", messages=(ChatMessage("user", "hi"),), tools=tools)
        text = encoder.tokenizer.decode(encoder.encode_prompt(sample), skip_special_tokens=False)
        assert text == f"{begin}user:hi<|im_end|>"
        ids = judge.apply_chat_template(turns, tools=list(tools) or None, return_dict=False)
        assert ids == encoder.encode_prompt(sample)


@pytest.mark.long
def test_what_training_writes_has_them(base: Path, tmp_path: Path) -> None:
    for method, name in (("full", "model"), ("lora", "adapter")):
        config = trained(base, tmp_path, method)
        check(Path(config.output, name))
    check(merge_adapter(open_adapter(tmp_path / "lora")[0], tmp_path / "merged"))
    check(find_checkpoint(tmp_path / "full"))


def test_a_publication_without_links_has_them(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(base, tmp_path, "full")

    def fail(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", fail)
    check(write_publication(find_checkpoint(tmp_path / "full"), config, base))


def test_a_student_and_a_trimmed_tokenizer_have_them(base: Path, tmp_path: Path) -> None:
    trim_to_size(base, Documents([Path(json.__file__).parent]), 280, tmp_path / "trimmed")
    trimmed = tmp_path / "trimmed"
    assert (trimmed / WITH_TOOLS).read_bytes() == (base / WITH_TOOLS).read_bytes()
    check(fresh_model(base / "config.json", base, tmp_path / "student"))


def test_they_make_another_model(base: Path) -> None:
    before = model_digest(base)
    (base / WITH_TOOLS).write_text(TEMPLATE.replace("NAME", "other "))
    assert model_digest(base) != before
