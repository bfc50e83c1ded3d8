"""A trained model keeps its tokenizer and template, whatever becomes of its base's files.

Each path that means the model is used by each command, as a process of its own, after the base's
template was replaced on the disk.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.small_model import write_data, write_model
from tests.waiting import PATIENCE
from trainer.checkpoint.trained_model import load_trained
from trainer.config.run import load_config
from trainer.data.shapes import Sample
from trainer.data.tokens import Dataset
from trainer.data.turns import ChatMessage
from trainer.run.inputs import read_inputs

TRAINER = (sys.executable, "-m", "trainer.cli")
ON_CPU = ("--gpu-backend", "cpu", "--threads", "1")
TRAINED_WITH = (
    "{% for m in messages %}{{ '### ' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:{% endif %}"
)
LATER = "{% for m in messages %}{{ m.content }}{% endfor %}"
PATHS = (
    "",
    "adapter",
    "checkpoints",
    "checkpoints/step-000002",
    "checkpoints/latest",
    "checkpoints/best",
)
ASKED = [Sample("", messages=(ChatMessage("user", "hi"),))]


def run(*arguments: str | Path, text: str = "") -> str:
    """Return what a command prints."""
    words = [*TRAINER, *map(str, arguments)]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def use(model: Path, data: Path) -> list[str]:
    """Return what the commands that render conversations print of a model."""
    words = ("--max-new-tokens", "12", *ON_CPU)
    evaluated = json.loads(run("evaluate", model, "--data", data, "--json", *ON_CPU))
    return [
        run("generate", model, "--chat", "hello", "--chat", "rm -rf", *words),
        run("chat", model, *words, text="hello\nrm -rf\n"),
        json.dumps({key: each for key, each in evaluated.items() if "seconds" not in key}),
    ]


def set_template(model: Path, template: str) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a base with a template, conversations, and the output of a run on both."""
    folder = tmp_path_factory.mktemp("saved")
    base = write_model(folder / "base", write_data(folder / "labels.jsonl"))
    set_template(base, TRAINED_WITH)
    data = folder / "chats.jsonl"
    turns = (
        [{"role": "user", "content": f"echo {n}"}, {"role": "assistant", "content": f"{n} said"}]
        for n in range(12)
    )
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    words = ["--max-steps", "2", "--batch-size", "2", *ON_CPU]
    run("finetune", base, "--data", data, "-o", folder / "out", *words)
    return base, data, folder / "out"


@pytest.mark.cluster
def test_a_run_that_begins_from_it_learns_by_it(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, data, out = files
    base = shutil.copytree(base, tmp_path / "base")
    settings = {"task": "causal-lm", "model.path": str(base), "data.train": str(data)}
    config = load_config(None, settings)
    onward, absent = (
        config.with_settings({"model.adapter": str(path)}) for path in (out, tmp_path / "none")
    )
    set_template(base, TRAINED_WITH)
    before = read_inputs(config, "one")
    set_template(base, LATER)
    after = read_inputs(onward, "one")
    assert isinstance(before.train, Dataset)
    assert isinstance(after.train, Dataset)
    assert [list(each.input_ids) for each in after.train] == [
        list(each.input_ids) for each in before.train
    ]
    assert after.job.model_digest == before.job.model_digest
    # A member that does not have the adapter would learn other tokens, and is refused.
    assert read_inputs(absent, "one").job.model_digest != before.job.model_digest


@pytest.mark.cluster
def test_every_command_uses_it_by_every_path(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, data, out = files
    before = use(out, data)
    set_template(base, LATER)
    assert use(out, data) == before
    assert use(out / "adapter", data) == before
    merged = {}
    for number, path in enumerate(PATHS):
        encoder = load_trained(out / path).open_encoder()
        text = encoder.tokenizer.decode(encoder.encode_prompt(ASKED[0]), skip_special_tokens=False)
        assert text == "### user:hi<|im_end|>### assistant:", path
        folder = tmp_path / f"merged-{number}"
        run("merge", out / path, "-o", folder)
        merged[path] = {each.name: each.read_bytes() for each in folder.iterdir()}
    kept = json.loads(merged[""]["tokenizer_config.json"])["chat_template"]
    assert kept == TRAINED_WITH
    turn = encoder.tokenizer.token_to_id("<|im_end|>")
    assert turn in json.loads(merged[""]["generation_config.json"])["eos_token_id"]
    assert all(merged[path] == merged[""] for path in PATHS)
    # An adapter without a tokenizer has its base's: the prompts do differ.
    bare = shutil.copytree(out / "adapter", tmp_path / "bare")
    for file in (*bare.glob("*token*"), *bare.glob("generation*")):
        file.unlink()
    assert use(bare, data)[2] != before[2]
