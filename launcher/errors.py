"""The launcher's errors: one line for people and one exit code for programs.

| code | meaning                                                                       |
|------|-------------------------------------------------------------------------------|
| 0    | done; also when there was nothing to do                                       |
| 1    | a defect in Motley                                                            |
| 2    | usage, run config or inventory is wrong                                       |
| 3    | a host cannot be reached                                                      |
| 4    | preflight: something on a host is in the way; nothing was started             |
| 5    | partial: workers are missing (all was stopped), or processes are left         |
| 6    | the training job itself failed                                                |
| 7    | budget: the estimate breaches the ceiling, a price is unknown, or the guard stopped it |
| 130  | interrupted; a start that was under way is undone, a running job continues    |
"""

from __future__ import annotations

from collections.abc import Sequence


class LauncherError(Exception):
    """An error whose message a user can act on: what is wrong, where, and what to do.

    `details` are further lines for people, such as the last log lines of a missing worker.
    """

    exit_code = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class ConfigError(LauncherError):
    """A flag, the run config or the inventory cannot be used as given."""

    exit_code = 2


class UnreachableError(LauncherError):
    """A host did not answer, or this release cannot drive it."""

    exit_code = 3


class PreflightError(LauncherError):
    """A host is not ready: a check failed, a device is missing, or the cluster is busy."""

    exit_code = 4


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
