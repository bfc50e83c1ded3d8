"""The operations that a launcher may call on this machine; the checks are those of `checks/`.

An agent runs this on its host: standard library only, and nothing here may need the launcher's
extras (Ansible, cryptography). What reads a model imports the trainer when it is called.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.agent.checks import link as link
from launcher.agent.checks import logits_folder as logits_folder
from launcher.agent.checks import shared_folder as shared_folder
from launcher.agent.checks import unit_sandbox as unit_sandbox
from launcher.agent.operation import OPERATIONS, operation
from launcher.files import hold_lock, make_private_folder
from launcher.inventory.facts import devices, gauges, machine, network
from launcher.session import processes
from launcher.session.process_supervisor import is_final
from launcher.session.processes import ProcessIdentity
from trainer.system.regular_file import open_file
from trainer.system.storage.atomic_file import write_atomically

DEVICES_DEADLINE = 45.0
"""Seconds: the drivers of sleeping cards are slow, and each query has its own deadline."""
_OF_JOBS = tuple(f"launcher.agent.checks.{name}" for name in ("host_speeds", "job", "memory"))
WANTED = Path("/etc/systemd/system/multi-user.target.wants")
"""Where systemd keeps links to what it starts at boot."""

_UNIT = re.compile(r"motley-(?:worker|coordinator)@([a-z0-9][a-z0-9._-]*):[a-z0-9-]+\.service")


def perform_operation(
    name: str,
    arguments: Mapping[str, Any],
    own: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
    """Return the result of an operation, of the table or of the caller's `own`.

    Raises:
        ValueError: there is no such operation: the caller is another version.
    """
    if own is not None and name in own:
        return own[name](**arguments)
    # The checks of a job import the trainer, which takes seconds: only once one is called, and then
    # the import waits for a thread that is at it. Every other operation does not wait.
    known = OPERATIONS.get(name)
    if known is None or known.function.__module__ in _OF_JOBS:
        from launcher.agent.checks import memory as memory  # and those that it imports
    if name not in OPERATIONS:
        names = ", ".join(OPERATIONS)
        raise ValueError(f"no operation {name!r} is known here (known: {names})")
    return OPERATIONS[name].perform(arguments)


def user_name() -> str:
    """Return the name of this user; the number of a user without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def read_file(path: str, offset: int, limit: int | None) -> bytes:
    """Return the bytes of a file from `offset` on, at most `limit`."""
    with open_file(Path(path)) as stream:
        stream.seek(offset)
        return stream.read(-1 if limit is None else limit)


def write_file(path: str, data: bytes) -> None:
    """Replace a file in one step, readable by its owner alone; makes the folders above."""
    target = Path(path)
    make_private_folder(target.parent)
    write_atomically(target, data)


@contextlib.contextmanager
def lock_file(path: str, purpose: str) -> Generator[None]:
    """Hold the lock file of a start.

    Raises:
        PreflightError: another process is starting a run.
        OSError: the file cannot be made or written.
    """
    make_private_folder(Path(path).parent)
    with hold_lock(
        Path(path),
        f"{purpose}, pid {os.getpid()}",
        lambda other: f"another launch is starting a run here ({other}); see: launch status",
    ):
        yield


@operation("size")
def read_size(path: str) -> int:
    """Return the bytes that a file has."""
    return Path(path).stat().st_size


@operation("make_folder")
def make_folder(path: str) -> None:
    """Make a folder and those above it, for its owner alone; one that exists is left as is."""
    make_private_folder(Path(path))


@operation("exists")
def path_exists(path: str) -> bool:
    """Whether a file or folder of that name exists, a dangling link included."""
    return os.path.lexists(path)


@operation("remove")
def remove_file(path: str) -> None:
    """Remove a file; no error when there is none."""
    Path(path).unlink(missing_ok=True)


@operation("names")
def list_names(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none when there is no folder."""
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except FileNotFoundError:
        return []


@operation("free_disk", least=0)
def read_free_disk(path: str) -> int:
    """Return the free bytes of the file system that a folder is on, or will be."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@operation("spawn")
def spawn_process(argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Start a process that outlives this one: no terminal, no stdin, output to `log`."""
    with Path(log).open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, **env},
            start_new_session=True,
        )
    _CHILDREN.append(process)


@operation("is_alive")
def is_alive(process: ProcessIdentity) -> bool:
    """Whether a process runs; a reused pid does not count."""
    for child in _CHILDREN:  # a supervisor of our own that ended must not stay a zombie
        child.poll()
    return processes.is_alive(process)


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started: kept so that they are reaped without a warning."""


@operation("clock")
def read_clock() -> float:
    """Return the time here in Unix seconds."""
    return time.time()


@operation("unfinished_runs")
def list_unfinished_runs(folder: str) -> list[str]:
    """Return the ids of the runs below a state folder of which a process had not ended for good.

    By what the supervisors wrote: the caller checks whether such a process still runs.
    """
    found: set[str] = set()
    for path in Path(folder).glob("runs/*/processes/*/state.json"):
        run_id = path.parents[2].name
        if run_id not in found and not is_final(path):
            found.add(run_id)
    return sorted(found)


@operation("wanted_runs")
def list_wanted_runs(folder: Path = WANTED) -> list[str]:
    """Return the ids of the runs of which a unit would be started at boot.

    A run that ended by itself leaves them so: its supervisors may not change what systemd does.
    """
    try:
        found = [_UNIT.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted({match.group(1) for match in found if match})


# Functions of packages that agents and supervisors share, and which know of no agent.
send_signal = operation("send_signal")(processes.send_signal)
send_group_signal = operation("send_group_signal")(processes.send_group_signal)
find_run = operation("find_run")(processes.find_run)
describe_process = operation("describe")(processes.describe_process)
describe_machine = operation("machine", least=0)(machine.describe_machine)
find_routes = operation("routes", least=0)(network.find_routes)
read_gauges = operation("gauges")(gauges.read_gauges)
detect_devices = operation("devices", DEVICES_DEADLINE, least=0)(devices.detect_devices)
