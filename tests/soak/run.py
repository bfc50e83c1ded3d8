"""One soak from its first process to its report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.session.processes import ProcessIdentity, describe_process
from tests.soak import room, verdict
from tests.soak.clock import ClockError, Clocks
from tests.soak.cluster import SoakCluster
from tests.soak.faults import Injection, Injector
from tests.soak.recovery import recoveries
from tests.soak.report import Report
from tests.soak.schedule import COORDINATOR, WORKERS, Fault, draw
from tests.soak.timeline import Recorder

SETTLED = 90.0
"""Seconds after the last fault within which all workers must be back, and training."""
STANDSTILL = 120.0
"""Seconds without a step after which a soak is given up: nothing will come any more."""
_PROGRESS = 30.0
_PROCESSES = (COORDINATOR, *WORKERS)
Say = Callable[[str], None]


def soak(
    folder: Path, seed: int, minutes: float, count: int, say: Say, exchange: str = "plain"
) -> Report:
    """Run it, leave nothing running, and return what was found.

    Raises:
        LaunchError: the run did not start.
        ValueError: there are more faults than the time has room for.
    """
    left_out: dict[str, str] = {}
    clocks = None
    try:
        clocks = Clocks(folder / "clocks")
    except ClockError as error:
        left_out["clock jump"] = str(error)
    if not room.is_entered():
        left_out["full disk"] = "no user namespaces here, so no small disk without root"
    faults = draw(seed, minutes * 60, count, left_out)
    for kind, why in left_out.items():
        say(f"left out: {kind}: {why}")
    cluster = SoakCluster(folder, seed, clocks, exchange)
    if room.is_entered():
        room.mount_small_disk(cluster.disk)
    cluster.prepare()
    try:
        cluster.up()
        say(f"run {cluster.run_id} is up; {count} faults in {minutes:g} min, seed {seed}")
        recorder = Recorder(cluster.metrics, lambda: _living(cluster))
        injections = _disturb(cluster, recorder, faults, minutes, say)
        seconds = recorder.now
        _wait_until_steady(recorder)
        given_up = cluster.given_up()
        down = cluster.down()
        left = [describe_process(process) for process in cluster.living()]
        recorder.stop()
    finally:
        cluster.end()
    say("down; comparing with a run without faults")
    after = recoveries(injections, recorder.timeline)
    outcome = verdict.Outcome(injections, after, recorder.timeline.usage, given_up, down, left)
    report = Report(
        seed=seed,
        seconds=seconds,
        **verdict.steps(cluster),
        injections=injections,
        recoveries=after,
        checks=verdict.judge(cluster, outcome, count),
        usage=recorder.timeline.usage,
        left_out=left_out,
        folder=str(folder),
    )
    shutil.copytree(cluster.disk, folder / "kept", symlinks=True)  # the disk ends with this process
    if room.is_entered():
        room.unmount(cluster.disk)
    return report


def _disturb(
    cluster: SoakCluster, recorder: Recorder, faults: Sequence[Fault], minutes: float, say: Say
) -> list[Injection]:
    """Carry all faults out, each at its time, and return what happened once all are healed."""
    injector = Injector(cluster, lambda: recorder.now)
    recorder.start()
    try:
        for number, fault in enumerate(faults):
            _wait_until(fault.at, recorder, number, minutes, say)
            if recorder.silence > STANDSTILL:
                say(f"no step for {STANDSTILL:.0f} s: given up")
                break
            injector.begin(fault)
    finally:
        injections = injector.finish()
    return injections


def _living(cluster: SoakCluster) -> dict[str, ProcessIdentity]:
    """Return coordinator, workers and their supervisors by name, those that live."""
    found: dict[str, ProcessIdentity] = {}
    for name in _PROCESSES:
        pair = cluster.pair(name)
        if pair.supervisor is not None:
            found[f"supervisor of {name}"] = pair.supervisor
        if pair.child is not None:
            found[name] = pair.child
    return found


def _wait_until(at: float, recorder: Recorder, done: int, minutes: float, say: Say) -> None:
    while (left := at - recorder.now) > 0 and recorder.silence <= STANDSTILL:
        before = recorder.now // _PROGRESS
        time.sleep(min(left, 0.1))
        if recorder.now // _PROGRESS > before:
            here = len(recorder.timeline.present)
            commits = len(recorder.timeline.commits)
            say(
                f"{recorder.now / 60:5.1f} of {minutes:g} min: {done} faults, {commits} commits, "
                f"{here} of {len(WORKERS)} workers"
            )


def _wait_until_steady(recorder: Recorder) -> None:
    """Wait until all workers are members, and have finished some steps together."""
    deadline = time.monotonic() + SETTLED
    wanted = 0
    while time.monotonic() < deadline:
        commits = len(recorder.timeline.commits)
        if len(recorder.timeline.present) < len(WORKERS):
            wanted = commits + 3
        elif commits >= wanted > 0:
            return
        wanted = wanted or commits + 3
        time.sleep(0.05)
