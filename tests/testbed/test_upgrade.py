"""From an earlier version to this one: hosts that its recipe has made, and runs that it started.

The laptop of the operator keeps its folder, with the cluster's CA, and gets a newer checkout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.plays import changed, changing_tasks
from tests.testbed.training import (
    RECIPE,
    ROOT,
    Cluster,
    Operator,
    Running,
    leftovers,
    up_flags,
    verified,
)

# Three times an environment with torch is made on three hosts, on two cores.
pytestmark = [pytest.mark.testbed, pytest.mark.timeout(5400)]

EARLIER = "ac501f7"
"""The last commit before the launcher's modules moved into packages."""
CURRENT = "/opt/motley/current"
NAMES = ["head", "w1", "w2"]
PATIENT = ["--set", "exchange.join_deadline=400"]
"""The first import of torch on a new host compiles it, on three hosts at once."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout of the earlier version."""
    archive = ["git", "archive", EARLIER]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"no commit {EARLIER} here: a shallow clone, or no git checkout")
    folder = tmp_path_factory.mktemp("earlier")
    subprocess.run(["tar", "--extract"], cwd=folder, input=packed.stdout, check=True)
    # Its launcher imports what this version no longer depends on.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*install, "fabric>=3.2,<4"], check=True)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, machine: None) -> Iterator[Lab]:
    """Return a lab of this module's own: the hosts of the others have this version."""
    with Lab(tmp_path_factory.mktemp("lab")).up(attached=True) as lab:
        yield lab


@dataclass(frozen=True)
class Upgrade:
    """A cluster of the earlier version whose operator has this one now."""

    cluster: Cluster
    done: Running
    """A run of 20 steps that the earlier version has started and that has ended."""
    between: Running
    """A run that the earlier version has started and that goes on."""


@pytest.fixture(scope="module")
def upgrade(earlier: Path, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgrade]:
    cluster = Cluster(lab, tmp_path_factory.mktemp("cluster"), earlier)
    cluster.operator.play(RECIPE)
    cluster.push_inputs()
    done = Running.start(cluster, *PATIENT, "--set", "training.max_steps=20", "--wait")
    between = Running.start(cluster, *PATIENT)
    cluster.operator = cluster.another_operator("laptop")
    yield Upgrade(cluster, done, between)
    cluster.close()


def skewed(cluster: Cluster) -> dict[str, str]:
    """Return the hosts that have another version than the launcher, with the remedy for each."""
    said = cluster.operator.launch("doctor", "--json", check=False).stdout
    tree, _ = json.JSONDecoder().raw_decode(said)
    found = {check["host"]: check for check in tree["checks"] if check["name"] == "version"}
    assert sorted(found) == NAMES
    return {name: check["remedy"] for name, check in found.items() if check["status"] == "fail"}


def shown(operator: Operator, pattern: str, *arguments: str) -> bool:
    """Whether something that `launch` prints now matches a pattern."""
    return bool(re.search(pattern, operator.launch(*arguments, check=False).stdout))


def named_modules(host: Host) -> set[str]:
    """Return the modules of ours that units, the sudo rule and installed programs name."""
    places = ["/etc/sudoers.d", "/etc/systemd/system", "/usr/local/sbin"]
    command = ["grep", "--recursive", "--no-filename", "motley", *places]
    return set(re.findall(r"-m ((?:launcher|trainer)[\w.]*)", host.exec(command).stdout))


# --- before the hosts have this version ----------------------------------------------------------


def test_runs_of_the_earlier_version_are_seen_as_they_are(upgrade: Upgrade) -> None:
    cluster, done, between = upgrade.cluster, upgrade.done, upgrade.between
    tree = cluster.operator.json("cluster", "status", "--run", done.run_id)
    assert (tree["state"], tree["live"], tree["training"]["step"]) == ("completed", False, 20)
    said = cluster.operator.launch("logs", "worker-2", "--run", done.run_id).stdout
    assert "in the run as rank 2" in said

    between.wait_status(coordinator="running", worker_0="running", worker_2="running")
    between.wait_steps()
    wanted = {
        ("logs", "coordinator"): r"3/3 workers",
        ("runs",): rf"(?m)^{done.run_id} +completed (?s:.*)^{between.run_id} +running ",
    }
    for arguments, pattern in wanted.items():  # not its first answer, see `Running.wait_status`
        between.wait(partial(shown, cluster.operator, pattern, *arguments), f"launch {arguments}")


