"""Update Motley on every host without Ansible: the wheel is sent over the connection.

The host installs it by itself (`install.py`, run from that very wheel), in a session of its
own: it finishes even if the connection breaks, and its output is read from its log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from launcher.errors import ConfigError, LauncherError, PartialError, PreflightError
from launcher.hosts import fleet
from launcher.hosts.base import Connection
from launcher.hosts.fleet import REACH, Answers, format_error
from launcher.installation.environments import WheelFacts
from launcher.installation.install import BEGUN_SCHEMA, RESULT_SCHEMA
from launcher.inventory.hosts import Host
from launcher.runs.records.run import locate_state_folder
from launcher.session.processes import ProcessIdentity
from trainer.system.untrusted_data import validate_data, validate_json

RECIPE = "ansible-playbook recipes/gpu-training.yml"

_BEGIN_DEADLINE = 20.0
_CHECK_DEADLINE = 60.0
_SWITCH_DEADLINE = 300.0
_DOWNLOAD_DEADLINE = 3600.0
_POLL = 0.2

Report = Callable[[str], None]
Tree = dict[str, Any]


@dataclass(frozen=True)
class HostUpdate:
    """The change on one host, made or planned."""

    host: str
    before: str | None
    after: str | None
    steps: tuple[str, ...]
    used_by: tuple[str, ...]
    """Processes of a run that run from what is installed."""

    @property
    def needs_download(self) -> bool:
        """Whether packages have to be downloaded, which may take minutes."""
        return any(step.startswith("download") for step in self.steps)

    @property
    def describe(self) -> str:
        """One line for people."""
        if self.before == self.after:
            return f"{self.host}: {self.after} is already installed"
        note = ", with new packages" if self.needs_download else ""
        return f"{self.host}: {self.before or 'nothing'} -> {self.after}{note}"


class Fleet:
    """The hosts of an inventory on which Motley is installed."""

    def __init__(self, hosts: Sequence[Host], report: Report) -> None:
        self._hosts = list(hosts)
        self._report = report

    def push_version(
        self, wheel: WheelFacts | None, *, quick: bool, force: bool, dry_run: bool
    ) -> list[HostUpdate]:
        """Update every host, or none; with `dry_run` only return what that would change.

        Raises:
            LauncherError: as the methods below.
        """
        self.skip_checkouts()
        updates = self.plan_updates(wheel)
        if not dry_run:
            refuse_updates(updates, quick, force)
            self.apply_updates(updates, wheel, force)
        return updates

    def skip_checkouts(self) -> None:
        """Leave out hosts that run Motley from elsewhere, such as this checkout.

        Raises:
            LauncherError: a host does not answer.
            ConfigError: no host is left.
        """
        pythons = fleet.ask_hosts(self._hosts, lambda _, there: there.python, REACH).require()
        for name, python in pythons.items():
            if installation_root(python) is None:
                self._report(
                    f"{name} skipped: {python} belongs to no installation that push updates"
                )
        self._hosts = [
            host for host in self._hosts if installation_root(pythons[host.name]) is not None
        ]
        if not self._hosts:
            raise ConfigError(f"no host has Motley installed; first: {RECIPE}")

    def plan_updates(self, wheel: WheelFacts | None) -> list[HostUpdate]:
        """Copy the wheel to every host and ask what it would change; no wheel: plan a rollback.

        Raises:
            LauncherError: a host failed or has no previous version; nothing was changed.
        """
        if wheel is None:
            arguments = ("show",)
        else:
            data = wheel.path.read_bytes()
            fleet.ask_hosts(
                self._hosts, lambda h, c: _copy_wheel(h, c, wheel, data), REACH
            ).require()
            arguments = ("install", "--check")
        trees = self._run_installer(wheel, arguments, _CHECK_DEADLINE).require()
        return [_host_update(name, tree, wheel is None) for name, tree in trees.items()]

    def apply_updates(
        self, updates: Sequence[HostUpdate], wheel: WheelFacts | None, force: bool
    ) -> None:
        """Install or roll back on every host at once.

        Raises:
            PartialError: a host failed; the others are done.
        """
        wanted = {update.host: update for update in updates if update.before != update.after}
        hosts = [host for host in self._hosts if host.name in wanted]
        minutes = any(update.needs_download for update in updates)
        deadline = _DOWNLOAD_DEADLINE if minutes else _SWITCH_DEADLINE
        arguments = ("rollback",) if wheel is None else ("install",)
        if force:
            arguments = (*arguments, "--force")
        answers = self._run_installer(wheel, arguments, deadline, hosts)
        if answers.errors:
            details = [f"done: {wanted[name].describe}" for name in answers.found]
            for name, error in answers.errors.items():
                details.append(format_error(name, error))
                details += error.details if isinstance(error, LauncherError) else ()
            raise PartialError(
                f"{len(answers.errors)} of {len(wanted)} hosts were not updated: "
                f"{', '.join(answers.errors)}; correct this and push again",
                details,
            )

    def _run_installer(
        self,
        wheel: WheelFacts | None,
        arguments: Sequence[str],
        deadline: float,
        hosts: Sequence[Host] | None = None,
    ) -> Answers[_Answer]:
        def run(host: Host, connection: Connection) -> _Answer:
            def report(line: str) -> None:
                self._report(f"{host.name}: {line}")

            return _install_on_host(host, connection, wheel, arguments, deadline, report)

        chosen = self._hosts if hosts is None else hosts
        return fleet.ask_hosts(chosen, run, deadline + REACH)


def refuse_updates(updates: Sequence[HostUpdate], quick: bool, force: bool) -> None:
    """Raise PreflightError when these updates should not begin now."""
    changing = [update for update in updates if update.before != update.after]
    used = [update for update in changing if update.used_by]
    if used and not force:
        raise PreflightError(
            f"a run is active on {', '.join(u.host for u in used)}; stop it with launch cluster "
            "down, or push with --force: the run keeps its version",
            [f"{update.host}: {line}" for update in used for line in update.used_by],
        )
    slow = [update.host for update in changing if update.needs_download]
    if slow and quick:
        raise PreflightError(
            f"dependencies changed: {', '.join(slow)} would download packages; "
            f"push without --quick, or run: {RECIPE}"
        )


def serialize_update(update: HostUpdate) -> Tree:
    """Return an update for programs."""
    return {
        "host": update.host,
        "before": update.before,
        "after": update.after,
        "changed": update.before != update.after,
        "downloads": update.needs_download,
        "used_by": list(update.used_by),
    }


def installation_root(python: str) -> str | None:
    """Return the folder of an installation by its Python; None for any other Python."""
    parts = PurePosixPath(python)
    if parts.parts[-3:-1] != ("current", "bin"):
        return None
    return str(parts.parents[2])


@dataclass(frozen=True)
class _Answer:
    """The report of an installation."""

    version: str | None
    previous: str | None
    steps: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class _InstallFailure:
    """The reason why nothing was installed."""

    error: str
    exit_code: int
    details: tuple[str, ...] = ()


def _install_on_host(
    host: Host,
    connection: Connection,
    wheel: WheelFacts | None,
    arguments: Sequence[str],
    deadline: float,
    report: Report,
) -> _Answer:
    """Run `launcher.installation` on a host; its progress lines are reported."""
    folder = _wheel_folder(host, connection, wheel)
    log = f"{folder}/{secrets.token_hex(4)}.log"
    python = connection.python
    argv = [python, "-P", "-m", "launcher.installation", *arguments, "--as-job"]
    argv += ["--root", str(installation_root(python))]
    environment: Mapping[str, str] = {}
    if wheel is not None:
        path = f"{folder}/{wheel.path.name}"
        argv += ["--wheel", path]
        environment = {"PYTHONPATH": path}  # the new version installs itself
    connection.make_folder(folder)
    connection.spawn_process(argv, environment, log)
    tree = _follow_log(connection, log, deadline, report)
    connection.remove_file(log)
    if tree["schema"] == RESULT_SCHEMA:
        return validate_data(_Answer, tree, "installation")
    failure = validate_data(_InstallFailure, tree, "installation", lines=True)
    kinds = {kind.exit_code: kind for kind in (ConfigError, PreflightError)}
    raise kinds.get(failure.exit_code, LauncherError)(failure.error, failure.details)


def _follow_log(connection: Connection, log: str, deadline: float, report: Report) -> Tree:
    process: ProcessIdentity | None = None
    offset, until = 0, time.monotonic() + deadline
    begun_by, last = time.monotonic() + _BEGIN_DEADLINE, ""
    while time.monotonic() < until:
        alive = process is None or connection.is_alive(process)
        data = connection.read(log, offset)
        end = data.rfind(b"\n") + 1
        offset += end
        for line in data[:end].decode(errors="replace").splitlines():
            tree = _parse_object(line)
            if tree is None:
                last = line.removeprefix("installation: ")
                if line != last:  # its own lines; all others belong to an error
                    report(last)
            elif tree["schema"] == BEGUN_SCHEMA:
                process = validate_data(ProcessIdentity, tree, "installation")
            else:
                return tree
        if process is None and time.monotonic() > begun_by:
            raise LauncherError(f"the installation did not start: {last or 'no output'}")
        if not alive:
            raise LauncherError(f"the installation ended without a result (last: {last}); {log}")
        time.sleep(_POLL)
    raise LauncherError(f"the installation did not end within {deadline:.0f} s; see {log}")


def _wheel_folder(host: Host, connection: Connection, wheel: WheelFacts | None) -> str:
    name = "rollback" if wheel is None else wheel.sha256[:12]
    return str(locate_state_folder(host, connection).folder / "push" / name)


def _copy_wheel(host: Host, connection: Connection, wheel: WheelFacts, data: bytes) -> None:
    """Write the wheel on a host and remove those of earlier pushes."""
    folder = PurePosixPath(_wheel_folder(host, connection, wheel))
    connection.write(str(folder / wheel.path.name), data)
    for name in connection.list_folder(str(folder.parent)):
        if name != folder.name:
            for file in connection.list_folder(str(folder.parent / name)):
                connection.remove_file(str(folder.parent / name / file))


def _parse_object(line: str) -> Tree | None:
    if not line.startswith('{"schema"'):
        return None
    try:
        return validate_json(Tree, line, "installation", lines=True)
    except ValueError:
        return None


def _host_update(name: str, answer: _Answer, back: bool) -> HostUpdate:
    if not back:
        return HostUpdate(name, answer.previous, answer.version, answer.steps, answer.used_by)
    if answer.previous in (None, answer.version):
        raise PreflightError(f"{name}: no previous version to go back to; nothing was changed")
    return HostUpdate(name, answer.version, answer.previous, (), answer.used_by)
