"""The launcher's errors, one line for people, and its table of exit codes, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.system.errors import InputError, TrainerError

EXIT_CODES = {
    0: ("done", "success, or there was nothing to do"),
    1: ("defect", "a defect in Motley"),
    2: ("usage or config", "usage, run config or inventory is wrong"),
    3: ("unreachable", "a host cannot be reached"),
    4: (
        "not ready",
        "a check failed, a device is missing, or a run is already active; nothing was started",
    ),
    5: (
        "workers missing",
        "workers are missing, a process could not be stopped, or a host was not updated or synced",
    ),
    6: ("job failed", "the training job itself failed"),
    7: (
        "over budget",
        "an estimate above the ceiling, an unknown price, or the [budget guard](budget.md)",
    ),
    130: ("interrupted", "interrupted; an unfinished start has been undone"),
}
"""Exit codes as `launch --help` and the table in docs/commands.md explain them."""


LauncherError = TrainerError
"""Any error whose message a user can act on."""
ConfigError = InputError
"""A flag, the run config or the inventory cannot be used as given: launcher or trainer reads it."""


class UnreachableError(LauncherError):
    """A host did not answer, or this release cannot drive it."""

    exit_code = 3


class PreflightError(LauncherError):
    """A host is not ready: a check failed, a device is missing, or the cluster is busy."""

    exit_code = 4


class InvalidAnswerError(PreflightError):
    """A host's answer is not of the agreed type, or it lacks the question: another version."""


class BusyError(PreflightError):
    """Another run is active, or another start is under way."""


class PartialError(LauncherError):
    """Some workers did not join, or some process could not be stopped."""

    exit_code = 5


class JobFailedError(LauncherError):
    """The coordinator gave up: the reason is in its log."""

    exit_code = 6


class OverBudgetError(LauncherError):
    """A run or command would cost more than its ceiling, or its cost is unknown."""

    exit_code = 7


class InterruptedStartError(LauncherError):
    """The user or a signal ended a start before every worker had joined."""

    exit_code = 130


def raise_all(errors: Sequence[LauncherError]) -> None:
    """Raise the first of some errors, with the others as its details."""
    if errors:
        first, *others = errors
        lines = [line for error in others for line in (str(error), *error.details)]
        raise type(first)(str(first), [*first.details, *lines])
