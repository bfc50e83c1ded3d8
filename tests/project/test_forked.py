"""Programs of the tests that are forked: they are what a start from nothing would be."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import Program
from tests.waiting import wait_for

COMMAND = [sys.executable, "-m", "tests.project.test_forked"]
LIMIT = 128


def main() -> None:
    """Say what this process was given, and never end."""
    said = [*sys.argv[1:], os.environ["GIVEN"], Path.cwd().name, os.getsid(0) == os.getpid()]
    print(*said, sys.stdin.read(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    signal.pause()


@pytest.mark.cluster
def test_it_has_what_it_is_given_until_a_signal_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    limits = {resource.RLIMIT_NOFILE: LIMIT}
    program = Program([*COMMAND, "a b"], {"GIVEN": "x"}, tmp_path, log, limits)
    said = f"a b x {tmp_path.name} True  {LIMIT}\n"
    wait_for(lambda: log.read_text() == said, "what it was given")
    assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    assert program.wait() == program.poll() == -signal.SIGKILL


if __name__ == "__main__":
    main()
