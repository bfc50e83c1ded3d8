"""`launch init`: what it writes can be run as it stands, and with every line uncommented."""

import re
from pathlib import Path

import pytest

from launcher.cli import run
from trainer.config.run import RunConfig, load


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_config_that_holds_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    Path("d: x.jsonl").write_text('{"input": "ls", "label": 4}\n')
    assert run(["init", "--model", "m", "--data", "d: x.jsonl"]) == 0
    assert "launch cluster up --config run.yaml" in capsys.readouterr().out
    config = load("run.yaml")
    wanted = {"num_classes": 5, "model": {"path": "m"}, "data": {"train": "d: x.jsonl"}}
    assert config == RunConfig.model_validate(wanted)
    text = Path("run.yaml").read_text()
    Path("all.yaml").write_text(re.sub(r"^(  )# (\w+: )", r"\1\2", text, flags=re.MULTILINE))
    assert load("all.yaml") == config, "each commented line shows its default"
    assert len(Path("all.yaml").read_text()) < len(text) - 10


def test_text_is_a_language_model_and_nothing_is_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["init", "mine.yaml"]) == 0
    assert load("mine.yaml").task == "causal-lm"
    before = Path("mine.yaml").read_bytes()
    capsys.readouterr()
    assert run(["init", "mine.yaml"]) == 2
    assert "mine.yaml: exists already; name another file" in capsys.readouterr().err
    assert Path("mine.yaml").read_bytes() == before
    assert run(["init", "absent/run.yaml"]) == 2
    assert "absent/run.yaml: cannot be written: No such file" in capsys.readouterr().err
