"""What `launch cluster up --resume` would start, by the command itself with --dry-run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli import cli
from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan import configuration
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from launcher.runs.records.registry import Registry
from launcher.runs.records.stored_configs import StartArguments, store_config
from trainer.system.errors import InputError

Resume = Callable[..., Result]
KEPT = Path("state/configs/run-1.start.json")


@pytest.fixture
def resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """Leave a run of two workers on port 9777; the inventory says 9555 and one device."""
    state = tmp_path / "state"
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(state))
    variables = {
        "ansible_connection": "local",
        "motley_devices": [{"backend": "cpu"}],
        "motley_fill_with_cpu": True,
        "motley_port": 9555,
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"all": {"hosts": {"localhost": variables}}}))
    overrides = {"optimizer.learning_rate": 0.002, "output": str(tmp_path / "output")}
    config = configuration.resolve_config("quickstart", overrides, tmp_path)
    cpu = (Device("cpu", "cpu"),)
    host = Host(name="localhost", connection="local", devices=cpu, fill_with_cpu=True, port=9777)
    setting = PlanContext(
        run_id="run-1", trainer_command=("t",), state_folder=str(state), routes={}
    )
    _, record = Registry.for_this_user().record_run(place_run([host], config, 2, setting))
    folder = state / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_bytes(record)
    (folder / "run.yaml").write_text(config.to_yaml())
    start = StartArguments(extra_vars=("motley_port=9777", "ansible_password=secret"))
    store_config("run-1", config.to_yaml().encode(), start)

    def go(*words: str) -> Result:
        command = ["-i", str(inventory), "--resume", "run-1", "--dry-run", *words]
        return CliRunner().invoke(cli, ["cluster", "up", *command])

    return go


def test_it_comes_back_with_the_workers_and_the_port_of_its_start(resume: Resume) -> None:
    same = resume("--set", "training.epochs=9")
    assert same.exit_code == 0
    assert same.stderr == "resuming run-1 -e motley_port=9777 --expect-workers 2\n"
    assert "--bind 127.0.0.1:9777 --expect-workers 2" in same.stdout


def test_what_is_given_again_counts_and_what_differs_is_named(
    resume: Resume, tmp_path: Path
) -> None:
    other = resume("-n", "1", "-e", "motley_port=9888")
    assert "--bind 127.0.0.1:9888 --expect-workers 1" in other.stdout
    port = "coordinator: 127.0.0.1:9777 on localhost before, now 127.0.0.1:{} on localhost"
    gone = "worker-1: cpu on localhost before, now not there"
    assert other.stderr.splitlines()[1:] == [port.format(9888), gone]
    (tmp_path / KEPT).unlink()  # as on another laptop
    elsewhere = resume()
    assert "--expect-workers 2" in elsewhere.stdout
    assert elsewhere.stderr.splitlines()[1:] == [port.format(9555)]


def test_a_setting_that_a_run_keeps_to_its_end_is_refused_by_its_key(resume: Resume) -> None:
    words = ["--set", "optimizer.learning_rate=0.003", "--set", "training.seed=7"]
    refused = resume(*words)
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception) == (
        "--resume run-1: a run keeps these settings until its end: optimizer.learning_rate: "
        "0.002 -> 0.003, training.seed: 0 -> 7; leave them out, or start a new run"
    )


@pytest.mark.usefixtures("resume")
def test_no_password_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / KEPT
    assert kept.stat().st_mode & 0o777 == 0o600
    assert json.loads(kept.read_text())["extra_vars"] == ["motley_port=9777"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("training.epochs=many", "training.epochs: input should be a valid integer"),
        ("training.epoch=2", "training.epoch: unknown key"),
        ("model.adapter=a/b", "model.adapter needs method lora"),
    ],
)
def test_a_wrong_setting_is_refused_by_what_was_typed(
    resume: Resume, setting: str, problem: str
) -> None:
    refused = resume("--set", setting, "--set", "method=full")
    assert isinstance(refused.exception, InputError)
    message = str(refused.exception)
    assert message.startswith("--resume run-1: ")
    assert problem in message
    assert "/motley-" not in message
