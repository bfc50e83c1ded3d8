"""`launch init`: what it writes can be run as it stands, and with every line uncommented."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import run
from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig, load_config

HOSTILE = (
    "\nnotify: [touch, pwned]\n#",
    "\r\nnotify: x\r",
    " # x",
    ": x",
    "\t'\"`$(touch pwned)",
    "\u2028notify: x\u2029",
    "\x85notify: x",
    "\x1b[2J\x7f\x9b",
    "\ufeff\ufffe",
    "{a}[b]&*!|>%@",
)
"""Texts that would end a comment or a quotation, or that no YAML file may hold."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_config_by_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f'{{"input": "ls {number}", "label": 4}}\n' for number in range(20))
    Path("d: x.jsonl").write_text("".join(lines))
    assert run(["init", "--model", "m", "--data", "d: x.jsonl"]) == 0
    assert "launch cluster up --config run.yaml" in capsys.readouterr().out
    config = load_config("run.yaml")
    wanted = {
        "num_classes": 5,
        "model": {"path": "m"},
        "data": {"train": "d: x.jsonl", "validation_fraction": 0.1},
        "training": {"epochs": 3, "batch_size": 8, "evaluate_every": 3},
    }
    assert config == RunConfig.model_validate(wanted)
    text = Path("run.yaml").read_text()
    Path("all.yaml").write_text(re.sub(r"^(  )# (\w+: )", r"\1\2", text, flags=re.MULTILINE))
    assert load_config("all.yaml") == config, "each commented line shows its default"
    assert len(Path("all.yaml").read_text()) < len(text) - 10


def test_a_config_by_the_model_too() -> None:
    write_model(Path("model"), write_data(Path("train.jsonl"), 60))
    assert run(["init"]) == 0
    config = load_config("run.yaml")
    assert (config.num_classes, config.data.max_seq_len) == (3, 64)
    assert config.optimizer.learning_rate == 1e-3


def test_labels_that_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f'{{"text": "{n}", "label": "{("yes", "no: x")[n % 2]}"}}\n' for n in range(20))
    data = Path("train.jsonl")
    data.write_text("".join(lines))
    assert run(["init"]) == 0
    config = load_config("run.yaml")
    assert (config.task, config.num_classes, config.class_names) == ("classify", 2, None)
    write_model(Path("model"), data)
    assert run(["init", "named.yaml"]) == 0
    assert load_config("named.yaml").class_names == ("no: x", "yes")
    data.write_text('{"text": "x"}\n' + data.read_text())
    capsys.readouterr()
    assert run(["init", "mixed.yaml"]) == 2
    assert "and none in 1 line (line 1)" in capsys.readouterr().err
    assert not Path("mixed.yaml").exists()


def test_text_is_a_language_model_and_nothing_is_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["init", "mine.yaml"]) == 0
    config = load_config("mine.yaml")
    assert (config.task, config.data.validation_fraction) == ("causal-lm", 0.1)
    before = Path("mine.yaml").read_bytes()
    capsys.readouterr()
    assert run(["init", "mine.yaml"]) == 2
    assert (
        "mine.yaml: exists already; name another one: launch init FILE" in capsys.readouterr().err
    )
    assert Path("mine.yaml").read_bytes() == before
    assert run(["init", "absent/run.yaml"]) == 2
    assert "absent/run.yaml: cannot be written: No such file" in capsys.readouterr().err


def test_data_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--data", "nope.jsonl"]) == 2
    assert capsys.readouterr().err == "launch: nope.jsonl: no such data file\n"
    assert run(["init", "--data", "inputs/nope.jsonl"]) == 0, "sync inputs copies it"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_foreign_config_becomes_a_setting(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a key, which the head names, nor a value."""
    trees: list[Any] = []
    for name, said in (("plain.yaml", "x"), ("run.yaml", text)):
        foreign = {"base_model": f"m{said}", said: 1, "chat_template": said, "datasets": f"d{said}"}
        Path("ax.yml").write_text(yaml.safe_dump(foreign))
        assert run(["init", name, "--from", "ax.yml"]) == 0
        trees.append(yaml.safe_load(Path(name).read_text()))
        lines = capsys.readouterr().out.split("\n")
    plain, tree = trees
    assert (tree["model"].pop("path"), tree["data"].pop("train")) == (f"m{text}", f"d{text}")
    assert (plain["model"].pop("path"), plain["data"].pop("train")) == ("mx", "dx")
    assert tree == plain
    written = Path("run.yaml").read_text()
    assert load_config("run.yaml").model.path == f"m{text}"
    first = written.index("task:")
    assert all(line.startswith("# ") for line in written[:first].splitlines())
    assert all(line.startswith("not converted: ") for line in lines[:2])


@pytest.mark.parametrize("text", HOSTILE)
def test_no_path_and_no_name_of_a_class_becomes_a_setting(text: str) -> None:
    text = text.replace("/", "|")
    data, file = Path(f"d{text}.jsonl"), Path(f"r{text}.yaml")
    name = "".join(filter(str.isprintable, text))  # a label with others is refused
    lines = [{"text": str(n), "label": f"{'ab'[n % 2]}{name}"} for n in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_model(Path("m"), data)
    Path("m").rename(f"m{text}")
    assert run(["init", str(file), "--model", f"m{text}", "--data", str(data)]) == 0
    config = load_config(file)
    assert (config.model.path, config.data.train) == (f"m{text}", str(data))
    assert config.class_names == (f"a{name}", f"b{name}")
    assert set(yaml.safe_load(file.read_text())) <= set(RunConfig.model_fields)
