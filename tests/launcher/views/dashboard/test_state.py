"""What the page is told of a cluster whose hosts come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.inventory.hosts import Host
from launcher.runs.cluster import Cluster
from launcher.views.dashboard.state import ObservedCluster
from tests.launcher.views.dashboard.recorded_run import RUN_ID, RecordedRun, here
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_state")


def test_a_lost_host_is_told_and_hides_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.views.dashboard.state.STALE", 0.0)
    RecordedRun(tmp_path / "state")
    cluster = Cluster(None)
    lost = Host(name="lost", address="127.0.0.1", port=1, link_rates=(("localhost", 1e9),))
    cluster.hosts = (here(tmp_path / "state"), lost)
    observed = ObservedCluster(cluster)

    def settled() -> bool:
        return bool(observed.get_overview()["hosts"][0]["gauges"])

    wait_for(settled, "the readings of this machine")
    overview = observed.get_overview()
    assert [(host["name"], host["reachable"]) for host in overview["hosts"]] == [
        ("localhost", True),
        ("lost", False),
    ]
    assert overview["hosts"][1]["rates"] == {"localhost": 1e9}
    assert [run["run_id"] for run in overview["runs"]] == [RUN_ID]
