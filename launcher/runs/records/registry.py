"""The run registry: the runs with their plans, configs and files.

On every host of a run, below that host's state folder:

    <state>/runs/<run id>/plan.json         a run exists once this file does
    <state>/runs/<run id>/run.yaml          the resolved run config, as the trainer gets it
    <state>/runs/<run id>/down              the run was asked to stop; nothing is started any more;
                                            holds the reason when the start failed
    <state>/runs/<run id>/processes/<name>/ spec.json state.json attempt-N.log tls/

The registry of the host with motley_coordinator is authoritative: it has all runs of the cluster,
and its `lock` is held during a start. While that host is unreachable, the registries of the others
can still be read. The cluster's CA (`ca/`) never leaves the state folder of the launcher's machine.

The state folder is `motley_state_folder`, else the host's own (`files.default_state_folder`).
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import secrets
import socket
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import TypeVar

from launcher.agent.operations import read_clock
from launcher.errors import BusyError, ConfigError, LauncherError, PreflightError
from launcher.files import default_state_folder, make_private_folder
from launcher.hosts import fleet
from launcher.hosts.fleet import LOOK, Answers, ask_each
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host, find_coordinator_host
from launcher.plan.plan import LaunchPlan
from launcher.runs.records.plan_file import MOST, read_record
from launcher.runs.records.run import Run, StateFolder, is_run_id, locate_state_folder
from trainer.system.timestamp import format_timestamp

T = TypeVar("T")


class Registry:
    """The runs of a cluster, kept on the coordinator's host; without a cluster, this user's."""

    def __init__(
        self,
        place: StateFolder,
        hosts: Sequence[Host] = (),
        others: Sequence[StateFolder] = (),
        absence: LauncherError | None = None,
    ) -> None:
        """`others` are read while `place` does not answer; `absence` is the reason."""
        self.folder = place.folder
        self.hosts = tuple(hosts)
        self.absence = absence
        self._place = place
        self._places = tuple(others) if absence is not None else (place,)

    @classmethod
    def for_this_user(cls) -> Registry:
        """Return the registry of this machine and user."""
        return cls(StateFolder(LocalConnection(), default_state_folder()))

    @classmethod
    def for_hosts(
        cls,
        hosts: Sequence[Host],
        deadline: float = LOOK,
        on_late: Callable[[Answers[StateFolder]], None] | None = None,
    ) -> Registry:
        """Return the registry of a cluster, by its inventory.

        While the coordinator's host does not answer it can only be read, from the other hosts.

        Args:
            on_late: see `fleet.ask`.

        Raises:
            UnreachableError: no host answers.
        """
        head = find_coordinator_host(hosts)
        places = fleet.ask_hosts(
            hosts, locate_state_folder, deadline, enough=head.name, on_late=on_late
        )
        if head.name in places.found:
            return cls(places.found[head.name], hosts)
        absence = places.errors[head.name]
        if not places.found or not isinstance(absence, LauncherError):
            places.require()
        assert isinstance(absence, LauncherError)
        others = list(places.found.values())
        return cls(others[0], hosts, others, absence)

    @property
    def is_local(self) -> bool:
        """Whether the runs are kept on this machine, by this user."""
        return not self.hosts or (
            self.absence is None and find_coordinator_host(self.hosts).is_local
        )

    def open_state_folder(self) -> StateFolder:
        """Return the state folder of the coordinator's host.

        Raises:
            UnreachableError: that host does not answer.
        """
        if self.absence is not None:
            raise self.absence
        return self._place

    @contextlib.contextmanager
    def lock(self, purpose: str) -> Generator[None]:
        """Hold the registry for one start; a second start fails with the holder's name.

        The kernel frees the lock when its holder dies, whatever the cause.

        Raises:
            BusyError: another start is under way.
            ConfigError: the state folder cannot be written.
            UnreachableError: the coordinator's host does not answer.
        """
        holder = f"{purpose} by {operator_name()} since {format_timestamp()}"
        here = self.open_state_folder().connection
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(here.lock(str(self.folder / "lock"), holder))
            except PreflightError as error:
                raise BusyError(str(error), error.details) from None
            except OSError as error:
                raise ConfigError(
                    f"state folder {self.folder}: {error.strerror}; set MOTLEY_STATE_DIR"
                ) from None
            yield

    def ask_hosts(
        self,
        question: Callable[[StateFolder], T],
        deadline: float = LOOK,
        on_late: Callable[[Answers[T]], None] | None = None,
    ) -> Answers[T]:
        """Put a question to every host of the cluster; to this machine alone without one."""
        if not self.hosts:
            here = Host(name="localhost", connection="local")
            return ask_each({here.name: (here, question)}, deadline, lambda _host: self._place)
        return fleet.ask_hosts(
            self.hosts,
            lambda host, there: question(locate_state_folder(host, there)),
            deadline,
            on_late=on_late,
        )

    def record_run(self, plan: LaunchPlan) -> tuple[Run, bytes]:
        """Return a run that begins now, and its plan.json."""
        started = self._place.connection.ask(read_clock)
        tree = {**json.loads(plan.to_json()), "started": started}
        hosts = self._inventory_hosts(plan)
        head = [find_coordinator_host(self.hosts)] if self.hosts else []
        file_hosts = {host.name: host for host in (*hosts, *head)}
        run = Run(plan, started, hosts, file_hosts=tuple(file_hosts.values()))
        return run, json.dumps(tree, indent=1).encode()

    def get_run(self, run_id: str) -> Run:
        """Return one run.

        Raises:
            ConfigError: there is none of that id, or its files are damaged.
        """
        run = self._find_run(run_id) if is_run_id(run_id) else None
        if run is None:
            known = ", ".join([run.run_id for run in self.read_runs()][-3:]) or "none yet"
            raise ConfigError(f"no run {run_id} (latest: {known}; see: launch runs)")
        return run

    def read_config(self, run_id: str) -> bytes:
        """Return the run config of a run, as YAML.

        Raises:
            ConfigError: there is no such run, or its config is gone.
        """
        self.get_run(run_id)
        for place in self._places:
            with contextlib.suppress(OSError):
                return place.connection.read(f"{place.run_folder(run_id)}/run.yaml", limit=MOST)
        raise ConfigError(
            f"run {run_id} no longer has a run.yaml; start a new run, without --resume"
        )

    def list_run_ids(self) -> set[str]:
        """Return the names of what looks like runs."""
        return {run_id for place in self._places for run_id in place.list_run_ids()}

    def read_runs(self, among: Collection[str] | None = None) -> list[Run]:
        """Return every readable run, the oldest first; damaged ones are left out."""
        runs: list[Run] = []
        for run_id in self.list_run_ids():
            if among is None or run_id in among:
                with contextlib.suppress(ConfigError):
                    run = self._find_run(run_id)
                    runs += [run] if run is not None else []
        return sorted(runs, key=lambda run: (run.started, run.run_id))

    def _find_run(self, run_id: str) -> Run | None:
        for place in self._places:
            with contextlib.suppress(FileNotFoundError):
                return self._read_run(place, run_id)
        return None

    def _read_run(self, place: StateFolder, run_id: str) -> Run:
        path = place.plan_path(run_id)
        try:
            record = read_record(place.connection.read(path, limit=MOST), run_id)
        except ValueError as error:
            raise ConfigError(f"{path}: damaged: {error}") from None
        return Run(record.plan, record.started, self._inventory_hosts(record.plan), place.host)

    def _inventory_hosts(self, plan: LaunchPlan) -> tuple[Host, ...]:
        """Return the hosts of a plan as the inventory has them; others cannot be reached.

        Without an inventory this machine is the only host, under whatever names it has in a plan.
        """
        known = {host.name: host for host in self.hosts}
        if not self.hosts:
            known = {host.name: host for host in plan.hosts if host.is_local}
        return tuple(
            known.get(host.name, Host(name=host.name, connection="none")) for host in plan.hosts
        )


def authority_folder() -> Path:
    """Return the folder of the cluster CA on this machine, made if need be.

    Raises:
        ConfigError: the state folder cannot be written.
    """
    folder = default_state_folder() / "ca"
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"state folder {folder.parent}: {error.strerror}; set MOTLEY_STATE_DIR"
        ) from None
    return folder


def new_run_id(name: str) -> str:
    """Return an id that sorts by time and cannot meet another: `quickstart-20261120-110300-7f3a`.

    The time is UTC.
    """
    moment = datetime.datetime.now(datetime.UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def operator_name() -> str:
    """Return the operator as `user@laptop`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
