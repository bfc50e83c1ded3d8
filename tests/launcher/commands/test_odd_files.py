"""Files that are no files, or much larger than they should be: one line each, at once."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import run as launch
from tests.trainer.small_model import write_data, write_model
from trainer.cli import trainer
from trainer.system.errors import InputError

SIZE = 60 << 30


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SIZE)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "folder": (Path.mkdir, "is a folder, not a file"),
    "sparse": (sparse, "is larger than 1,048,576 bytes"),
    "deep": (lambda path: path.write_text("[" * 100_000), "nested deeper than 64 levels"),
    "laughs": (
        lambda path: path.write_text(
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
        ),
        "has more than 100,000 values",
    ),
}
COMMANDS = {
    "init": ("launch", ["init", "new.yaml", "--from", "odd"]),
    "up": ("launch", ["cluster", "up", "--config", "odd"]),
    "queue": ("launch", ["queue", "add", "--config", "odd"]),
    "distill": ("launch", ["distill", "up", "--config", "odd"]),
    "finetune": ("trainer", ["finetune", "--config", "odd"]),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(program: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command ends."""
    if program == "trainer":
        with pytest.raises(InputError) as caught:
            trainer.main(words, standalone_mode=False)
        return str(caught.value)
    assert launch(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("launch: ")


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FILES)
def test_a_config_that_is_none_is_one_line(
    kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, problem = FILES[kind]
    make(Path("odd"))
    program, words = COMMANDS[command]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refusal(program, words, capsys)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert line.startswith("odd")
    assert problem in line
    assert "\n" not in line
    assert not Path("new.yaml").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse", "depth"])
def test_a_models_file_that_is_none_is_one_line(
    kind: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(Path("train.jsonl"))
    path = write_model(Path("model"), Path("train.jsonl")) / file
    path.unlink(missing_ok=True)
    if kind == "depth":
        path.write_text("[" * 200_000)
    else:
        FILES[kind][0](path)
    words = ["finetune", "--config", "quickstart", "--set", "model.path=model"]
    words += ["--set", "data.train=train.jsonl", "--set", "output=out"]
    line = refusal("trainer", words, capsys)
    where = "model: " if file == "config.json" and kind in ("pipe", "device") else f"model/{file}: "
    assert where in line
    assert "\n" not in line


def test_a_dataset_info_that_is_none_is_left_with_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("factory.yml").write_text("model_name_or_path: m\nstage: sft\ndataset: mine\n")
    for text in ("[" * 200_000, json.dumps({"mine": {}})):
        Path("dataset_info.json").write_text(text)
        assert launch(["init", "new.yaml", "--from", "factory.yml"]) == 0
        assert "not converted: dataset: 'mine' in dataset_info.json" in capsys.readouterr().out
        Path("new.yaml").unlink()
