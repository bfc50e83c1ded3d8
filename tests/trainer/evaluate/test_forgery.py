"""Wrong programs that want to pass by leaving early; forged verdicts are not covered."""

from __future__ import annotations

import pytest

from tests.trainer.evaluate.confinement import open_sandbox
from trainer.evaluate import sandbox as module
from trainer.evaluate.sandbox import Sandbox, Trial

TEST = """
def check(candidate):
    assert candidate(7) == 14, "wrong"
check(double)
"""
RIGHT = "def double(x):\n    return x + x\n"
WRONG = "def double(x):\n    return None\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox(seconds=60)


def judged(sandbox: Sandbox, program: str) -> bool:
    return sandbox.run(Trial(program=program, test=TEST)).passed


def test_it_knows_right_from_wrong(sandbox: Sandbox) -> None:
    assert judged(sandbox, RIGHT)
    assert judged(sandbox, RIGHT + "import sys\nprint('x')\nprint('y', file=sys.stderr)\n")
    assert judged(sandbox, RIGHT + "import atexit\natexit.register(print, 'end')\n")
    assert not judged(sandbox, WRONG)


@pytest.mark.parametrize(
    "attack",
    [
        "import os; os._exit(0)",
        "import os\ndef double(x): os._exit(0)",
        "import sys; sys.exit(0)",
        "def double(x): raise SystemExit(0)",
        "import atexit, os; atexit.register(os._exit, 0)\n" + WRONG,
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.close(2); os._exit(0)",
    ],
)
def test_leaving_well_is_not_passing(sandbox: Sandbox, attack: str) -> None:
    assert not judged(sandbox, attack)


def test_a_forged_verdict_passes_as_the_docstring_says(sandbox: Sandbox) -> None:
    """Whoever covers this changes the docstring."""
    equals_all = "class All:\n    def __eq__(self, other): return True\n"
    assert judged(sandbox, equals_all + "def double(x): return All()\n")
    assert "Not covered: a program that forges its verdict." in str(module.__doc__)


def test_a_reason_has_nothing_that_moves_a_cursor(sandbox: Sandbox) -> None:
    program = "def f(): raise ValueError('\\x1b[2Jall passed')\n"
    verdict = sandbox.run(Trial(program=program, test="f()"))
    assert verdict.reason == "ValueError: ?[2Jall passed"


def test_an_exception_that_cannot_describe_itself(sandbox: Sandbox) -> None:
    program = "class Own(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Own\n"
    verdict = sandbox.run(Trial(program=program, test=""))
    assert not verdict.passed
    assert "Own" in verdict.reason
