"""The card of a run that lost workers, and of one that was killed and resumed."""

from __future__ import annotations

import re
import signal

import pytest

from tests.cluster.real_cluster import Cluster
from trainer.tracking.status import read_status

pytestmark = pytest.mark.cluster


@pytest.mark.smoke("rejoin")
def test_a_worker_that_was_killed_and_came_back_is_on_the_card(cluster: Cluster) -> None:
    cluster.configure(training__epochs=500)
    coordinator = cluster.coordinator(2)
    cluster.worker(0)
    killed = cluster.worker(1)
    cluster.wait_step(2)
    killed.signal(signal.SIGKILL)
    cluster.wait_event("lost", rank=1)
    cluster.worker(1)
    cluster.wait_event("rejoined", rank=1)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    card = read_status(cluster.output / "status.json")["summary"]
    (line,) = [line for line in card if line.startswith("lost and recovered: ")]
    assert "worker 1 lost once, back once" in line
    assert "worker 0" not in line
    said = re.sub(r"^[0-9T:-]+Z ", "", coordinator.text, flags=re.M)
    assert "\n".join(card) + "\n" in said


@pytest.mark.smoke("resume")
def test_steps_that_a_killed_coordinator_had_not_saved_are_repeated(cluster: Cluster) -> None:
    cluster.configure(training__epochs=500, checkpoint__every=4000)
    killed = cluster.coordinator(1)
    cluster.worker(0)
    cluster.wait_step(5)
    killed.kill()
    again = cluster.coordinator(1)
    cluster.wait_event("resumed", step=0)
    cluster.wait_step(5)
    again.signal(signal.SIGTERM)
    assert again.wait() == 0
    card = "\n".join(read_status(cluster.output / "status.json")["summary"])
    found = re.search(r"^lost and recovered: resumed once, (\d+) steps repeated$", card, re.M)
    assert found, card
    assert int(found[1]) >= 5
