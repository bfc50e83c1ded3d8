"""A dry run refuses a model and data of the user's as the start does: same line, same code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.cli import run
from tests.ports import free_port
from tests.trainer.script_run import write_script

if TYPE_CHECKING:
    from tests.conftest import TinyModel

LINES = {
    "cluster up --preset quickstart": '{"prompt": "a", "completion": "b"}\n',
    "cluster up --config run.yaml": '{"text": "a", "label": "x"}\n',
}


@pytest.mark.parametrize("command", LINES)
def test_data_that_does_not_fit_is_refused_as_by_the_start(
    command: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    Path("model").symlink_to(tiny_model())
    Path("own.jsonl").write_text(LINES[command])
    Path("run.yaml").write_text(
        "task: classify\nnum_classes: 2\nmodel: {path: model}\ndata: {train: own.jsonl}\n"
    )
    said = []
    for more in ((), ("--dry-run",)):
        given = [
            "--model",
            "model",
            "--data",
            "own.jsonl",
            "--set",
            "data.validation=null",
            "-e",
            f"motley_port={free_port()}",
        ]
        assert run([*command.split(), *given, *more]) == 4
        said.append(capsys.readouterr().err)
    assert "own.jsonl" in said[0]
    assert said[1] == said[0]


def test_a_script_that_a_host_cannot_import_is_refused_as_by_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    changed = ("import torch\n", "import torch\nfrom no_such_package.part import x\n")
    script = write_script(tmp_path / "train.py", changed)
    command = ["cluster", "up", "--script", str(script), "-e", f"motley_port={free_port()}"]
    for more in ((), ("--dry-run",)):
        assert run([*command, *more]) == 4
        line = capsys.readouterr().err.splitlines()[-1]
        assert "localhost: trainer: the script imports no_such_package, which is not" in line
