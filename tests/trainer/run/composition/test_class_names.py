"""Labels that are words, from the data to the adapter, its scores and the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest

from tests.trainer.small_model import WORDS, write_model
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.evaluate import evaluate
from trainer.commands.merge import merge
from trainer.config.run import load_config
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError

ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
NAMES = ("eggs", "ham", "spam")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "train.jsonl"
    rows = ({"text": f"{WORDS[n % 3]} # {n}", "label": NAMES[-1 - n % 3]} for n in range(24))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def output(data: Path) -> Path:
    """A trained adapter; the config does not name the classes."""
    model = write_model(data.parent / "model", data)
    settings = {
        "num_classes": 3,
        "model.path": str(model),
        "data.train": str(data),
        "data.validation": str(data),
        "output": str(data.parent / "output"),
        "training.max_steps": 2,
    }
    assert roles.run_local(load_config(None, settings), "run", ALONE) == 0
    return data.parent / "output"


# peft 0.21 asks transformers 5.23 for a property by its former name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_transformers_and_peft_see_the_names(output: Path) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    adapter = (output / "checkpoints/best").resolve()
    config = AutoConfig.from_pretrained(adapter / "classifier_config.json")
    base = AutoModelForSequenceClassification.from_pretrained(
        output.parent / "model", config=config
    )
    model = PeftModel.from_pretrained(base, str(adapter))
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.label2id == {name: number for number, name in enumerate(NAMES)}
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    assert [shape[0] for name, shape in shapes.items() if "score" in name and shape[0] == 3]
    assert not (adapter / "config.json").exists(), "transformers takes it for a whole model"


def test_scores_card_and_settings_have_the_names(output: Path, data: Path) -> None:
    runner, options = click.testing.CliRunner(), ["--data", str(data), "--gpu-backend", "cpu"]
    tree = json.loads(runner.invoke(evaluate, [str(output), *options, "--json"]).stdout)
    assert [each["name"] for each in tree["classes"]] == list(NAMES)
    assert [each["count"] for each in tree["classes"]] == [8, 8, 8]
    lines = runner.invoke(evaluate, [str(output), *options]).stdout.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == list(NAMES)
    assert (
        f"classes: {', '.join(NAMES)}"
        in json.loads((output / "status.json").read_bytes())["summary"]
    )
    assert load_config(output / "run.yaml").class_names == NAMES


def test_a_merged_model_has_the_names_and_knows_them_as_a_base(output: Path, data: Path) -> None:
    merged = data.parent / "merged"
    done = click.testing.CliRunner().invoke(merge, [str(output), "-o", str(merged)])
    assert done.exit_code == 0, done.output
    tree = json.loads((merged / "config.json").read_bytes())
    assert tree["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    assert load_trained(merged).config.class_names == NAMES
    renamed = data.parent / "renamed.jsonl"
    renamed.write_text(data.read_text().replace("eggs", "spam"))
    settings = {"num_classes": 3, "model.path": str(merged), "data.train": str(renamed)}
    assert read_inputs(load_config(None, settings), "run").config.class_names == NAMES


def test_validation_has_the_same_classes(output: Path, data: Path) -> None:
    path = data.parent / "validation.jsonl"
    settings = {"num_classes": 3, "model.path": str(output.parent / "model")}
    settings |= {"data.train": str(data), "data.validation": str(path)}
    for label, problem in (
        ("eg", "one of the classes 'eggs', 'ham', 'spam'"),
        (1, "are numbers, th"),
    ):
        path.write_text(json.dumps({"input": "x", "label": label}) + "\n")
        with pytest.raises(InputError, match=problem):
            read_inputs(load_config(None, settings), "run")
