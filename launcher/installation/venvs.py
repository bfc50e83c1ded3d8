"""Virtual environments of this machine's Python, and the pip in them. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import LauncherError, PreflightError

Report = Callable[[str], None]

_PIP_DEADLINE = 3600.0


def make_venv(folder: Path, with_pip: bool) -> None:
    """Make a virtual environment of this machine's Python (not of one that we run in).

    Raises:
        PreflightError: the venv module is missing, as Debian and Ubuntu ship Python.
        LauncherError: it failed; its last lines are in the details.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    missing = PreflightError(f"{base} lacks the venv module; install {python}-venv")
    pip = bundled_pip() if with_pip else None
    if with_pip and pip is None:
        raise missing
    result = call([base, "-P", "-m", "venv", "--without-pip", str(folder)], 300.0)
    if "No module named venv" in result.stdout:
        raise missing
    if result.returncode != 0:
        raise LauncherError(f"{folder}: the environment could not be created", _last(result.stdout))
    if pip is not None:
        # As `ensurepip` would, which also compiles all of it: 5 s of CPU time, and pip's next
        # start compiles what it imports.
        with zipfile.ZipFile(pip) as archive:
            archive.extractall(site_packages(folder))


def bundled_pip() -> Path | None:
    """Return the wheel of pip that this Python comes with; None if it is not installed.

    Distributions keep it in a folder that Python was configured with (`--with-wheel-pkg-dir`).
    """
    folders: list[Path] = []
    if configured := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(configured))
    spec = find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "_bundled")
    return next((wheel for folder in folders for wheel in folder.glob("pip-*.whl")), None)


def python_runs(folder: Path) -> bool:
    """Whether an environment's Python starts: a system upgrade may have removed it."""
    try:
        return call([str(folder / "bin/python"), "-P", "-c", ""], 60.0).returncode == 0
    except OSError:
        return False


def site_packages(folder: Path) -> Path:
    """Return where an environment of this Python keeps its packages."""
    return folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


class Pip:
    """The pip of an environment. It reads the machine's pip configuration as pip always does."""

    def __init__(self, environment: Path, scratch: Path, report: Report) -> None:
        self._python = environment / "bin/python"
        self._scratch = scratch
        self._report = report

    def offers(self, lock: Path) -> bool:
        """Whether the configured indexes have the packages of a lock, for this Python."""
        return self._call("install", ("--dry-run", *locked(lock)), {}).returncode == 0

    def run(self, verb: str, *arguments: str, index: str | None = None) -> None:
        """Run pip, with another main index if one is named.

        Raises:
            LauncherError: it failed; its last lines are in the details.
        """
        self._report(f"pip {verb} {' '.join(arguments)}")
        # An index's address may hold a password, and arguments can be read by every user.
        variables = {"PIP_INDEX_URL": index} if index else {}
        result = self._call(verb, arguments, variables)
        if result.returncode != 0:
            lines = [line for line in result.stdout.splitlines() if line.startswith("ERROR")]
            reason = lines[-1] if lines else f"exit code {result.returncode}"
            raise LauncherError(f"pip {verb} failed: {reason}", _last(result.stdout))

    def _call(
        self, verb: str, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        command = [str(self._python), "-P", "-m", "pip", "--no-input"]
        command += ["--disable-pip-version-check", verb, "--quiet"]
        # /tmp may be memory, and torch's wheels are large.
        variables = {"TMPDIR": str(self._scratch), **variables}
        return call([*command, *arguments], _PIP_DEADLINE, variables)


def locked(lock: Path) -> tuple[str, ...]:
    """Return pip's arguments for a lock: the files that it names as wheels, and nothing else."""
    rules = ("--require-hashes", "--no-deps", "--only-binary", ":all:")
    return (*rules, "--requirement", str(lock))


def call(
    command: Sequence[str], deadline: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment; its stdout and stderr come together."""
    # What we run from (a wheel on PYTHONPATH) is not for pip and its children.
    environment = {**os.environ, **(variables or {})}
    environment = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
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


def _last(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-10:]
