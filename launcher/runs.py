"""The run registry: what was started, with which plan and config, and where its files lie.

    <state>/lock                            held while a run is being started
    <state>/ca/{ca.pem,ca-key.pem}          the cluster's CA
    <state>/runs/<run id>/plan.json         a run exists once this file does
    <state>/runs/<run id>/run.yaml          the resolved run config, as the trainer gets it
    <state>/runs/<run id>/processes/<name>/ spec.json state.json attempt-N.log tls/

<state> is $MOTLEY_STATE_DIR, else $XDG_STATE_HOME/motley, else ~/.local/state/motley.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from launcher.access import LocalConnection, default_state_folder, make_private_folder
from launcher.errors import ConfigError
from launcher.files import write_atomically
from launcher.plan import LaunchPlan


@dataclass(frozen=True)
class Run:
    """A run of the registry."""

    folder: Path
    plan: LaunchPlan
    started: float
    """Unix seconds."""

    @property
    def run_id(self) -> str:
        """The run's name and number in one."""
        return self.plan.run_id

    @property
    def is_going_down(self) -> bool:
        """Whether somebody asked for its end; a start that is under way gives up then."""
        return (self.folder / "down").exists()

    def mark_going_down(self) -> None:
        """Write down that this run is to end."""
        (self.folder / "down").touch(mode=0o600)


class Registry:
    """The runs that were started from this machine by this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> Registry:
        """Return the registry of this user."""
        return cls(default_state_folder())

    @contextlib.contextmanager
    def lock(self, purpose: str) -> Generator[None]:
        """Hold the registry for one start.

        The kernel lets go of the lock when its holder dies, however that happens.

        Raises:
            PreflightError: somebody else is starting a run right now.
            ConfigError: the state folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(LocalConnection().lock(str(self.folder / "lock"), purpose))
            except OSError as error:
                raise ConfigError(
                    f"state folder {self.folder}: {error.strerror}; set MOTLEY_STATE_DIR"
                ) from None
            yield

    def authority_folder(self) -> Path:
        """Return the folder of the cluster CA, made if need be."""
        folder = self.folder / "ca"
        make_private_folder(folder)
        return folder

    def create(self, plan: LaunchPlan, config: str) -> Run:
        """Write down a run before anything of it is started; `config` is its YAML."""
        folder = self.folder / "runs" / plan.run_id
        make_private_folder(folder)
        (folder / "down").unlink(missing_ok=True)  # of an earlier life of a resumed run
        write_atomically(folder / "run.yaml", config.encode())
        write_atomically(folder / "plan.json", plan.to_json())
        return self.get(plan.run_id)

    def get(self, run_id: str) -> Run:
        """Return one run.

        Raises:
            ConfigError: there is none of that id, or its files are damaged.
        """
        path = self.folder / "runs" / run_id / "plan.json"
        if not _is_run_id(run_id) or not path.exists():
            known = ", ".join(self._ids()[-3:]) or "none yet"
            raise ConfigError(f"no run {run_id} (latest: {known}; see: launch runs)")
        try:
            return Run(path.parent, LaunchPlan.from_json(path.read_bytes()), path.stat().st_mtime)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged: {error}") from None

    def all(self) -> list[Run]:
        """Return every readable run, the oldest first; what is damaged is left out."""
        runs: list[Run] = []
        for run_id in self._ids():
            with contextlib.suppress(ConfigError):
                runs.append(self.get(run_id))
        return sorted(runs, key=lambda run: (run.started, run.run_id))

    def _ids(self) -> list[str]:
        folder = self.folder / "runs"
        if not folder.is_dir():
            return []
        return sorted(path.parent.name for path in folder.glob("*/plan.json"))


def new_run_id(name: str, now: datetime.datetime | None = None) -> str:
    """Return an id that sorts by time and cannot meet another: `quickstart-20261120-110300-7f3a`.

    The time is UTC.
    """
    moment = now or datetime.datetime.now(datetime.UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _is_run_id(text: str) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text) is not None
