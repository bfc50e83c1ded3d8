"""Versions of Motley on a host, next to each other in one folder.

    ROOT/versions/<version>-<sha12>-<choice>/   an environment with Motley and its packages
    ROOT/current -> versions/...                what hosts run; replaced in one step
    ROOT/previous -> versions/...               what `roll_back` switches to; older ones are removed

A new version begins as hard links to the packages of the current one, with their bytecode, and uv
changes what its lock says: equal packages cost neither a download nor disk space. A version is
complete once its `motley.json` exists; the next installation removes an interrupted one.
Standard library only: this runs straight from a wheel on a bare host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, LauncherError, PreflightError
from launcher.files import hold_lock
from launcher.installation import venvs
from launcher.installation.environments import Recipe, WheelFacts, read_record, split_lock
from launcher.installation.venvs import Report
from trainer.system.storage.atomic_file import link_atomically, write_atomically

INSTALLATION_SCHEMA = "motley.installation/2"
RECORD = "motley.json"
LOCK = "lock.txt"


class Installation:
    """Installed versions below one folder."""

    def __init__(self, root: Path, report: Report) -> None:
        self.root = root
        self._report = report

    def linked_version(self, name: str) -> str | None:
        """Return the version that `current` or `previous` points to; None when there is none."""
        with contextlib.suppress(OSError):
            target = (self.root / name).readlink()
            if self.read_record(target.name) is not None:
                return target.name
        return None

    def read_record(self, version: str) -> dict[str, Any] | None:
        """Return the record of an installed version."""
        return read_record(self.root / "versions" / version / RECORD)

    def recorded_choice(self) -> tuple[tuple[str, ...], str | None] | None:
        """Return the extras and the torch build of what is installed now."""
        record = self.read_record(self.linked_version("current") or "")
        if record and "environment" in record:  # motley.installation/1: versions shared one
            folder = self.root / "environments" / record["environment"]
            record = read_record(folder / "environment.json")
        return (tuple(record["extras"]), record["torch"]) if record else None

    def plan_install(self, wheel: WheelFacts, recipe: Recipe) -> list[str]:
        """Return what installing a wheel would do, a line per step; nothing if it is installed."""
        steps: list[str] = []
        name = wheel.name_installation(recipe)
        if not self._has_version(wheel, recipe):
            known = self._find_base(wheel, recipe).packages
            if split_lock(recipe.torch_lock) - known:
                steps.append(f"download packages (minutes, torch for {recipe.torch})")
            elif split_lock(recipe.lock) - known:
                steps.append("download packages")
            steps.append(f"install {name}")
        if self.linked_version("current") != name:
            steps.append(f"switch from {self.linked_version('current') or 'nothing'}")
        return steps

    def install_wheel(self, wheel: WheelFacts, recipe: Recipe, index: str) -> bool:
        """Install a wheel and switch to it; return whether anything changed. Needs the lock."""
        self._remove_unfinished()
        if not self.plan_install(wheel, recipe):
            return False
        name = wheel.name_installation(recipe)
        if not self._has_version(wheel, recipe):
            folder = self.root / "versions" / name
            base = self._find_base(wheel, recipe)
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._make_version(folder, wheel, recipe, base, index)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self._switch_current(name)
        self._remove_old()
        return True

    def roll_back(self) -> None:
        """Switch to the previous version; a second call undoes the first. Needs the lock.

        Raises:
            ConfigError: there is none.
        """
        previous = self.linked_version("previous")
        if previous is None or previous == self.linked_version("current"):
            raise ConfigError(f"{self.root}: no previous version to go back to")
        self._switch_current(previous)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Exclude a second installation.

        Raises:
            PreflightError: one is under way, or the folder cannot be written.
        """
        held = hold_lock(
            self.root / ".lock",
            f"pid {os.getpid()}",
            lambda other: f"{self.root}: another installation is running ({other}); wait for it",
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

    def find_users(self) -> list[str]:
        """Return the processes of a run that run from here, as `pid 123: worker ...`."""
        found: list[str] = []
        for pid, argv in self._list_processes():
            words = [Path(word).name for word in argv[1:]]
            if "launcher.session" in words or "trainer" in words:
                found.append(f"pid {pid}: {' '.join(words[:6])}")
        return found

    def _list_processes(self) -> list[tuple[int, list[str]]]:
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

    def _has_version(self, wheel: WheelFacts, recipe: Recipe) -> bool:
        name = wheel.name_installation(recipe)
        record = self.read_record(name)
        return (
            record is not None
            and (record.get("sha256"), record.get("machine")) == (wheel.sha256, recipe.machine)
            and venvs.python_runs(self.root / "versions" / name)
        )

    def _find_base(self, wheel: WheelFacts, recipe: Recipe) -> _Base:
        """Return the version whose packages a new one may share."""
        name = wheel.name_installation(recipe)
        for version in (self.linked_version("current"), self.linked_version("previous")):
            record = self.read_record(version) if version and version != name else None
            wanted = (recipe.python, recipe.machine)
            if record and wanted == (record["python"], record.get("machine")):
                folder = self.root / "versions" / str(version)
                return _Base(folder, split_lock((folder / LOCK).read_text(encoding="utf-8")))
        return _Base(None, set())

    def _make_version(
        self, folder: Path, wheel: WheelFacts, recipe: Recipe, base: _Base, index: str
    ) -> None:
        self._report(f"installing {folder.name}")
        changed = {re.split("[ =[]", entry)[0] for entry in split_lock(recipe.lock) - base.packages}
        _check_room(folder.parent, recipe, base)
        venvs.make_venv(folder)
        if base.folder:
            venvs.link_environment(base.folder, folder)
        uv = venvs.Uv(folder, self.root / "tmp", self._report)
        if changed:
            uv.configure(recipe.uv_lock if "uv" in changed else None)
        # The same decision as that of `make setup`.
        if recipe.torch == "cpu" and "torch" in changed and not uv.has_packages(recipe.torch_lock):
            uv.install_lock("install", recipe.torch_lock, {"torch"}, index)
            changed.remove("torch")
        motley = f"motley @ {wheel.path.as_uri()} --hash=sha256:{wheel.sha256}\n"
        uv.install_lock("sync", recipe.lock + motley, changed - {"uv"})
        (folder / LOCK).write_text(recipe.lock, encoding="utf-8")
        self._report(_compile_passes(folder))
        _check_import(folder)
        tree = {
            "schema": INSTALLATION_SCHEMA,
            "version": wheel.version,
            "wheel": wheel.path.name,
            "sha256": wheel.sha256,
            "extras": recipe.extras,
            "torch": recipe.torch,
            "python": recipe.python,
            "machine": recipe.machine,
        }
        write_atomically(folder / RECORD, json.dumps(tree, indent=1).encode(), 0o644)

    def _switch_current(self, version: str) -> None:
        """Point `current` to a version, and `previous` to what it was; each in one step."""
        before = self.linked_version("current")
        if before is not None and before != version:
            link_atomically(self.root / "previous", Path("versions") / before)
        link_atomically(self.root / "current", Path("versions") / version)

    def _remove_unfinished(self) -> None:
        shutil.rmtree(self.root / "tmp", ignore_errors=True)
        for folder in _list_folders(self.root / "versions"):
            if not (folder / RECORD).is_file():
                self._report(f"removing {folder.name}: its installation was interrupted")
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_old(self) -> None:
        """Remove what neither `current` nor `previous` needs, unless a process runs from it."""
        shutil.rmtree(self.root / "tmp", ignore_errors=True)
        if self.find_users():
            return  # forced during a run: the next installation cleans up
        kept = {self.linked_version("current"), self.linked_version("previous")}
        needed = {record.get("environment") for v in kept if v and (record := self.read_record(v))}
        for kind, wanted in (("versions", kept), ("environments", needed)):
            for folder in _list_folders(self.root / kind):
                if folder.name not in wanted:
                    self._report(f"removing {folder.name}: older than the previous version")
                    shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # that former versions shared: see `recorded_choice`
            (self.root / "environments").rmdir()


@dataclass(frozen=True)
class _Base:
    """An installed version, and the packages that its lock names."""

    folder: Path | None
    packages: set[str]


def _check_room(folder: Path, recipe: Recipe, base: _Base) -> None:
    if split_lock(recipe.torch_lock or recipe.packages) <= base.packages:
        return  # what is large is shared
    free = shutil.disk_usage(folder).free
    if free < recipe.estimated_bytes:
        raise PreflightError(
            f"{folder}: {free / 1e9:.1f} GB free, the packages take about "
            f"{recipe.estimated_bytes / 1e9:.1f} GB; free some space"
        )


def _list_folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []


def _compile_passes(folder: Path) -> str:
    """Compile what a C compiler makes faster, if this host has one; return a line on it."""
    result = venvs.run_program(
        [str(folder / "bin/python"), "-P", "-m", "trainer.system.passes"], 180.0
    )
    return (result.stdout.strip().splitlines() or [f"exit code {result.returncode}"])[-1]


def _check_import(folder: Path) -> None:
    """Check that a version starts, before `current` is switched to it."""
    code = "import launcher.session.__main__, trainer.commands.finetune"
    command = [str(folder / "bin/python"), "-P", "-c", code]
    result = venvs.run_program(command, 120.0)
    if result.returncode != 0:
        words = result.stdout.strip().splitlines()[-5:]
        raise LauncherError(f"{folder.name} does not start; nothing was switched", words)
