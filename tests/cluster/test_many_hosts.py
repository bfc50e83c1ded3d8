"""Runs over three hosts: agents behind pipes, each with a state folder and a disk of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.session.processes import find_run, identify_process
from tests import ROOT
from tests.forked import Program, run
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

STAND_IN = ROOT / "tests" / "launcher" / "stand_in_trainer.py"
HOSTS = ("intel", "lambda", "attic")
RUNNING = dict.fromkeys(("coordinator", "worker_0", "worker_1", "worker_2"), "running")


class Cluster:
    """Three hosts, a model and data that all have, and `launch` from any laptop."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.output.mkdir()
        data = folder / "train.jsonl"
        data.write_text('{"input": "ls", "label": 0}\n')
        port = free_port()
        hosts: dict[str, Any] = {
            name: {
                "ansible_host": "127.0.0.1",
                "motley_devices": [{"backend": "cpu"}],
                "motley_trainer_command": [sys.executable, str(STAND_IN)],
            }
            for name in HOSTS
        }
        hosts["intel"] |= {
            "motley_coordinator": True,
            "motley_bind_address": "127.0.0.1",
            "motley_port": port,
        }
        self.inventory = folder / "hosts.yml"
        self.inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
        self.conditions = dict.fromkeys(HOSTS, "up")
        self.become()
        self.config = [
            *("--set", "data.validation=null", "--model", str(model)),
            *("--data", str(data), "--output", str(self.output)),
        ]
        self.behave()

    def become(self, **conditions: str) -> None:
        """Say which hosts are up, dead or silent from now on."""
        self.conditions |= conditions
        tree = {
            name: {"state": str(self.state(name)), "condition": condition}
            for name, condition in self.conditions.items()
        }
        (self.folder / "hosts.json").write_text(json.dumps(tree))

    def behave(self, **behaviour: object) -> None:
        text = json.dumps({name.replace("_", "-"): how for name, how in behaviour.items()})
        (self.output / "behaviour.json").write_text(text)

    def state(self, host: str) -> Path:
        return self.folder / host / "state"

    def command(self, *arguments: str) -> list[str]:
        driver = [sys.executable, "-m", "tests.cluster.piped_launch"]
        return [*driver, str(self.folder / "hosts.json"), *arguments]

    def up_command(self, *flags: str) -> list[str]:
        return self.command("cluster", "up", "--preset", "quickstart", *self.config, *flags)

    def environment(self, laptop: str) -> dict[str, str]:
        own = {
            "MOTLEY_STATE_DIR": str(self.folder / laptop),
            "MOTLEY_INVENTORY": str(self.inventory),
            "NO_COLOR": "1",
        }
        return {**os.environ, **own}

    def launch(self, *arguments: str, laptop: str = "laptop") -> subprocess.CompletedProcess[str]:
        return run(self.command(*arguments), self.environment(laptop))

    def up(self, *flags: str, laptop: str = "laptop") -> subprocess.CompletedProcess[str]:
        words = ("cluster", "up", "--preset", "quickstart", *self.config, *flags)
        return self.launch(*words, laptop=laptop)

    def status(self, *flags: str, laptop: str = "laptop") -> dict[str, Any]:
        done = self.launch("status", "--json", *flags, laptop=laptop)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def see(self, *flags: str, laptop: str = "laptop", **states: str) -> tuple[dict[str, Any], str]:
        """Wait until `status` finds the processes in these states; return it and its stderr.

        A look ends after three seconds, in which a host of a busy machine may not have answered.
        """

        found: list[tuple[dict[str, Any], str]] = []

        def look() -> bool:
            done = self.launch("status", "--json", *flags, laptop=laptop)
            tree = json.loads(done.stdout) if done.stdout.startswith("{") else {}
            found[:] = [(tree, done.stderr)]
            seen = {each["name"]: each["state"] for each in tree.get("processes", ())}
            return seen == {name.replace("_", "-"): state for name, state in states.items()}

        wait_for(look, f"a look that finds {states}")
        return found[0]

    def runs(self) -> list[str]:
        return sorted({path.parent.name for path in self.folder.glob("*/state/runs/*/plan.json")})

    def keys(self) -> dict[str, int]:
        """Return how many private keys each host has."""
        return {host: len(list(self.state(host).rglob("key.pem"))) for host in HOSTS}

    def living(self) -> list[Any]:
        return [process for run_id in self.runs() for process in find_run(run_id)]


