"""Checks: each reports its finding and a remedy. `launch doctor` and every `up` run them.

A probe is mostly a question that a host answers through its connection. All are made at once, each
with a deadline, so a hanging file system costs one line and not the start. `inspection.py` declares
them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.agent.checks.finding import Finding, Result
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from trainer.system.received import receive

DEADLINE = 15.0
"""Seconds that a check may take by default."""


@dataclass(frozen=True)
class Probe:
    """A check to run: its name, its host, and the function for it."""

    name: str
    host: str
    ask: Callable[[], Finding]
    deadline: float = DEADLINE
    """Seconds."""


def ask_finding(
    connection: Connection, question: str, arguments: Mapping[str, Any], deadline: float = DEADLINE
) -> Finding:
    """Return a host's own finding; an error is a failed check."""
    try:
        # The probe's own deadline comes first, with a remedy; this one ends the request.
        answer = connection.call(question, arguments, deadline + 5)
    except (LauncherError, OSError) as error:
        return Finding("fail", str(error))
    try:
        return receive(Finding, answer, question, lines=True)
    except ValueError as error:
        return Finding("fail", f"invalid answer: {error}")


def examine(probes: Sequence[Probe]) -> list[Result]:
    """Run every probe at once and return the checks in the given order.

    A probe that misses its deadline has failed; its thread, a daemon, is abandoned.
    """
    answers: queue.SimpleQueue[tuple[int, Finding]] = queue.SimpleQueue()

    def answer(index: int, probe: Probe) -> None:
        try:
            answers.put((index, probe.ask()))
        except Exception as error:  # a check must not end the others; its defect is its finding
            answers.put(
                (index, Finding("fail", f"the check failed with an internal error: {error!r}"))
            )

    began = time.monotonic()
    for index, probe in enumerate(probes):
        threading.Thread(target=answer, args=(index, probe), daemon=True).start()
    findings: dict[int, Finding] = {}
    while waiting := [probe for index, probe in enumerate(probes) if index not in findings]:
        left = began + max(probe.deadline for probe in waiting) - time.monotonic()
        try:
            index, finding = answers.get(timeout=max(0.0, left))
        except queue.Empty:
            break
        findings[index] = finding
    return [
        Result(probe.name, probe.host, found.status, found.detail, found.remedy)
        for index, probe in enumerate(probes)
        for found in (findings.get(index) or _late(probe),)
    ]


def _late(probe: Probe) -> Finding:
    return Finding(
        "fail", f"no answer within {probe.deadline:.0f} s", "a disk or network mount may be hanging"
    )
