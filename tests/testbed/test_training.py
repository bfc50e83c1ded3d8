"""The whole way on bare hosts: recipe, inputs, a run over SSH and NFS, and what is left of it."""

from __future__ import annotations

import json

import pytest

from tests.testbed.plays import changed, changing_tasks
from tests.testbed.training import RECIPE, Cluster, Running, leftovers, verified

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1500)]


def test_a_second_run_of_the_recipe_changes_nothing(cluster: Cluster) -> None:
    again = cluster.operator.play(RECIPE)
    assert changed(again) == {"head": 0, "w1": 0, "w2": 0}, changing_tasks(again)
    # Check mode takes as long again: test_recipes.py, of the nightly run, has it.


def test_every_check_of_the_doctor_passes(cluster: Cluster) -> None:
    flags = ["--model", "inputs/model", "--data", "inputs/data/train.jsonl"]
    done = cluster.operator.launch("doctor", "--json", *flags, "-n", "3", check=False)
    checks, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert [check for check in checks["checks"] if check["status"] == "fail"] == []
    assert done.returncode == 0
    seen = {(check["host"], check["name"]) for check in checks["checks"]}
    assert {(host, "reachable") for host in ("head", "w1", "w2")} <= seen


def test_a_run_from_up_to_its_checkpoints_on_the_share(cluster: Cluster) -> None:
    operator = cluster.operator
    run = Running.start(cluster, "--set", "training.max_steps=60", "--wait")
    print(f"cluster up: {run.timings}")
    status = operator.status()
    assert (status["state"], status["live"]) == ("completed", False)
    assert {process["host"] for process in status["processes"]} == {"head", "w1", "w2"}
    assert len(run.records("step")) == 60
    assert {len(step["worker_samples"]) for step in run.records("step")[-10:]} == {3}
    run.check()
    assert "run finished" in operator.launch("logs", "worker-2").stdout
    other = cluster.another_operator("other-laptop")
    assert other.status()["run_id"] == run.run_id
    assert run.run_id in other.launch("runs").stdout

    # Written by the coordinator on head, kept by w2, verified byte by byte from w1.
    files = verified(cluster.w1, f"/srv/motley/checkpoints/{run.run_id}")
    assert {"model.safetensors", "optimizer.safetensors", "run.json"} <= set(files["step-000060"])

    assert operator.launch("cluster", "down").stdout == "nothing was running\n"
    assert {host.name: leftovers(host) for host in cluster.hosts} == {
        "head": [],
        "w1": [],
        "w2": [],
    }
