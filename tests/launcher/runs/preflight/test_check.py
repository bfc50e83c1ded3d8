"""Every check finds what it is there for, says what to do, and cannot hang the start."""

import threading
from collections.abc import Callable

from launcher.agent.checks.finding import Finding
from launcher.hosts.base import Connection
from launcher.hosts.local import LocalConnection
from launcher.runs.preflight.check import Check, HostCheck, run_checks


def of_intel(
    name: str, find: Callable[[Connection], Finding], deadline: float = 5.0, remedy: str = ""
) -> HostCheck:
    return HostCheck(Check(name, "hosts", "", remedy, {}), "intel", find, deadline)


def test_a_check_that_hangs_or_breaks_costs_one_line() -> None:
    never = threading.Event()

    def hang(_: Connection) -> Finding:
        never.wait()
        return Finding("ok", "")

    def broken(_: Connection) -> Finding:
        raise RuntimeError("oh")

    asked = [
        of_intel("share", hang, deadline=0.5),
        of_intel("model", broken),
        of_intel("port", lambda _: Finding("ok", "fine")),
    ]
    checks = run_checks(asked, {"intel": LocalConnection()})
    never.set()
    assert [(check.name, check.status) for check in checks] == [
        ("share", "fail"),
        ("model", "fail"),
        ("port", "ok"),
    ]
    assert "no answer within" in checks[0].detail
    assert checks[0].line.startswith("intel: share: no answer")


def test_a_finding_without_a_remedy_has_that_of_its_check() -> None:
    remedies = [
        of_intel("clock", lambda _, found=found: found, remedy="`timedatectl` sets it")
        .run(LocalConnection())
        .remedy
        for found in (
            Finding("warn", "+3 s"),
            Finding("fail", "+80 s", "wait for its time service"),
            Finding("ok", "+0 s"),
        )
    ]
    assert remedies == ["timedatectl sets it", "wait for its time service", ""]
