"""Programs of the tests that are forked: they are what a start from nothing would be."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import Program, run
from tests.waiting import wait_for

COMMAND = [sys.executable, "-m", "tests.project.test_forked"]
LIMIT = 128


def main() -> None:
    """Say what this process was given; with `wait` as its word never end."""
    import atexit

    said = [*sys.argv[1:], os.environ["GIVEN"], Path.cwd().name, str(os.getsid(0) == os.getpid())]
    atexit.register(lambda: print("the end"))
    print(*said, sys.stdin.read(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if sys.argv[1] == "wait":
        sys.stdout.flush()
        signal.pause()
    sys.exit("a reason")


@pytest.mark.cluster
def test_it_has_what_it_is_given_and_ends_in_full(tmp_path: Path) -> None:
    mine = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    done = run([*COMMAND, "a b"], {"GIVEN": "this"}, folder=tmp_path)
    assert done.stdout == f"a b this {tmp_path.name} True  {mine}\nthe end\n"
    assert (done.returncode, done.stderr) == (1, "a reason\n")


@pytest.mark.cluster
def test_what_a_signal_ends_says_so_and_limits_hold(tmp_path: Path) -> None:
    log = tmp_path / "log"
    limits = {resource.RLIMIT_NOFILE: LIMIT}
    program = Program([*COMMAND, "wait"], {"GIVEN": "x"}, tmp_path, log, limits)
    said = f"wait x {tmp_path.name} True  {LIMIT}\n"
    wait_for(lambda: log.read_text() == said, "what it was given")
    assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    assert program.wait() == program.poll() == -signal.SIGKILL


if __name__ == "__main__":
    main()
