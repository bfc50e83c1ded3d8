"""What follows from model and data is asked of the coordinator's host; its answer is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.options import config_order
from launcher.errors import ConfigError, PreflightError
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.preflight.derived_settings import derive_data_settings
from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig

GIB = 1 << 30
CPU = (Device("cpu", "cpu"),)
CARD = (Device("cuda", "GPU-1", memory=8 * GIB),)


class Answering(LocalConnection):
    """A host that answers as it likes, and tells what it was asked."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def call(self, name: str, arguments: Any = None, deadline: float = 0.0) -> Any:
        assert name == "own_settings"
        self.asked = dict(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return super().call(name, arguments) if self.answer is None else self.answer


def run_of_own(
    folder: Path, devices: tuple[Device, ...] = CPU, *settings: str
) -> tuple[RunConfig, set[str], LaunchPlan, Host]:
    model, data = str(folder / "model"), str(folder / "train.jsonl")
    flags = {"preset": None, "config": None, "settings": settings, "output": str(folder / "out")}
    flags |= {"model": model, "data": data}
    host = Host(name="here", connection="local", devices=devices, memory=16 * GIB)
    host_setting = PlanContext(run_id="run-1", trainer_command=("t",), state_folder="/s", routes={})
    order = config_order(**flags)
    given, config = order.derived_settings, order.resolve_job([host])
    assert given is not None
    assert isinstance(config, RunConfig)
    return config, given, place_run([host], config, None, host_setting), host


def follow(connection: LocalConnection, folder: Path, *settings: str) -> Any:
    config, given, plan, host = run_of_own(folder, CPU, *settings)
    found = Survey(hosts=(host,), connections={"here": connection})
    return derive_data_settings(config, given, plan, found)


def test_the_settings_come_from_the_data_and_are_said(tmp_path: Path) -> None:
    write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl", 100))
    config, lines = follow(LocalConnection(), tmp_path, "training.batch_size=4")
    assert (config.task, config.num_classes) == ("classify", 3)
    assert config.data.validation_fraction == 0.1
    assert config.training.batch_size == 4
    assert config.data.train == str(tmp_path / "train.jsonl")
    assert lines[0] == f"settings by data and model, all of them in {tmp_path}/out/run.yaml:"
    assert any(line.split()[:2] == ["data.validation_fraction", "0.1"] for line in lines)
    assert "training.batch_size" not in "".join(lines)


def test_labels_that_are_words_and_a_mixture(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    write_model(tmp_path / "model", write_data(data, 100))
    rows = [{"text": f"echo {n}", "label": ("spam", "ham")[n % 2]} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, lines = follow(LocalConnection(), tmp_path)
    assert (config.task, config.class_names) == ("classify", ("ham", "spam"))
    assert any(line.split()[:3] == ["class_names", "ham,", "spam"] for line in lines)
    data.write_text('{"text": "x"}\n' + data.read_text())
    with pytest.raises(ConfigError, match="none in 1 line"):
        follow(LocalConnection(), tmp_path)


def test_nothing_follows_from_data_that_is_not_there(tmp_path: Path) -> None:
    config, lines = follow(LocalConnection(), tmp_path)
    assert (config.task, lines) == ("causal-lm", [])


@pytest.mark.parametrize(
    ("devices", "room"),
    [
        (CPU, {"memory": 6 * GIB, "backend": "cpu"}),  # beside the coordinator, of 3/4
        (CARD, {"memory": 8 * GIB, "backend": "cuda"}),
        ((Device("wgpu", "0000:03:00.0"),), None),
    ],
)
def test_the_memory_of_each_worker_counts(
    tmp_path: Path, devices: tuple[Device, ...], room: dict[str, Any] | None
) -> None:
    config, given, plan, host = run_of_own(tmp_path, devices)
    connection = Answering([])
    derive_data_settings(
        config, given, plan, Survey(hosts=(host,), connections={"here": connection})
    )
    assert connection.asked["rooms"] == ([] if room is None else [{**room, "coordinates": False}])


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            ValueError("no question 'own_settings' is known here"),
            PreflightError,
            "host localhost: no q",
        ),
        ({"key": "task"}, PreflightError, "host localhost: own_settings: "),
        ([{"key": "num_classes", "value": 4000, "why": ""}], ConfigError, "num_classes"),
    ],
)
def test_an_answer_that_is_none_is_one_line(
    tmp_path: Path, answer: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        follow(Answering(answer), tmp_path)


def test_a_host_settles_nothing_else(tmp_path: Path) -> None:
    keys = ("model.path", "output", "data.train", "training.seed", "training.epochs")
    answer = [{"key": key, "value": 7, "why": "so"} for key in keys]
    config, lines = follow(Answering(answer), tmp_path, "training.seed=1")
    assert (config.training.seed, config.training.epochs) == (1, 7)
    assert config.model.path == str(tmp_path / "model")
    assert len(lines) == 2
