"""`launch queue` with real processes and a stand-in trainer: its worker is killed on the way."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.cluster.stand_in_cluster import LAUNCH, Cluster, cluster
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]


def test_two_runs_follow_each_other_though_the_worker_is_killed(cluster: Cluster) -> None:
    hosts = ["--inventory", str(cluster.inventory)]
    ids: list[str] = []
    for _ in range(2):
        job = [*hosts, *cluster.config, "-n", "1", "--preset", "quickstart", "--json"]
        ids.append(json.loads(cluster.launch("queue", "add", *job).stdout)["id"])

    def ends() -> dict[str, Any]:
        found = {run_id: cluster.state / "queue" / f"{run_id}.end" for run_id in ids}
        return {name: json.loads(end.read_text()) for name, end in found.items() if end.exists()}

    first = cluster.open([*LAUNCH, "queue", "run", *hosts])
    wait_for(lambda: cluster.training["state"] == "running", "the first run trains")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    cluster.behave(steps=3)  # of the second run
    second = cluster.open([*LAUNCH, "queue", "run", *hosts])
    assert second.stderr is not None
    assert ids[0] in second.stderr.readline()  # it follows the first run, which was left alone
    assert (ends(), cluster.runs()) == ({}, ids[:1])
    refused = cluster.launch("queue", "remove", *hosts, ids[0])
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)

    assert cluster.launch("cluster", "down", "--run", ids[0]).returncode == 0
    wait_for(lambda: len(ends()) == 2, "both runs are over")
    second.send_signal(signal.SIGINT)
    second.communicate()
    assert second.returncode == 130
    stopped, completed = (ends()[run_id] for run_id in ids)
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 6)
    assert (completed["state"], completed["exit_code"]) == ("completed", 0)
    assert sorted(cluster.runs()) == sorted(ids)
    listed = cluster.launch("queue", "list", *hosts).stdout.splitlines()
    assert [line.split(":")[0] for line in listed] == ids
