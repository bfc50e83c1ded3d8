"""The operations that a launcher may call on this machine, in one table by name.

Arguments and results are plain JSON; a result may also be made of dataclasses, which `frames.py`
writes as their fields. A new operation is a function and its line in the table.

An agent runs this on its host: standard library only, and nothing here may need the launcher's
extras (Ansible, cryptography). What reads a model imports the trainer when it is called.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.agent.checks import (
    digests,
    host,
    link,
    logits_folder,
    share,
    unit_sandbox,
    unit_states,
)
from launcher.errors import PreflightError
from launcher.files import make_private_folder
from launcher.inventory.facts import devices, gauges, machine, network
from launcher.session import host_runs, processes
from launcher.session.processes import ProcessIdentity
from trainer.system.regular_file import open_file
from trainer.system.storage.atomic_file import write_atomically

Operation = Callable[..., Any]


def perform(
    name: str, arguments: Mapping[str, Any], own: Mapping[str, Operation] | None = None
) -> Any:
    """Return the result of an operation, of the table or of the caller's `own`.

    Raises:
        ValueError: there is no such operation: the caller is another version.
    """
    operation = (own or {}).get(name) or OPERATIONS.get(name)
    if operation is None:
        known = ", ".join(OPERATIONS)
        raise ValueError(f"no operation {name!r} is known here (known: {known})")
    return operation(**arguments)


def user_name() -> str:
    """Return the name of this user; the number of a user without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def read(path: str, offset: int, limit: int | None) -> bytes:
    """Return the bytes of a file from `offset` on, at most `limit`."""
    with open_file(Path(path)) as stream:
        stream.seek(offset)
        return stream.read(-1 if limit is None else limit)


def write(path: str, data: bytes) -> None:
    """Replace a file in one step, readable by its owner alone; makes the folders above."""
    target = Path(path)
    make_private_folder(target.parent)
    write_atomically(target, data)


@contextlib.contextmanager
def lock(path: str, purpose: str) -> Generator[None]:
    """Hold a lock file; the kernel frees it when its holder dies, whatever the cause.

    Raises:
        PreflightError: another process is starting a run.
        OSError: the file cannot be made or written.
    """
    make_private_folder(Path(path).parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise PreflightError(
                f"another launch is starting a run here ({holder or 'just now'}); "
                "see: launch cluster status"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{purpose}, pid {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _size(path: str) -> int:
    return Path(path).stat().st_size


def _make_folder(path: str) -> None:
    make_private_folder(Path(path))


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _names(folder: str) -> list[str]:
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except FileNotFoundError:
        return []


def _free_disk(path: str) -> int:
    """Return the free bytes of the file system that a folder is on, or will be."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _spawn(argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
    with Path(log).open("ab") as output:
        keeper = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, **env},
            start_new_session=True,
        )
    _CHILDREN.append(keeper)


def _is_alive(process: ProcessIdentity) -> bool:
    for child in _CHILDREN:  # a supervisor of our own that ended must not stay a zombie
        child.poll()
    return processes.is_alive(process)


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started: kept so that they are reaped without a warning."""


def _with_process(act: Operation, name: str = "process") -> Operation:
    """Return an operation on a process that is given by the fields of its identity."""

    def operation(**arguments: Any) -> Any:
        return act(ProcessIdentity(**arguments.pop(name)), **arguments)

    return operation


def _of_job(check: str) -> Operation:
    """Return a check of `checks/job.py`, which imports the trainer: only when it is called."""

    def operation(**arguments: Any) -> Any:
        from launcher.agent.checks import job

        return getattr(job, check)(**arguments)

    return operation


OPERATIONS: dict[str, Operation] = {
    "size": _size,
    "names": _names,
    "make_folder": _make_folder,
    "exists": os.path.lexists,
    "remove": _remove,
    "spawn": _spawn,
    "is_alive": _with_process(_is_alive),
    "send_signal": _with_process(processes.send_signal),
    "send_group_signal": _with_process(processes.send_group_signal, "leader"),
    "find_run": processes.find_run,
    "describe": _with_process(processes.describe),
    "clock": time.time,
    "unfinished_runs": host_runs.unfinished_runs,
    "wanted_runs": host_runs.wanted_runs,
    "units": unit_states.show_units,
    "machine": machine.describe,
    "routes": network.routes,
    "free_disk": _free_disk,
    "gauges": gauges.read_gauges,
    "devices": devices.detect,
    "trainer": host.check_trainer,
    "cuda": host.check_trainer_cuda,
    "secure_boot": host.check_secure_boot,
    "sleep": host.check_sleep,
    "port": host.check_port,
    "folder": host.check_folder,
    "listen": link.listen,
    "connect": link.connect,
    "fences": unit_sandbox.check_fences,
    "share": share.check_share,
    "share_source": share.source,
    "file_content": digests.file_content,
    "logits_content": logits_folder.logits_content,
    "model": _of_job("check_model"),
    "model_content": _of_job("model_content"),
    "model_folder": _of_job("check_model_folder"),
    "text": _of_job("check_text"),
    "training_data": _of_job("check_training_data"),
    "data": _of_job("check_data"),
    "output": _of_job("check_output"),
    "memory": _of_job("check_memory"),
    "own_settings": _of_job("own_settings"),
    "workload": _of_job("workload"),
    "scoring": _of_job("scoring"),
    "measured": _of_job("measured"),
    "student": _of_job("student"),
}
"""Every operation but those on the bytes of files and on locks, which differ over a pipe
(`agent.py`). A function's arguments are the operation's."""
