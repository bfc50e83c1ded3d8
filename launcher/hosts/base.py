"""The launcher's interface to a host: `ask` puts a typed question, frequent ones have methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from pydantic_core import to_jsonable_python

from launcher.agent import operations
from launcher.agent.operation import DEADLINE, Operation
from launcher.errors import InvalidAnswerError, PreflightError
from launcher.session.processes import ProcessIdentity
from trainer.system.untrusted_data import validate_data

UNIT_DEADLINE = 60.0
"""Seconds that starting or stopping a unit may take: stopping waits until a worker has ended."""

P = ParamSpec("P")
R = TypeVar("R")


def invalid_answer(host: str, error: Exception) -> InvalidAnswerError:
    """Return the error of a host that answers as another version does, or has a defect."""
    line = str(error).removeprefix(f"host {host}: ")
    return InvalidAnswerError(f"host {host}: {line}; if its version differs: launch cluster push")


class Connection(ABC):
    """The interface of a host. Paths are absolute paths on that host.

    File methods raise OSError (FileNotFoundError for missing files); if the host does not answer,
    every method raises UnreachableError with its name. Thread-safe.
    """

    host = "localhost"
    python: str
    """The host's interpreter that has the `launcher` package."""
    state_folder: str
    """Where this host keeps its runs if the inventory does not set it."""
    user: str
    """The user under which all operations run there."""
    units = False
    """Whether processes can be systemd units there; else they are plain sessions."""
    units_refusal = ""
    """Why sudo refuses to start the units that are installed there."""
    noise: tuple[str, ...] = ()
    """Lines that the login shell printed before the agent's first message."""
    host_key = ""
    """The fingerprint of the key that the host has shown, which was verified."""

    @abstractmethod
    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = DEADLINE
    ) -> Any:
        """Have an operation of `operations.py` done on that host; JSON in, JSON out.

        Raises:
            OSError, LauncherError: as the operation, or the host does not answer in time.
            ValueError: the host knows no such operation: it is of another version.
        """

    @abstractmethod
    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""

    @abstractmethod
    def lock(self, path: str, purpose: str) -> AbstractContextManager[None]:
        """Hold a lock file; the lock is freed when its holder dies or is unreachable.

        Raises:
            PreflightError: another process holds it; its purpose is in the message.
            UnreachableError: from any call within, once the connection that holds it has broken.
        """

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """`start`, `stop` or `kill` a unit of ours; returns when systemd is done.

        Raises:
            PreflightError: there are no units here, or the host refuses; the message says why.
            UnreachableError: it takes too long, or the host is gone.
        """
        del deadline
        raise PreflightError(
            f"host {self.host}: cannot {verb} {unit}: Motley's units or their sudo rule are "
            "missing there; run: ansible-playbook recipes/gpu-training.yml --tags trainer"
        )

    @abstractmethod
    def close(self) -> None:
        """Release the host: locks are freed, started processes continue. Idempotent."""

    def ask(self, question: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return this host's answer to a question: what the function of that name returns there.

        Raises:
            OSError, LauncherError: as the function, or the host does not answer in time.
            InvalidAnswerError: the answer is of another type, or the host lacks the question.
        """
        arguments = to_jsonable_python(question.bind_arguments(*args, **kwargs))
        try:
            answer = self.call(question.name, arguments, question.deadline)
            return validate_data(question.result_type, answer, question.name, **question.limits)
        except (ValueError, RuntimeError) as error:
            raise invalid_answer(self.host, error) from None

    def file_size(self, path: str) -> int:
        """Return the bytes that a file has."""
        return self.ask(operations.read_size, path)

    def list_folder(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no folder."""
        return [name for name in self.ask(operations.list_names, folder) if "/" not in name]

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, for its owner alone; one that exists is left as is."""
        self.ask(operations.make_folder, path)

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name exists, a dangling link included."""
        return self.ask(operations.path_exists, path)

    def remove_file(self, path: str) -> None:
        """Remove a file; no error when there is none."""
        self.ask(operations.remove_file, path)

    def spawn_process(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process that outlives this connection: no terminal, no stdin, output to `log`."""
        self.ask(operations.spawn_process, argv, env, log)

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this process runs; a reused pid does not count."""
        return self.ask(operations.is_alive, process)
