"""What a soak left behind, read from disk and handed to the checks."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.soak import checks, room
from tests.soak.checks import Check
from tests.soak.cluster import KEEP_LAST, SAMPLES, SoakCluster
from tests.soak.faults import Injection
from tests.soak.recovery import Recovery
from tests.soak.reference import ReferenceRunError, undisturbed_losses
from tests.soak.timeline import Usage
from trainer.checkpoint.reader import complete_checkpoints, read_run
from trainer.tracking.metrics import read_metrics


@dataclass(frozen=True)
class Outcome:
    """What was seen of a run while it lived."""

    injections: Sequence[Injection]
    recoveries: Sequence[Recovery]
    usage: Mapping[tuple[str, int], Sequence[Usage]]
    given_up: Sequence[str]
    """Processes that were not kept running any more before `down`."""
    down: subprocess.CompletedProcess[str]
    left: Sequence[str]
    """Processes that were there after `down`."""


def judge(cluster: SoakCluster, outcome: Outcome, drawn: int) -> list[Check]:
    """Return every check of a soak with `drawn` faults."""
    records = read_metrics(cluster.metrics)
    steps = [record for record in records if record["kind"] == "step"]
    events = [record for record in records if record["kind"] == "event"]
    complete = complete_checkpoints(cluster.checkpoints)
    last = read_run(complete[0]) if complete else {"step": 0, "weights_digest": ""}
    return [
        checks.injected(outcome.injections, drawn),
        checks.links({name: proxy.connections for name, proxy in cluster.proxies.items()}),
        checks.recovered(outcome.recoveries),
        checks.kept_running(outcome.given_up),
        checks.saved(len(steps), last["step"], outcome.down.returncode, outcome.down.stderr),
        checks.ledger(steps, SAMPLES, cluster.samples),
        checks.proofs(events, len(steps), last["weights_digest"]),
        _loss(cluster, [step["loss"] for step in steps]),
        *checks.growth(outcome.usage),
        _files(cluster),
        checks.processes(outcome.left, _is_listening(cluster.port)),
    ]


def steps(cluster: SoakCluster) -> dict[str, int]:
    """Count the steps of the run, and those that a restarted coordinator took back."""
    valid, ever = (
        sum(record["kind"] == "step" for record in read_metrics(cluster.metrics, abandoned=both))
        for both in (False, True)
    )
    return {"steps": valid, "taken_back": ever - valid}


def _loss(cluster: SoakCluster, ours: Sequence[float]) -> Check:
    try:
        theirs = undisturbed_losses(cluster, len(ours))
    except ReferenceRunError as error:
        return Check("loss", False, str(error))
    tolerance = checks.TOLERANCE if cluster.inner_steps == 1 else checks.ROUNDS_TOLERANCE
    return checks.loss(ours, theirs, SAMPLES // cluster.samples, tolerance)


def _files(cluster: SoakCluster) -> Check:
    kept = [
        str(path.relative_to(cluster.folder))
        for folder in (cluster.output, cluster.disk)
        for path in folder.rglob("*")
    ]
    temporary = [path.name for path in cluster.temporary.iterdir()]
    if room.is_entered():
        temporary += [path.name for path in Path("/dev/shm").iterdir()]
    names = [path.name for path in cluster.checkpoints.iterdir()]
    folders = [name for name in names if re.fullmatch(r"step-\d+", name)]
    return checks.files(kept, temporary, len(folders), KEEP_LAST)


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False
