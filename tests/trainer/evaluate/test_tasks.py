"""Tasks and the command line: what they need, and what their records hold."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click.testing
import pytest

from tests.trainer.saved_run import Probe, Run, runner
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.evaluate import evaluate
from trainer.evaluate.generation import Completion, complete_samples
from trainer.evaluate.runner import Runner
from trainer.evaluate.tasks import TaskOptions, make_tasks
from trainer.replica.backend import Compute
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


def test_a_classifier_is_rated_by_its_accuracy(
    tmp_path: Path, model: Path, data: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config, task="classify", num_classes=3)
    run.save(1)
    files = [tmp_path / "validation.jsonl", tmp_path / "other.jsonl"]
    for file in files:
        shutil.copy(data, file)
    runner(run, *make_tasks("loss", TaskOptions(data=files))).run()
    (record,) = run.records
    figures = record["tasks"]["loss"]["figures"]
    assert figures["validation/accuracy"] == figures["other/accuracy"] == record["rating"]
    assert record["rated_by"] == "loss/validation/accuracy"
    assert {"validation/loss", "validation/mcc"} < figures.keys()


@pytest.mark.long
@pytest.mark.usefixtures("vulkan")
def test_vulkan_comes_to_the_figures_of_the_cpu(
    tmp_path: Path, model: Path, data: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config)
    trained = load_trained(run.save(1))
    (task,) = make_tasks("loss", TaskOptions(data=[data]))
    ours, theirs = (task.run(trained, Compute(name, threads=1)) for name in ("wgpu", "cpu"))
    assert ours.figures == pytest.approx(theirs.figures, rel=1e-5)


def test_what_needs_a_language_model_says_so_and_costs_no_other_figure(
    tmp_path: Path, model: Path, data: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config, task="classify", num_classes=3)
    run.save(1)

    def defect(_: Path) -> None:
        raise ZeroDivisionError("by zero")

    tasks = make_tasks("generate,loss", TaskOptions(data=[data], prompts=data))
    runner(run, *tasks, Probe(defect)).run()
    (record,) = run.records
    assert record["state"] == "scored"
    assert "only language models generate" in record["tasks"]["generate"]["error"]
    assert record["tasks"]["probe"] == {"error": "ZeroDivisionError: by zero"}
    assert record["tasks"]["loss"]["figures"].keys() == {"loss", "accuracy", "mcc"}
    assert record["rated_by"] is None, "the first task has no figure, and no other takes its place"


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("loss", "give --data"),
        ("loss,loss", "'loss' twice"),
        ("speed", "'speed' unknown"),
        ("", "'' unknown"),
        ("generate", "give --prompts"),
        ("code", "give --problems"),
    ],
)
def test_tasks_that_lack_something_are_refused_at_the_start(tasks: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_tasks(tasks, TaskOptions())


def test_code_is_not_run_unless_that_is_allowed(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "", "test": "", "entry_point": "f"}))
    with pytest.raises(InputError, match="allow it with --run-code"):
        make_tasks("code", TaskOptions(problems=problems))
    with pytest.raises(InputError, match="give --temperature"):
        make_tasks("code", TaskOptions(problems=problems, run_code=True, samples=2))


def test_code_that_a_model_writes_is_run_and_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes is right for one of the two problems: a mean of one half."""
    run.save(1)

    def written(*arguments: Any) -> list[Completion]:
        made = complete_samples(*arguments)
        return [replace(completion, text="    return 1\n") for completion in made]

    monkeypatch.setattr("trainer.evaluate.tasks.complete_samples", written)
    problems = [
        {
            "prompt": "def f():\n",
            "test": f"def check(f):\n    assert f() == {value}",
            "entry_point": "f",
        }
        for value in (1, 2)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    material = TaskOptions(
        problems=path, run_code=True, samples=2, temperature=1.0, max_new_tokens=4
    )
    try:
        tasks = make_tasks("code", material)
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")
    runner(run, *tasks).run()
    (record,) = run.records
    assert record["tasks"]["code"]["figures"] == {"pass@1": 0.5}
    assert (record["rated_by"], record["rating"]) == ("code/pass@1", 0.5)
    right, wrong = record["tasks"]["code"]["samples"]
    assert (right["passed"], right["reason"]) == (2, "")
    assert (wrong["passed"], wrong["reason"]) == (0, "AssertionError")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give MODEL or --watch DIR"),
        (("model", "--watch", "run"), "give MODEL or --watch DIR"),
        (("model",), "give --data FILE"),
        (("model", "--data", "a", "--data", "b"), "give --data once"),
    ],
)
def test_what_the_command_line_lacks(arguments: tuple[str, ...], message: str) -> None:
    result = click.testing.CliRunner().invoke(evaluate, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_runners_on_two_cards_of_a_host_have_two_names(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(Runner, "run", lambda self: names.append(self._options.name))
    words = ["--watch", str(tmp_path), "--data", str(data)]
    for more in ([], ["--gpu", "0000:0b:00.0"], ["--gpu", "AMD/ATI"], ["--runner", "mine"]):
        click.testing.CliRunner().invoke(evaluate, [*words, *more], catch_exceptions=False)
    host = socket.gethostname()
    assert names == [host, f"{host}-0000:0b:00.0", f"{host}-AMD-ATI", "mine"]


def test_names_of_keys_are_of_data_and_prompts(
    tmp_path: Path, model: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config)
    trained = load_trained(run.save(1))
    for key in ("text", "body"):
        lines = (json.dumps({key: text}) + "\n" for text in ("echo hello", "mkdir build"))
        (tmp_path / f"{key}.jsonl").write_text("".join(lines))

    def outcomes(key: str, columns: dict[str, str] | None) -> list[Any]:
        file = tmp_path / f"{key}.jsonl"
        material = TaskOptions(data=[file], prompts=file, columns=columns, max_new_tokens=4)
        tasks = make_tasks("loss,generate", material)
        found = [task.run(trained, Compute("cpu", threads=1)) for task in tasks]
        return [(each.figures, each.samples) for each in found]

    assert outcomes("body", {"text": "body"}) == outcomes("text", None)
