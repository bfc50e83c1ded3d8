"""The `trainer` program: light to start, one line for what is wrong."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from tests import forked
from tests.trainer.small_model import write_data, write_model
from tests.waiting import PATIENCE, wait_for
from trainer.cli import COMMANDS, main, trainer
from trainer.config.run import load_config

TRAINER = (sys.executable, "-m", "trainer.cli")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRAINER, *arguments], capture_output=True, text=True, cwd=cwd, timeout=PATIENCE
    )


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['trainer', '--help']\n"
        "from trainer.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_asked_for_help(name: str):
    command = trainer.get_command(None, name)  # type: ignore[arg-type]  # it is not used
    assert command is not None
    assert command.name == name
    assert "=None" not in command.get_help(click.Context(command))


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the program in this process, for what ends before it changes anything."""
    monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_each_problem_of_a_data_file_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"words": "x"}\n{"words": "y"}\n{oops\n')
    assert run_here(monkeypatch, "inspect-data", str(bad)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"trainer: {bad}:1: its keys ('words')")
    assert first.endswith(f"; the same at {bad}:2")
    assert second.startswith(f"trainer: {bad}:3: not JSON")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("x: DefaultCPUAllocator: can't allocate memory\nmore"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_host_without_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: Any) -> None:
        raise error

    monkeypatch.setattr("trainer.cli.trainer.main", fails)
    assert run_here(monkeypatch, "finetune") == 2
    said = capsys.readouterr().err
    assert said.startswith("trainer: this host has not enough memory (")
    assert said.count("\n") == 1
    monkeypatch.setattr("trainer.cli.is_out_of_memory", lambda _: False)
    with pytest.raises(type(error)):
        main()


@pytest.mark.parametrize("path", [[], ["distill"]])
def test_a_group_alone_prints_its_help(path: list[str]):
    alone, asked = run(*path), run(*path, "-h")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert alone.stdout == asked.stdout
    assert "Commands:" in alone.stdout


@pytest.mark.smoke("start")
@pytest.mark.cluster
def test_settings_follow_from_data_and_model_and_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "labels.jsonl", 100)
    write_model(tmp_path / "model", data)
    words = ["finetune", "model", "--data", "labels.jsonl", "--gpu-backend", "cpu"]
    words += ["--threads", "1", "-o", "out"]
    done = forked.run([*TRAINER, *words, "--epochs", "1"], os.environ)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("settings by data and model, all of them in out/run.yaml:")[1]
    assert "num_classes" in said
    assert "training.epochs" not in said, "it was given"
    kept = load_config(tmp_path / "out/run.yaml")
    assert (kept.task, kept.num_classes, kept.data.validation_fraction) == ("classify", 3, 0.1)
    assert kept.training.epochs == 1
    status = json.loads((tmp_path / "out/status.json").read_bytes())
    assert status["step"] == status["total_steps"] == 12  # of 90 samples, 8 in each
    assert status["validation"]["accuracy"] is not None
    again = forked.run(
        [*TRAINER, "finetune", "--config", "out/run.yaml", "-o", "again"], os.environ
    )
    assert again.returncode == 0, again.stderr
    assert "settings by data" not in again.stderr
    other = json.loads((tmp_path / "again/status.json").read_bytes())
    assert other["validation"]["loss"] == pytest.approx(status["validation"]["loss"])


def test_what_is_wrong_with_the_data_is_all_that_is_said(tmp_path: Path):
    (tmp_path / "labels.jsonl").write_text('{"input": "a", "label": 2}\n')
    done = run("finetune", "nope", "--data", "labels.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    assert said == ["trainer: nope: no such model folder"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "trainer: no command 'bogus' (see: trainer --help)"),
        (["finetun"], "trainer: no command 'finetun'; did you mean: trainer finetune"),
        (["teacher"], "trainer: no command 'teacher'; did you mean: trainer distill teacher"),
        (["distill", "studnet"], "did you mean: trainer distill student"),
        (["finetune", "--bogus"], "no option --bogus (see: trainer finetune --help)"),
        (["finetune", "--lr", "3"], "no option --lr; did you mean: --learning-rate"),
        (["finetune", "--max-step", "3"], "no option --max-step; did you mean: --max-steps"),
        (["finetune", "--seed", "3"], "did you mean: --set training.seed=VALUE"),
        (
            ["finetune", "--lora_r=3"],
            "no option --lora_r; did you mean: --set lora.lora_rank=VALUE",
        ),
        (["finetune", "--preset", "quickstart"], "did you mean: --config"),
        (["finetune", "--config", "quickstrt"], "did you mean: quickstart"),
        (["generate", "--lr", "3"], "no option --lr (see"),
        (
            ["finetune"],
            "trainer: give MODEL_DIR and --data FILE, --script FILE, or --config FILE|PRESET",
        ),
        (["finetune", "--config", "nope"], "trainer: no config file and no preset 'nope'"),
        (["finetune", "--config", "quickstart", "--set", "x"], "--set x: give KEY=VALUE"),
        (["finetune", "--config", "quickstart", "--role", "worker"], "needs --coordinator"),
        (["finetune", "--config", "quickstart", "--run-id", "a/b"], "'a/b' is not a run's name"),
        (["finetune", "--config", "quickstart", "--run-id", ""], "'' is not a run's name"),
        (["distill", "student", "--run-id", "a(b"], "'a(b' is not a run's name"),
        (["distill", "student", "--run-id", "a\n"], "is not a run's name"),
        (["finetune", "nope", "--data", "d", "--num-classes", "3"], "nope"),
        (["evaluate", "nope", "--data", "d"], "nope"),
        *(
            (["distill", command, "nope", flag, value], f"'{flag}': ")
            for command, flag, value in (
                ("teacher", "--temperature", "1e300"),
                ("teacher", "--seed", "9" * 23),
                ("teacher", "--top-k", "9" * 23),
                ("generate", "--temperature", "1e300"),
                ("generate", "--seed", "9" * 23),
                ("generate", "--top-k", "9" * 23),
                ("generate", "--samples", "1000000000000"),
                ("audit", "--seed", "9" * 23),
            )
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    assert run_here(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1, said.err
    assert not said.out
    assert not caplog.records
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.smoke("resume")
@pytest.mark.cluster
def test_a_closed_terminal_stops_and_saves(tmp_path: Path) -> None:
    """The terminal is gone at once, so that every further line to it fails."""
    data = write_data(tmp_path / "labels.jsonl", 100)
    write_model(tmp_path / "model", data)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        words = ["finetune", "model", "--data", "labels.jsonl", "--gpu-backend", "cpu"]
        words += ["--threads", "1", "-o", "out", "--epochs", "100000"]
        os.execv(sys.executable, [sys.executable, "-m", "trainer.cli", *words])
    metrics = tmp_path / "out/metrics.jsonl"
    drain = threading.Thread(target=_read_all, args=[terminal, closing := threading.Event()])
    drain.start()
    try:
        wait_for(lambda: metrics.exists() and '"loss"' in metrics.read_text(), "a step")
    finally:
        closing.set()
        drain.join()
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    status = json.loads((tmp_path / "out/status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("stopped", "stopped by SIGHUP")
    assert status["checkpoint"]["step"] == status["step"] > 0
    assert any("to continue:" in line for line in status["summary"])


def _read_all(terminal: int, closing: threading.Event) -> None:
    """Keep a terminal's buffer empty until it is closed."""
    while not closing.is_set():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 1 << 16)
