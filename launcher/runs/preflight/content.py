"""Compare a host's files with the coordinator's, by digests that each host computes once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from launcher.agent.checks.digests import describe_difference
from launcher.agent.checks.finding import Finding
from launcher.errors import LauncherError
from launcher.hosts.base import Connection

AGAIN = "repeat when both hosts answer: launch doctor"
_PUSH = "copy it there: launch sync inputs"


class HostDigests:
    """A host's digests of some files: queried once, at first use."""

    def __init__(self, ask: Callable[[], dict[str, str]]) -> None:
        self._ask = ask
        self._asked = threading.Lock()
        self._digests: dict[str, str] | None = None

    def get_digests(self) -> dict[str, str]:
        """Return the digests by file name; empty when the host does not have the files."""
        with self._asked:
            if self._digests is None:
                self._digests = self._ask()
            return self._digests


def compare_content(
    ask: Callable[[Connection], Finding],
    own: HostDigests,
    reference: HostDigests,
    head: str,
    there: Connection,
) -> Finding:
    """Return a host's finding, or how its files differ from the coordinator's."""
    finding = ask(there)
    if finding.status == "fail":
        return finding
    try:
        mine, theirs = own.get_digests(), reference.get_digests()
    except (LauncherError, OSError) as error:
        detail = f"{finding.detail}: cannot be compared with {head}'s: {error}"
        return Finding("fail", detail, AGAIN)
    if not mine or not theirs:  # the trainer downloads it, or the coordinator's check fails
        return finding
    if different := describe_difference(mine, theirs):
        return Finding("fail", f"{finding.detail}: {different} than {head}", _PUSH)
    return replace(finding, detail=f"{finding.detail}, the same as on {head}")
