"""A sandbox, and programs that try things in it."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.evaluate.sandbox import Limits, Sandbox, Trial, TrialResult
from trainer.system.errors import InputError


def open_sandbox(**limits: Any) -> Sandbox:
    """Return a sandbox with these limits; the test skips where there can be none."""
    try:
        return Sandbox(Limits(**limits))
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")


def attempt(sandbox: Sandbox, program: str) -> TrialResult:
    """Run a program where programs under test run; it passes when it comes to its end."""
    return sandbox.run(Trial(program=program, test=""))
