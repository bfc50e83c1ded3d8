"""The errors of a run: one line for people and one exit code for programs.

| code | meaning                                              | restarted by a supervisor |
|------|------------------------------------------------------|---------------------------|
| 0    | the job is done, or was stopped on request and saved | no                        |
| 1    | a defect in Motley: the traceback is in the log      | yes                       |
| 2    | bad input: usage, config, data, model;               | no                        |
|      | or the requested device is not available             |                           |
| 3    | the other side cannot be reached, or was lost        | yes                       |
| 4    | refused: another model, data, config, version, rank; | no                        |
|      | or another process writes the folder                 |                           |
| 5    | NaN, Inf or an outlier halted the run                | no                        |
| 6    | the disk failed and the run cannot continue          | yes                       |
| 7    | a GPU failed during the run, or was lost             | yes                       |
| 8    | all steps are done, the last state is not proved     | yes                       |
"""

RESTARTED = (1, 3, 6, 7, 8)
"""The exit codes after which another attempt may succeed."""


class TrainerError(Exception):
    """An error whose message a user can act on: what is wrong, where, and what to do."""

    exit_code = 1


class InputError(TrainerError):
    """A flag, config, data file or model directory cannot be used as given."""

    exit_code = 2


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


class ProtocolError(TrainerError):
    """A peer violated the wire protocol; its connection is closed, the run continues."""

    exit_code = 3
