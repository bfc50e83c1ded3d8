"""The launcher machine's part of a plan, and the values derived for each host. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from launcher.files import MANAGED_STATE
from launcher.inventory.hosts import Host

SCRIPT_FILE = "script.py"
"""A host's copy of the script of a run, in the run's folder."""
REMOTE_TRAINER = ("/opt/motley/current/bin/trainer",)


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """A run's id, and the data of the launcher's own machine that placement uses."""

    run_id: str
    trainer_command: tuple[str, ...]
    """The trainer of local hosts that do not name their own."""
    state_folder: str
    """The run registry of local hosts."""
    routes: Mapping[str, str]
    """Host name -> its address on the route between the coordinator's host and the others."""
    no_route: str = ""
    """Why `routes` could not be found, for the error that asks for an address."""
    identities: Mapping[str, str] = field(default_factory=dict[str, str])
    """Host name -> id that is equal for two names of one machine; surveyed hosts only."""

    script_digest: str = ""
    """The digest of the script that this start names; empty without one."""

    def get_machine_id(self, host: Host) -> str:
        """Return an id that is equal for two inventory names of one machine."""
        return self.identities.get(host.name) or ("here" if host.is_local else host.name)

    def get_trainer_command(self, host: Host) -> tuple[str, ...]:
        """Return the command of a host's trainer."""
        default = self.trainer_command if host.is_local else REMOTE_TRAINER
        return host.trainer_command or default

    def get_state_folder(self, host: Host) -> str:
        """Return where a host keeps its runs."""
        return host.state_folder or (self.state_folder if host.is_local else MANAGED_STATE)

    def run_folder(self, host: Host) -> str:
        """Return where a host keeps this run: plan, run config, and a folder for each process."""
        return str(PurePosixPath(self.get_state_folder(host)) / "runs" / self.run_id)

    def script_options(self, host: Host) -> tuple[str, ...]:
        """Return the options that name a host's copy of the script."""
        if not self.script_digest:
            return ()
        path = f"{self.run_folder(host)}/{SCRIPT_FILE}"
        return "--script", path, "--script-digest", self.script_digest

    def process_folder(self, host: Host, name: str) -> str:
        """Return where a host keeps one process of this run."""
        return f"{self.run_folder(host)}/processes/{name}"
