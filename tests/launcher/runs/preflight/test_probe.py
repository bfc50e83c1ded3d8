"""Every check finds what it is there for, says what to do, and cannot hang the start."""

import threading

from launcher.agent.checks.finding import Finding
from launcher.runs.preflight.probe import Probe, examine


def test_a_check_that_hangs_or_breaks_costs_one_line() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait()
        return Finding("ok", "")

    def broken() -> Finding:
        raise RuntimeError("oh")

    probes = [
        Probe("share", "intel", hang, deadline=0.5),
        Probe("model", "intel", broken),
        Probe("port", "intel", lambda: Finding("ok", "fine"), deadline=5.0),
    ]
    checks = examine(probes)
    never.set()
    assert [(check.name, check.status) for check in checks] == [
        ("share", "fail"),
        ("model", "fail"),
        ("port", "ok"),
    ]
    assert "no answer within" in checks[0].detail
    assert checks[0].line.startswith("intel: share: no answer")
