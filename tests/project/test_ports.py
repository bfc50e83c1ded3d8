"""No two processes of the tests are given one port, and the system gives it to no connection."""

import subprocess
import sys

from tests import ROOT
from tests.ports import first_ephemeral_port, free_port

SCRIPT = """
import random
from tests.ports import free_port
random.Random = lambda: type("Same", (), {"sample": staticmethod(lambda ports, _: list(ports))})
print(*(free_port() for _ in range(20)), flush=True)
input()
"""


def test_two_processes_are_given_different_ports() -> None:
    """Both try all ports in the same order, and none of them uses what it was given."""
    command = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in "ab"]
    given = [process.stdout.readline().split() for process in both if process.stdout]
    for process in both:
        process.communicate("\n")
    assert len(set(given[0] + given[1])) == 40


def test_they_lie_below_what_the_system_chooses_from() -> None:
    assert free_port() < first_ephemeral_port()
    assert free_port("::1") != free_port("::1")
