"""Virtual environments of this machine's Python, and uv in them. Standard library only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import LauncherError, PreflightError
from launcher.installation.uv_like_pip import read_settings, uv_variables

Report = Callable[[str], None]

_DEADLINE = 3600.0
_LOCKED = ("--require-hashes", "--only-binary", ":all:")
"""Rules for a lock: the files that it names as wheels, and nothing else."""


def make_venv(folder: Path) -> None:
    """Make a virtual environment of this machine's Python (not of one that we run in).

    Raises:
        PreflightError: the venv module is missing, as Debian and Ubuntu ship Python.
        LauncherError: it failed; its last lines are in the details.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    result = run_program([base, "-P", "-m", "venv", "--without-pip", str(folder)], 300.0)
    if "No module named venv" in result.stdout:
        raise _venv_missing()
    if result.returncode != 0:
        raise LauncherError(
            f"{folder}: the environment could not be created", _last_lines(result.stdout)
        )


def bundled_pip() -> Path:
    """Return the wheel of pip that this Python comes with, which runs as it is.

    Distributions keep it in a folder that Python was configured with (`--with-wheel-pkg-dir`).

    Raises:
        PreflightError: it is not installed.
    """
    folders: list[Path] = []
    if configured := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(configured))
    spec = find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "_bundled")
    for folder in folders:
        for wheel in folder.glob("pip-*.whl"):
            return wheel
    raise _venv_missing()


def _venv_missing() -> PreflightError:
    base = getattr(sys, "_base_executable", sys.executable)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return PreflightError(f"{base} lacks the venv module; install {python}-venv")


def python_runs(folder: Path) -> bool:
    """Return whether an environment's Python starts: a system upgrade may have removed it."""
    try:
        return run_program([str(folder / "bin/python"), "-P", "-c", ""], 60.0).returncode == 0
    except OSError:
        return False


def site_packages(folder: Path) -> Path:
    """Return where an environment of this Python keeps its packages."""
    return folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def link_environment(source: Path, target: Path) -> None:
    """Fill a new environment with hard links to the packages of a version, and to its uv.

    Neither an installer nor Python's compiler writes into a file that is there: both replace it.
    """
    packages = site_packages(source)
    motley = [path.name for path in packages.glob("motley-*.dist-info")]
    _link_tree(packages, site_packages(target), ("launcher", "trainer", *motley))
    _link_file(source / "bin/uv", target / "bin/uv")


def _link_tree(source: Path, target: Path, without: Sequence[str] = ()) -> None:
    target.mkdir(exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.name in without:
                continue
            link = _link_tree if entry.is_dir(follow_symlinks=False) else _link_file
            link(Path(entry.path), target / entry.name)


def _link_file(source: Path, target: Path) -> None:
    os.link(source, target, follow_symlinks=False)


class Uv:
    """The uv of an environment. It looks where the machine's pip is configured to look."""

    def __init__(self, environment: Path, scratch: Path, report: Report) -> None:
        self._environment = environment
        self._python = str(environment / "bin/python")
        self._report = report
        # On the file system of the environment, so that it gets links to what is unpacked; /tmp may
        # be memory, and torch's wheels are large.
        scratch.mkdir(parents=True, exist_ok=True)
        self._lock = scratch / "lock.txt"
        self._variables = {"TMPDIR": str(scratch), "UV_CACHE_DIR": str(scratch / "uv")}
        self._variables |= {"UV_LINK_MODE": "hardlink", **uv_variables({})}
        self._network: tuple[str, ...] = ("--offline",)

    def configure(self, lock: str | None) -> None:
        """Allow downloads, by pip's configuration; let pip install uv if its lock is given.

        Raises:
            PreflightError: Python comes without pip.
            LauncherError: pip failed; its last lines are in the details.
        """
        pip = [self._python, "-P", str(bundled_pip() / "pip"), "--disable-pip-version-check"]
        if lock is not None:
            self._report("installing uv by pip")
            self._lock.write_text(lock, encoding="utf-8")
            rules = ("--no-input", "--no-compile", "--no-deps", *_LOCKED, "-r", str(self._lock))
            result = run_program([*pip, "install", "--quiet", *rules], _DEADLINE, self._variables)
            _raise_failure("pip install", result)
        settings = read_settings(run_program([*pip, "config", "list"], 300.0).stdout)
        self._variables |= uv_variables(settings)
        is_off = settings.get("no-index", "").lower() in ("1", "true", "yes", "on")
        self._network = ("--no-index",) if is_off else ()

    def has_packages(self, lock: str) -> bool:
        """Return whether the configured indexes have the packages of a lock, for this Python."""
        return self._call_uv("install", "--dry-run", lock, (), {}).returncode == 0

    def install_lock(
        self, verb: str, lock: str, changed: Collection[str], index: str | None = None
    ) -> None:
        """Let `uv pip install` or `uv pip sync` install a lock, from another main index if named.

        A package in `changed` is installed again: its release or its file may be another.

        Raises:
            LauncherError: it failed; its last lines are in the details.
        """
        self._report(f"uv pip {verb}: {lock.count('==')} packages, {len(changed)} changed")
        # An index's address may hold a password, and arguments can be read by every user.
        variables = {"UV_DEFAULT_INDEX": index} if index else {}
        again = [word for name in sorted(changed) for word in ("--reinstall-package", name)]
        result = self._call_uv(verb, "--compile-bytecode", lock, again, variables)
        _raise_failure(f"uv pip {verb}", result)

    def _call_uv(
        self, verb: str, mode: str, lock: str, words: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        self._lock.write_text(lock, encoding="utf-8")
        command = [str(self._environment / "bin/uv"), "pip", verb, "--quiet", mode, *self._network]
        command += ["--python", self._python, *_LOCKED, *words]
        command += ["--no-deps", "-r", str(self._lock)] if verb == "install" else [str(self._lock)]
        return run_program(command, _DEADLINE, {**self._variables, **variables})


def _raise_failure(program: str, result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode != 0:
        lines = re.findall(r"^ *(?:ERROR|error|cause): *(.*)", result.stdout, re.M)
        reason = ": ".join(dict.fromkeys(lines))
        raise LauncherError(
            f"{program} failed: {reason or f'exit code {result.returncode}'}",
            _last_lines(result.stdout),
        )


def run_program(
    command: Sequence[str], deadline: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment; its stdout and stderr come together.

    Raises:
        LauncherError: it did not end in time.
    """
    # What we run from (a wheel on PYTHONPATH) is not for pip and its children.
    environment = {**os.environ, **(variables or {})}
    environment = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=deadline,
        )
    except subprocess.TimeoutExpired:
        raise LauncherError(f"{command[0]} did not end within {deadline:.0f} s") from None


def _last_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-10:]
