"""A run, and where a host keeps it: the folders and files of `registry.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.hosts.base import Connection
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from launcher.runs.records.plan_file import MOST, read_record
from trainer.system.commandline.run_id import RUN_ID


@dataclass(frozen=True)
class Run:
    """A run of the registry."""

    plan: LaunchPlan
    started: float
    """Unix seconds, by the clock of the host that keeps it."""
    hosts: tuple[Host, ...]
    """The hosts of the plan as the inventory knows them; the others cannot be reached."""
    source: str = ""
    """The host whose plan.json this is; empty for a plan that was made here."""
    file_hosts: tuple[Host, ...] = ()
    """Hosts that get the files of a new run, the registry's among them."""
    is_launched: bool = True
    """Whether `launch` has started it, not `trainer finetune` alone."""

    @property
    def run_id(self) -> str:
        """The run's name and number in one."""
        return self.plan.run_id

    @property
    def leader_host(self) -> Host:
        """The leader's host."""
        return self.find_host(self.plan.leader.host)

    def find_host(self, name: str) -> Host:
        """Return a host of this run as it is reached now."""
        return next(host for host in self.hosts if host.name == name)

    def run_folder(self, host: Host, connection: Connection) -> str:
        """Return where a host keeps this run: plan, config and the folders of its processes."""
        return locate_state_folder(host, connection).run_folder(self.run_id)

    def stop_mark(self, host: Host, connection: Connection) -> str:
        """Return the file on a host whose existence asks the run to end."""
        return f"{self.run_folder(host, connection)}/down"

    def read_plan_of_host(self, host: Host, connection: Connection) -> LaunchPlan | None:
        """Return the plan whose paths apply on a host: no host determines the paths of another.

        None when this host has none.
        """
        if self.source in ("", host.name):
            return self.plan
        try:
            path = f"{self.run_folder(host, connection)}/plan.json"
            return read_record(connection.read(path, limit=MOST), self.run_id).plan
        except (OSError, ValueError):
            return None

    def read_stop_reason(self, host: Host, connection: Connection) -> str | None:
        """Return why this run was asked to end, as recorded on a host; None if it was not.

        A start that failed leaves its reason; `down` gives none.
        """
        try:
            mark = connection.read(self.stop_mark(host, connection), limit=MOST)
        except (OSError, ValueError):
            return None
        return mark.decode(errors="replace")


@dataclass(frozen=True)
class StateFolder:
    """A host's state folder and the connection to it."""

    connection: Connection
    folder: Path

    host: str = ""
    """Its name; empty for this machine without an inventory."""

    def run_folder(self, run_id: str) -> str:
        """Return the folder of a run."""
        return str(self.folder / "runs" / run_id)

    def plan_path(self, run_id: str) -> str:
        """Return the path of a run's plan."""
        return f"{self.run_folder(run_id)}/plan.json"

    def list_run_ids(self) -> list[str]:
        """Return the names of what looks like runs."""
        return list(filter(is_run_id, self.connection.list_folder(str(self.folder / "runs"))))


def locate_state_folder(host: Host, connection: Connection) -> StateFolder:
    """Return where a host keeps its runs."""
    return StateFolder(connection, Path(host.state_folder or connection.state_folder), host.name)


def is_run_id(text: str) -> bool:
    """Whether a name has the form of a run id."""
    return re.fullmatch(RUN_ID, text) is not None
