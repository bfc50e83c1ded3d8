"""Every check finds what it is there for, says what to do, and cannot hang the start."""

import threading
from functools import partial

from launcher.agent.checks.finding import Finding
from launcher.errors import UnreachableError
from launcher.hosts.local import LocalConnection
from launcher.runs.preflight.probe import Probe, ask_finding, examine


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


def test_a_question_is_a_probe_and_its_failure_a_finding() -> None:
    ask = partial(ask_finding, LocalConnection(), "folder", {"path": "/", "least": 1})
    probe = Probe("state", "here", ask)
    assert examine([probe])[0].status in ("ok", "fail")  # fail: not root, so not writable
    gone = ask_finding(Gone(), "folder", {"path": "/", "least": 1})
    assert gone == Finding("fail", "host intel: no answer")


class Gone(LocalConnection):
    """A host that went away."""

    def call(self, *_: object, **__: object) -> object:
        raise UnreachableError("host intel: no answer")