@pytest.fixture
def cluster(tmp_path: Path, small_model: Path) -> Iterator[Cluster]:
    result = Cluster(tmp_path, small_model)
    yield result
    result.become(**dict.fromkeys(HOSTS, "up"))
    result.launch("cluster", "down", "--all")
    assert result.living() == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_up_status_logs_and_down_from_two_laptops(cluster: Cluster) -> None:
    done = cluster.up("--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["state"], tree["joined"]) == ("running", [0, 1, 2])
    laps = ["inventory", "connect and survey", "preflight", "certificates and files"]
    assert list(tree["timings"]) == [*laps, "start", "join", "first step", "total"]
    for process in tree["processes"]:
        folder = Path(process["folder"])
        assert folder.is_relative_to(cluster.state(process["host"]))
        assert identify_process(process["pid"]) is not None
        assert (folder / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    for host in HOSTS:
        assert (cluster.state(host) / "runs" / tree["run_id"] / "plan.json").exists()
        assert not list(cluster.state(host).rglob("ca-key.pem"))
    assert (cluster.folder / "laptop" / "ca" / "ca-key.pem").exists()

    seen, _ = cluster.see(laptop="other-laptop", **RUNNING)
    assert (seen["run_id"], seen["state"]) == (tree["run_id"], "running")
    assert seen["unreachable"] == {}
    logs = cluster.launch("logs", "worker-2", laptop="other")
    assert logs.stdout == "worker-2 here, work \n", logs.stderr
    (listed,) = json.loads(cluster.launch("runs", "--json", laptop="other").stdout)["runs"]
    assert (listed["run_id"], listed["live"]) == (tree["run_id"], True)
    assert abs(listed["started"] - tree["started"]) < 1e-6

    again = cluster.up(laptop="other-laptop")
    assert again.returncode == 4
    assert f"the cluster is busy: run {tree['run_id']} is running" in again.stderr

    down = cluster.launch("cluster", "down", laptop="other-laptop")
    assert down.returncode == 0, down.stderr
    assert "stopped coordinator, worker-0, worker-1, worker-2" in down.stdout
    assert cluster.living() == []
    assert cluster.status()["state"] == "stopped"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_host_that_does_not_answer_costs_the_others_nothing(cluster: Cluster) -> None:
    assert cluster.up().returncode == 0
    cluster.become(attic="silent")
    tree, _ = cluster.see(**RUNNING | {"worker_2": "unreachable"})
    assert (tree["state"], tree["live"]) == ("running", True)
    assert "attic" in tree["unreachable"]["attic"]
    table = wait_for(lambda: cluster.launch("status").stdout, "a table")
    assert "unreachable" in table
    assert "host attic: no answer" in table

    cluster.become(attic="up", intel="dead")
    gone = {"coordinator": "unreachable", "worker_0": "unreachable"}
    tree, said = cluster.see(**RUNNING | gone)
    assert "host intel: connection refused; from the other hosts:" in said
    assert tree["state"] == "unknown"
    start = cluster.up()
    assert start.returncode == 3
    assert "host intel: connection refused" in start.stderr

    cluster.become(intel="up", attic="dead")
    down = cluster.launch("cluster", "down", "--json")
    assert down.returncode == 5
    tree, _ = json.JSONDecoder().raw_decode(down.stdout)
    assert tree["runs"][0]["unstopped_hosts"] == {"attic": "host attic: connection refused"}
    assert "not stopped on attic: host attic: connection refused" in down.stderr
    assert "repeat when it answers: launch cluster down --run" in down.stderr
    assert cluster.keys() == {"intel": 0, "lambda": 0, "attic": 1}
    cluster.become(attic="up")
    assert cluster.launch("cluster", "down", "--all").returncode == 0
    assert set(cluster.keys().values()) == {0}


def test_hosts_that_do_not_answer_are_all_named_and_nothing_is_started(cluster: Cluster) -> None:
    cluster.become(attic="dead", intel="dead")
    done = cluster.up()
    assert done.returncode == 3
    assert "host intel: connection refused" in done.stderr
    cluster.become(intel="up", **{"lambda": "dead"})
    done = cluster.up()
    assert done.returncode == 3
    assert "host lambda: connection refused" in done.stderr
    assert "host attic: connection refused" in done.stderr
    assert cluster.runs() == []


@pytest.mark.timeout(300)
def test_a_worker_that_fails_far_away_shows_its_last_lines(cluster: Cluster) -> None:
    cluster.behave(worker_2="exit 4")
    done = cluster.up()
    assert done.returncode == 5
    assert "missing: worker-2 (failed, exit code 4); everything was stopped" in done.stderr
    assert "worker-2 on attic, attempt 1" in done.stderr
    assert "worker-2: something specific is wrong" in done.stderr
    assert cluster.living() == []
    (run_id,) = cluster.runs()
    for host in HOSTS:
        assert (cluster.state(host) / "runs" / run_id / "down").exists()


@pytest.mark.timeout(300)
def test_of_two_operators_one_wins_and_the_other_is_told_who(cluster: Cluster) -> None:
    """The first is held at its start until the second has been refused."""
    cluster.behave(worker_0="never join")
    starts = [
        Program(cluster.up_command(), cluster.environment(laptop))
        for laptop in ("laptop", "other-laptop")
    ]
    ended = wait_for(lambda: [start for start in starts if start.poll() is not None], "one ends")
    loser = ended[0]
    winner = next(start for start in starts if start is not loser)
    _, error = loser.communicate()
    assert loser.returncode == 4, error
    busy = "the cluster is busy: run" in error
    # The winner writes its name into the lock that it holds already: until then it came "just now".
    names = f"@{socket.gethostname()} since", "(just now)"
    told = "another launch is starting a run" in error and any(name in error for name in names)
    assert busy or told, error
    winner.send_signal(signal.SIGINT)
    _, error = winner.communicate()
    assert winner.returncode == 130, error
    assert cluster.living() == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_is_resumed_from_another_laptop(cluster: Cluster) -> None:
    assert cluster.up().returncode == 0
    (run_id,) = cluster.runs()
    assert cluster.keys() == {"intel": 2, "lambda": 1, "attic": 1}
    assert cluster.launch("cluster", "down").returncode == 0
    assert set(cluster.keys().values()) == {0}
    again = ("cluster", "up", "--resume", run_id, "--json")
    done = cluster.launch(*again, laptop="other-laptop")
    assert done.returncode == 2, "what a host says alone may not name any path"
    assert (
        "was not started from this machine, and its host's config names model.path" in done.stderr
    )
    assert set(cluster.keys().values()) == {0}
    done = cluster.launch(*again, *cluster.config, laptop="other-laptop")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["run_id"], tree["output"]) == (run_id, str(cluster.output))
    assert cluster.runs() == [run_id]
    assert cluster.keys() == {"intel": 2, "lambda": 1, "attic": 1}