def test_an_update_waits_for_the_end_of_the_run(upgrade: Upgrade) -> None:
    refused = upgrade.cluster.operator.launch("cluster", "push", check=False)
    assert refused.returncode == 4
    assert "a run is up on head, w1, w2; end it with launch cluster down" in refused.stderr
    upgrade.between.wait_steps()


def test_a_run_of_the_earlier_version_is_ended_in_order(upgrade: Upgrade) -> None:
    cluster, between = upgrade.cluster, upgrade.between
    assert "no process is left" in cluster.operator.launch("cluster", "down").stdout
    assert {host.name: leftovers(host) for host in cluster.hosts} == {n: [] for n in NAMES}
    tree = cluster.operator.status()
    assert (tree["run_id"], tree["state"]) == (between.run_id, "stopped")
    between.check()


def test_a_start_says_that_the_hosts_have_another_version_and_what_to_do(upgrade: Upgrade) -> None:
    cluster = upgrade.cluster
    remedies = skewed(cluster)
    assert sorted(remedies) == NAMES
    assert all(remedy.startswith("launch cluster push") for remedy in remedies.values())
    refused = cluster.operator.launch("cluster", "up", *up_flags(), check=False)
    assert refused.returncode == 4
    first, *others = refused.stderr.splitlines()
    assert "head: version: Motley 0.1.0" in first
    assert "launch cluster push" in first
    assert [line.partition(": version: ")[0] for line in others] == ["w1", "w2"]
    assert {host.name: leftovers(host) for host in cluster.hosts} == {n: [] for n in NAMES}


# --- launch cluster push -------------------------------------------------------------------------


def test_push_brings_this_version_to_hosts_of_the_earlier_recipe(upgrade: Upgrade) -> None:
    cluster = upgrade.cluster
    before = {host.name: named_modules(host) for host in cluster.hosts}
    cluster.operator.launch("cluster", "push", timeout=1500)
    assert skewed(cluster) == {}
    for host in cluster.hosts:
        assert before[host.name] == named_modules(host) == {"launcher.agent", "launcher.session"}
        for module in (*named_modules(host), "launcher.installation"):
            host.exec(
                [f"{CURRENT}/bin/python", "-P", "-c", f"import {module}.__main__"], user="motley"
            )


def test_the_run_of_the_earlier_version_is_resumed(upgrade: Upgrade) -> None:
    cluster, between = upgrade.cluster, upgrade.between
    before = between.step
    files = verified(cluster.w1, f"/srv/motley/checkpoints/{between.run_id}")
    assert f"step-{before:06d}" in files
    cluster.operator.launch("cluster", "up", "--resume", between.run_id)
    between.wait_steps()
    assert between.step > before
    between.check()
    cluster.operator.launch("cluster", "down")
    assert {host.name: leftovers(host) for host in cluster.hosts} == {n: [] for n in NAMES}


def test_a_run_of_this_version_completes_beside_the_earlier_ones(upgrade: Upgrade) -> None:
    cluster = upgrade.cluster
    run = Running.start(cluster, *PATIENT, "--set", "training.max_steps=20", "--wait")
    run.check()
    for run_id in (run.run_id, upgrade.done.run_id):
        tree = cluster.operator.json("cluster", "status", "--run", run_id)
        assert tree["state"] == "completed"
        said = cluster.operator.launch("logs", "worker-2", "--run", run_id).stdout
        assert "the run has ended for this worker" in said


# --- back, and this version's recipe -------------------------------------------------------------


def test_the_recipe_takes_hosts_of_the_earlier_version(upgrade: Upgrade) -> None:
    cluster = upgrade.cluster
    cluster.operator.launch("cluster", "push", "--rollback")
    assert sorted(skewed(cluster)) == NAMES
    cluster.operator.play(RECIPE)
    assert skewed(cluster) == {}
    again = cluster.operator.play(RECIPE)
    assert changed(again) == dict.fromkeys(NAMES, 0), changing_tasks(again)
