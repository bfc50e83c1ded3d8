"""Checks: each reports its finding and a remedy. `launch doctor` and every `up` run them.

A probe is mostly a question that a host answers through its connection. All are made at once, each
with a deadline, so a hanging file system costs one line and not the start. `inspection.py` declares
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.agent.checks.finding import Finding, Result
from launcher.agent.operation import CHECK_DEADLINE
from launcher.errors import LauncherError
from launcher.hosts.fleet import at_once


@dataclass(frozen=True)
class Probe:
    """A check to run: its name, its host, and the function for it."""

    name: str
    host: str
    ask: Callable[[], Finding]
    deadline: float = CHECK_DEADLINE
    """Seconds."""


def examine(probes: Sequence[Probe]) -> list[Result]:
    """Run every probe at once and return the checks in the given order.

    A probe that misses its deadline has failed; its thread, a daemon, is abandoned.
    """
    keyed = {str(number): probe for number, probe in enumerate(probes)}
    deadlines = {key: probe.deadline for key, probe in keyed.items()}
    tasks = {key: partial(_find, probe) for key, probe in keyed.items()}
    answers = at_once(tasks, deadlines, most=len(probes))  # some wait for one another
    return [
        Result(probe.name, probe.host, found.status, found.detail, found.remedy)
        for key, probe in keyed.items()
        for found in (answers.found.get(key) or _late(probe),)
    ]


def _find(probe: Probe) -> Finding:
    try:
        return probe.ask()
    except (LauncherError, OSError) as error:
        return Finding("fail", str(error))
    except Exception as error:  # a check must not end the others; its defect is its finding
        return Finding("fail", f"the check failed with an internal error: {error!r}")


def _late(probe: Probe) -> Finding:
    return Finding(
        "fail", f"no answer within {probe.deadline:.0f} s", "a disk or network mount may be hanging"
    )
