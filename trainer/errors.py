"""What can go wrong in a run, as one line for people and one exit code for programs.

| code | meaning                                              | restarted by a supervisor |
|------|------------------------------------------------------|---------------------------|
| 0    | the job is done, or was asked to stop and saved      | no                        |
| 1    | a defect in Motley: the traceback is in the log      | yes                       |
| 2    | bad input: usage, config, data, model                | no                        |
| 3    | the other side cannot be reached, or was lost        | yes                       |
| 4    | refused: another model, data, config, version, rank  | no                        |
| 5    | NaN or Inf in a gradient or loss halted the run      | no                        |
| 6    | the disk failed where the run cannot go on without   | yes                       |
| 7    | a GPU failed in the middle of the run, or was lost   | yes                       |
"""

RESTARTED = (1, 3, 6, 7)
"""The exit codes after which another attempt may come to a better end."""


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


class NonFiniteError(TrainerError):
    """A NaN or Inf in a gradient or loss; names step, rank, block and tensor."""

    exit_code = 5


class StorageError(TrainerError):
    """A file that the run needs could not be written or read back whole."""

    exit_code = 6


class ProtocolError(TrainerError):
    """A peer broke the wire protocol; its connection is closed, the run goes on."""

    exit_code = 3
