"""What the tests of the exchange share."""

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.small_frames import small_frames

__all__ = ["problem", "small_frames"]


@pytest.fixture(scope="session")
def problem() -> ExactProblem:
    """Return the usual one; a file with other wishes has its own."""
    return ExactProblem()
