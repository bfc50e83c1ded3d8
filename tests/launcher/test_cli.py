"""The command line: light imports, one line for an error, exit codes, JSON and completion."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import cli, run
from launcher.hosts.fleet import LOOK
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.runs.cluster import Cluster
from tests import ROOT
from tests.ports import free_port

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "numpy",
    "ansible",
    "pydantic",
    "rich",
    "cryptography",
    "fabric",
    "paramiko",
    "yaml",
    "starlette",
    "uvicorn",
    "prometheus_client",
)
LIGHT_OF_TRAINER = {
    "trainer",
    "trainer.system",
    "trainer.system.commandline",
    "trainer.system.commandline.lazy_group",
    "trainer.system.commandline.number",
    "trainer.system.commandline.streams",
    "trainer.system.commandline.options",
    "trainer.system.commandline.sanitize",
    "trainer.system.commandline.wrapping",
    "trainer.system.errors",
    "trainer.system.timestamp",
}

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["cluster", "--help"], ["cluster", "up", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom launcher.cli import run\n"
        f"code = run({arguments!r})\n"
        "trainer = {name for name in sys.modules if name.split('.')[0] == 'trainer'}\n"
        f"heavy = {{*{HEAVY!r}}} & {{*sys.modules}} | trainer - {LIGHT_OF_TRAINER!r}\n"
        "print('LOADED', *heavy)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[0].startswith("Usage: launch")
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_every_listed_command_exists_and_its_help_line_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import click

    def visit(group: click.Group, path: list[str]) -> int:
        context = click.Context(group)
        count = 0
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            assert command.help
            if isinstance(command, click.Group):
                count += visit(command, [*path, name])
            else:
                assert run([*path, name, "--help"]) == 0
                long = capsys.readouterr().out
                assert "Usage: launch" in long
                assert "-h, --help" in long
                assert run([*path, name, "-h"]) == 0
                assert capsys.readouterr().out == long
                count += 1
        return count

    assert visit(cli, []) > 20


@pytest.mark.parametrize("path", [[], ["cluster"], ["distill"], ["queue"], ["sync"]])
def test_a_group_alone_prints_its_help(capsys: pytest.CaptureFixture[str], path: list[str]) -> None:
    assert run(path) == 0
    alone = capsys.readouterr()
    assert alone.err == ""
    for flag in ("-h", "--help"):
        assert run([*path, flag]) == 0
        assert capsys.readouterr() == alone
    assert alone.out.startswith(f"Usage: {' '.join(['launch', *path])} ")
    assert "Commands:" in alone.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nope"], 2, "no command 'nope' (see: launch --help)"),
        (["clustr", "up"], 2, "no command 'clustr'; did you mean: launch cluster"),
        (["cluster", "status"], 2, "no command 'status'; did you mean: launch status"),
        (["up"], 2, "no command 'up'; did you mean: launch cluster up, launch distill up"),
        (["sync", "chekpoints"], 2, "did you mean: launch sync checkpoints"),
        (["cluster", "up", "--lr", "1"], 2, "did you mean: --set optimizer.learning_rate=VALUE"),
        (["cluster", "up", "--workers", "3"], 2, "did you mean: --expect-workers"),
        (["export", "--to", "slurm", "--out", "x"], 2, "did you mean: --into"),
        (["queue", "start"], 2, "did you mean: launch queue run"),
        (["cluster", "up", "--preset", "quikstart"], 2, "did you mean: quickstart"),
        (["distill", "up", "--batch", "1"], 2, "--set student.training.batch_size=VALUE"),
        (["logs", "--lr", "1"], 2, "no option --lr (see: launch logs --help)"),
        (["cluster", "up", "--expect-workers", "0"], 2, "0 is not in the range"),
        (["cluster", "up", "--preset", "a", "--config", "b"], 2, "not both"),
        (["cluster", "up", "--config", "absent.yaml"], 2, "no config file and no preset"),
        (["cluster", "up", "--set", "training.epochs"], 2, "--set training.epochs: give KEY=VALUE"),
        (["cluster", "up", "--set", "training.epoch=2"], 2, "training.epoch: unknown key"),
        (["cluster", "up", "--set", "training.epochs=many"], 2, "training.epochs:"),
        (
            ["cluster", "up", "--set", "training.epochs=null"],
            2,
            "training.epochs: must not be null",
        ),
        (["cluster", "up", "--set", "nope.x=null"], 2, "nope: unknown key (allowed: "),
        (["cluster", "up", "-e", "=1"], 2, "-e =1: give KEY=VALUE"),
        (["cluster", "up", "--inventory", "absent.yml"], 2, "absent.yml: the file does not exist"),
        (["runs", "-i", "absent.yml", "--nodes", "a,b"], 2, "--inventory or --nodes, not both"),
        pytest.param(
            ["runs", "--nodes", "no-such.invalid"],
            3,
            "no-such.invalid does not resolve",
            marks=pytest.mark.needs("ssh"),
        ),
        (["cluster", "up", "-e", "motley_prot=1"], 2, "unknown variable motley_prot"),
        (["logs", "worker-2"], 2, "no run has been started here"),
        (
            ["certificates", "-o", "absent", "--ranks", "1", "--run-id", "Run"],
            2,
            "'Run' is not a run's name",
        ),
        (["status", "--run", "nope-1"], 2, "no run nope-1"),
        (["status", "--run", "../../etc"], 2, "no run ../../etc"),
    ],
)
def test_a_mistake_is_one_line_and_a_documented_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("launch: ")


def test_json_errors_are_objects_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--run", "nope-1", "--json"]) == 2
    tree = json.loads(capsys.readouterr().out)
    assert (tree["schema"], tree["exit_code"]) == ("motley.error/1", 2)


def test_a_defect_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("launcher.runs.cluster.find_run", broken)
    assert run(["status"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "launch: a defect in Motley: RuntimeError: two lines (set MOTLEY_DEBUG=1 for the traceback)"
    ]


def test_nothing_started_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "none"
    assert run(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": "motley.runs/1", "runs": []}
    assert run(["cluster", "down"]) == 0
    assert capsys.readouterr().out == "nothing was running\n"


@pytest.mark.long
def test_hosts_that_are_busy_are_waited_for(
    silent_hosts: dict[Any, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(host: Host) -> LocalConnection:
        time.sleep(LOOK + 1)
        return LocalConnection()

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"all": {"hosts": {"busy": {"ansible_host": "10.0.0.1"}}}}))
    for view in (["status"], ["logs"], ["runs"]):
        silent_hosts.clear()
        assert run([*view, "-i", str(inventory)]) == (2 if view == ["logs"] else 0)
        said = capsys.readouterr().err
        assert said.splitlines()[0] == "querying busy ..."
        assert "no answer" not in said
    silent_hosts.clear()
    assert run(["cluster", "down", "-i", str(inventory)]) == 0
    assert capsys.readouterr().out == "nothing was running\n"


def test_a_dry_run_prints_the_commands_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["cluster", "up", "-n", "2", "--dry-run", "--set", "training.epochs=7"]
    assert run([*arguments, "-e", "motley_devices=[{backend: cpu, threads: 3}]"]) == 0
    out = capsys.readouterr().out
    assert "--role coordinator" in out
    assert "--rank 0" in out
    assert "--threads 3" in out
    assert "--rank 1" in out
    assert not (tmp_path / "state").exists()
    assert run([*arguments, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == "motley.plan/2"
    assert len(tree["processes"]) == 3


@pytest.mark.needs("ssh")
def test_hosts_over_ssh_are_planned_without_asking_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inventory = tmp_path / "hosts.yml"
    closed = free_port()
    inventory.write_text(
        "all:\n  hosts:\n    intel:\n      ansible_host: 127.0.0.1\n"
        f"      ansible_port: {closed}\n      motley_bind_address: 192.0.2.1\n"
        "      motley_devices: [{backend: cpu}]\n"
    )
    arguments = ["cluster", "up", "-i", str(inventory)]
    assert run([*arguments, "--dry-run"]) == 0
    assert "# intel (SSH to 127.0.0.1" in capsys.readouterr().out
    assert run(arguments) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"host intel: 127.0.0.1 port {closed} refused the connection" in said


@pytest.mark.needs("ssh")
def test_every_line_of_a_refusal_says_who_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "up", "--nodes", "127.0.0.1,127.0.0.2", "-e", "ansible_port=1"]) == 3
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("launch: host 127.0.0.") for line in said)


def test_doctor_shows_every_check_with_its_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "absent")
    assert run(["doctor", "--model", missing, "--data", missing, "--json"]) == 4
    captured = capsys.readouterr()
    tree, _ = json.JSONDecoder().raw_decode(captured.out)
    checks = {check["name"]: check for check in tree["checks"]}
    assert {"trainer", "devices", "state", "port", "model", "data", "output", "memory"} <= set(
        checks
    )
    assert checks["model"]["status"] == "fail"
    assert checks["model"]["remedy"]
    assert "checks failed" in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("completion bash", ""),
        ("plan --json", "launch: give either --model"),  # an error as JSON, too
    ],
)
def test_output_to_a_closed_pipe_is_quiet(words: str, said: str) -> None:
    command = f"{sys.executable} -m launcher.cli {words} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_slow_inventory_is_noted_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = threading.Event()

    def load(*_: object, **__: object) -> tuple[Host, ...]:
        assert said.wait(20.0 if terminal else 0.1) == terminal
        return (Host(name="here", connection="local", devices=()),)

    monkeypatch.setattr("launcher.runs.cluster.load_inventory", load)
    monkeypatch.setattr("launcher.terminal.note", lambda _: said.set())
    monkeypatch.setattr("trainer.system.process.slow_log.PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    hosts = Cluster(None).hosts
    assert [host.name for host in hosts] == ["here"]
    assert capsys.readouterr().out == ""
