"""Versions of Motley on a host, next to each other in one folder.

    ROOT/environments/<key>/            packages, shared by versions that need the same ones
    ROOT/versions/<version>-<sha12>/    Motley itself and a link to its environment; motley.json
    ROOT/current -> versions/...        what hosts run; replaced in one step
    ROOT/previous -> versions/...       what `roll_back` switches to; anything older is removed

A version is complete once its `motley.json` exists; the next installation removes an interrupted
one. Standard library only: this runs straight from a wheel on a bare host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, LauncherError, PreflightError
from launcher.files import hold_lock
from launcher.installation import environments, venvs
from launcher.installation.environments import (
    ENVIRONMENT_FILE,
    Recipe,
    WheelFacts,
    read_record,
)
from launcher.installation.venvs import Report
from trainer.system.storage.atomic_file import link_atomically, write_atomically

INSTALLATION_SCHEMA = "motley.installation/1"
RECORD = "motley.json"


class Installation:
    """What is installed below one folder."""

    def __init__(self, root: Path, report: Report) -> None:
        self.root = root
        self._report = report

    def linked(self, name: str) -> str | None:
        """Return the version that `current` or `previous` points to; None when there is none."""
        with contextlib.suppress(OSError):
            target = (self.root / name).readlink()
            if self.record(target.name) is not None:
                return target.name
        return None

    def record(self, version: str) -> dict[str, Any] | None:
        """Return the record of an installed version."""
        return read_record(self.root / "versions" / version / RECORD)

    def recorded_choice(self) -> tuple[tuple[str, ...], str | None] | None:
        """Return the extras and the torch build of what is installed now."""
        record = self.record(self.linked("current") or "")
        if record is None:
            return None
        path = self.root / "environments" / record["environment"] / ENVIRONMENT_FILE
        environment = read_record(path)
        return (tuple(environment["extras"]), environment["torch"]) if environment else None

    def plan(self, wheel: WheelFacts, recipe: Recipe) -> list[str]:
        """Return what installing a wheel would do, a line per step; nothing if it is installed."""
        steps: list[str] = []
        if not self._has_environment(recipe):
            build = f", torch for {recipe.torch}" if recipe.torch else ""
            steps.append(f"make environment {recipe.key} (minutes{build})")
        if not self._has_version(wheel, recipe):
            steps.append(f"install {wheel.installation}")
        if self.linked("current") != wheel.installation:
            steps.append(f"switch from {self.linked('current') or 'nothing'}")
        return steps

    def install(self, wheel: WheelFacts, recipe: Recipe, index: str) -> bool:
        """Install a wheel and switch to it; return whether anything changed. Needs the lock."""
        self._remove_unfinished()
        if not self.plan(wheel, recipe):
            return False
        environment = self.root / "environments" / recipe.key
        if not self._has_environment(recipe):
            shutil.rmtree(environment, ignore_errors=True)
            environment.parent.mkdir(parents=True, exist_ok=True)
            try:
                environments.make_environment(environment, recipe, index, self._report)
            except BaseException:
                shutil.rmtree(environment, ignore_errors=True)
                raise
        if not self._has_version(wheel, recipe):
            self._make_version(wheel, environment)
        self._switch(wheel.installation)
        self._remove_old()
        return True

    def roll_back(self) -> None:
        """Switch to the previous version; a second call undoes the first. Needs the lock.

        Raises:
            ConfigError: there is none.
        """
        previous = self.linked("previous")
        if previous is None or previous == self.linked("current"):
            raise ConfigError(f"{self.root}: no previous version to go back to")
        self._switch(previous)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Exclude a second installation.

        Raises:
            PreflightError: one is under way, or the folder cannot be written.
        """
        held = hold_lock(
            self.root / ".lock",
            f"pid {os.getpid()}",
            lambda other: f"{self.root}: another installation is under way ({other}); wait for it",
        )
        with contextlib.ExitStack() as stack:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held)
            except OSError as error:
                raise PreflightError(
                    f"{self.root}: {error.strerror}; it belongs to the run user: run the trainer"
                    " recipe"
                ) from None
            yield

    def users(self) -> list[str]:
        """Return the processes of a run that run from here, as `pid 123: worker ...`."""
        found: list[str] = []
        for pid, argv in self._processes():
            words = [Path(word).name for word in argv[1:]]
            if "launcher.session" in words or "trainer" in words:
                found.append(f"pid {pid}: {' '.join(words[:6])}")
        return found

    def _processes(self) -> list[tuple[int, list[str]]]:
        result: list[tuple[int, list[str]]] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if argv[0].startswith(f"{self.root}/"):
                    result.append((int(folder.name), argv))
        return result

    def _has_environment(self, recipe: Recipe) -> bool:
        folder = self.root / "environments" / recipe.key
        return (folder / ENVIRONMENT_FILE).is_file() and venvs.python_runs(folder)

    def _has_version(self, wheel: WheelFacts, recipe: Recipe) -> bool:
        record = self.record(wheel.installation)
        wanted = (wheel.sha256, recipe.key, recipe.python)
        return record is not None and wanted == tuple(
            record.get(key) for key in ("sha256", "environment", "python")
        )

    def _make_version(self, wheel: WheelFacts, environment: Path) -> None:
        folder = self.root / "versions" / wheel.installation
        self._report(f"installing {wheel.installation}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        venvs.make_venv(folder, with_pip=False)
        packages = venvs.site_packages(folder)
        link = f"{venvs.site_packages(environment)}\n"
        (packages / "environment.pth").write_text(link, encoding="utf-8")
        # Its requirements are in the environment, reached through the link, and so is pip.
        pip = venvs.Pip(folder, self.root / "tmp", self._report)
        pip.run("install", "--no-deps", "--no-index", "--ignore-installed", str(wheel.path))
        self._report(_compile_passes(folder))
        _check_import(folder)
        tree = {
            "schema": INSTALLATION_SCHEMA,
            "version": wheel.version,
            "wheel": wheel.path.name,
            "sha256": wheel.sha256,
            "environment": environment.name,
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        }
        write_atomically(folder / RECORD, json.dumps(tree, indent=1).encode(), 0o644)

    def _switch(self, version: str) -> None:
        """Point `current` to a version, and `previous` to what it was; each in one step."""
        before = self.linked("current")
        if before is not None and before != version:
            link_atomically(self.root / "previous", Path("versions") / before)
        link_atomically(self.root / "current", Path("versions") / version)

    def _remove_unfinished(self) -> None:
        shutil.rmtree(self.root / "tmp", ignore_errors=True)
        for kind, file in (("environments", ENVIRONMENT_FILE), ("versions", RECORD)):
            for folder in _folders(self.root / kind):
                if not (folder / file).is_file():
                    self._report(f"removing {folder.name}: its installation was interrupted")
                    shutil.rmtree(folder, ignore_errors=True)

    def _remove_old(self) -> None:
        """Remove what neither `current` nor `previous` needs, unless a process runs from it."""
        shutil.rmtree(self.root / "tmp", ignore_errors=True)
        if self.users():
            return  # forced during a run: the next installation cleans up
        kept = {self.linked("current"), self.linked("previous")}
        needed = {record["environment"] for v in kept if v and (record := self.record(v))}
        for kind, wanted in (("versions", kept), ("environments", needed)):
            for folder in _folders(self.root / kind):
                if folder.name not in wanted:
                    self._report(f"removing {folder.name}: older than the previous version")
                    shutil.rmtree(folder, ignore_errors=True)


def _folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []


def _compile_passes(folder: Path) -> str:
    """Compile what a C compiler makes faster, if this host has one; return a line on it."""
    result = venvs.call([str(folder / "bin/python"), "-P", "-m", "trainer.system.passes"], 180.0)
    return (result.stdout.strip().splitlines() or [f"exit code {result.returncode}"])[-1]


def _check_import(folder: Path) -> None:
    """Check that a version starts, before `current` is switched to it."""
    code = "import launcher.session.__main__, trainer.commands.finetune"
    command = [str(folder / "bin/python"), "-P", "-c", code]
    result = venvs.call(command, 120.0)
    if result.returncode != 0:
        words = result.stdout.strip().splitlines()[-5:]
        raise LauncherError(f"{folder.name} does not start; nothing was switched", words)
