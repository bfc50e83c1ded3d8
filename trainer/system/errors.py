"""The errors of a run, and the one table of exit codes: every supervisor restarts by it."""

import errno
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self


class ExitCode(NamedTuple):
    """The meaning of an exit code, and whether another attempt may succeed."""

    meaning: str
    restarted: bool


EXIT_CODES = {
    0: ExitCode("the job is done, or was stopped on request and saved", False),
    1: ExitCode("a defect in Motley; the traceback is in the log", True),
    2: ExitCode(
        "usage, config, data or model is wrong; memory or the requested device is not available",
        False,
    ),
    3: ExitCode("the peer cannot be reached, or was lost", True),
    4: ExitCode(
        "refused: model, data, config, version, rank or weights differ, or another process writes "
        "the output",
        False,
    ),
    5: ExitCode("NaN or Inf halted the run, or an outlier with `exchange.outliers: halt`", False),
    6: ExitCode(
        "two saves in a row or the last one failed, or checkpoints are gone (disk, shared folder)",
        True,
    ),
    7: ExitCode("a GPU failed or was lost; the next attempt uses a backend that works", True),
    8: ExitCode(
        "all is done and saved, but not every worker proved the final state; the next attempt does",
        True,
    ),
    9: ExitCode(
        "the budget guard stopped the run (`budget.ceiling`, `budget.idle_stop`), all is saved",
        False,
    ),
    130: ExitCode("Ctrl-C; a run that is training saves and ends with 0 instead", False),
}
"""The table in docs/commands.md is this one."""
RESTARTED = tuple(code for code, row in EXIT_CODES.items() if row.restarted)


_MEMORY_ERRORS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA out of memory",
    "can't start new thread",
)
"""Messages of torch's allocator of host memory, of a file that is mapped, of CUDA libraries, and of
Python without the memory for a thread's stack."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or in the host's memory."""
    # Without torch, whose error is a RuntimeError of this name.
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or any(sign in str(error) for sign in _MEMORY_ERRORS)


_HOST_ERRNOS = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG, errno.ELOOP),
        *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EFBIG, errno.ENXIO),
    )
)


def plain_reason(error: BaseException) -> str:
    """Return what an error says, without a system's number or a codec's position."""
    if isinstance(error, UnicodeError):
        return "it is not text in UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def describe_host_fault(error: BaseException) -> str | None:
    """Return one line for a file, a folder or a disk that is in the way; None for a defect."""
    if not isinstance(error, OSError) or error.errno not in _HOST_ERRNOS:
        return None
    where = f"{error.filename}: " if error.filename else "the output cannot be written: "
    return f"{where}{plain_reason(error)}"


def should_restart(returncode: int) -> bool:
    """Return whether a process that ended so (negative: by that signal) is started again."""
    return returncode < 0 or returncode in RESTARTED


class TrainerError(Exception):
    """An error whose message a user can act on: what is wrong, where, and what to do.

    `details` are further lines for people, such as the last log lines of a missing worker.
    """

    exit_code = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class InputError(TrainerError):
    """A flag, config, data file or model directory cannot be used as given."""

    exit_code = 2


class DoesNotFitError(InputError):
    """A model or a micro-batch needs more memory than a device, or its host, has."""


class UnreachableError(TrainerError):
    """The coordinator, or enough workers, did not answer within the deadline."""

    exit_code = 3


class RefusedError(TrainerError):
    """The coordinator refused this worker, or TLS refused the peer."""

    exit_code = 4


class InUseError(TrainerError):
    """Another process writes the folder, or has taken it over; nothing was written."""

    exit_code = 4


class GradientError(TrainerError):
    """A worker's result halts the run before the update; names step and rank."""

    exit_code = 5


class NonFiniteError(GradientError):
    """A NaN or Inf in a gradient or loss; names block and tensor too."""

    @classmethod
    def at_step(cls, step: int, what: str) -> Self:
        """Return the error of a step, from 1, that is not applied."""
        halted = "the run is halted before the update, the last checkpoint is intact"
        return cls(f"step {step}: {what}: {halted}")


class OutlierError(GradientError):
    """A gradient norm far above the usual, in a run with `exchange.outliers: halt`."""


class StorageError(TrainerError):
    """A file that the run needs could not be written, or not be read back completely."""

    exit_code = 6


class UnprovedError(TrainerError):
    """All steps are done and saved, but not every worker proved that it holds the last state."""

    exit_code = 8

    def __init__(self, gap: str) -> None:
        super().__init__(
            f"all steps are done and saved, but {gap}: start the run again with the same run id; "
            "it ends with 0 once a worker has joined and proved that state"
        )


class BudgetStopError(TrainerError):
    """The budget guard stopped the run cleanly; everything is saved."""

    exit_code = 9


class ProtocolError(TrainerError):
    """A peer violated the wire protocol; its connection is closed, the run continues."""

    exit_code = 3


@contextmanager
def convert_read_errors(path: Path, kind: type[TrainerError]) -> Generator[None]:
    """Convert an OSError in the block into an error that says that a path cannot be read."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from None
