"""Python environments of a host: torch and everything else that Motley imports, without Motley.

Versions of Motley that need the same packages share one, so an update takes seconds. An environment
is complete once its `environment.json` is there; what an interruption left has none. Standard
library only: this runs straight from a wheel on a bare host.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Literal

from launcher.errors import ConfigError, LauncherError, PreflightError
from launcher.files import write_atomically

Torch = Literal["cpu", "cuda"]
Report = Callable[[str], None]

ENVIRONMENT_SCHEMA = "motley.environment/1"
ENVIRONMENT_FILE = "environment.json"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU build comes from when pip's own configuration offers none; as in the Makefile."""

_SIZES = {"cuda": 9.0e9, "cpu": 2.5e9, None: 0.6e9}
"""Bytes that making an environment takes, with the downloads that pip unpacks beside it."""
_PIP_DEADLINE = 3600.0


@dataclass(frozen=True)
class Recipe:
    """What an environment is made of."""

    requirements: tuple[str, ...]
    """For pip, as the wheel's metadata states them, environment markers included."""
    extras: tuple[str, ...]
    torch: Torch | None
    """Which build of torch; None where none is required."""
    python: str
    """`3.11`: packages of one minor version of Python do not load in another."""
    machine: str

    @property
    def key(self) -> str:
        """The environment's name: what is equal here is equal there."""
        parts = [*self.requirements, f"torch {self.torch}", self.python, self.machine]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    @property
    def size(self) -> float:
        """Bytes that it takes to make, about."""
        return _SIZES[self.torch]


@dataclass(frozen=True)
class WheelFacts:
    """A wheel of Motley, by its own words."""

    path: Path
    version: str
    sha256: str
    requires: tuple[str, ...]
    requires_python: str

    @property
    def installation(self) -> str:
        """What an installation of it is called: two builds of one version are two."""
        return f"{self.version}-{self.sha256[:12]}"

    def recipe(self, extras: Sequence[str], torch: str | None) -> Recipe:
        """Return what these extras of the wheel need on this machine.

        Raises:
            ConfigError: this Python is too old, there is no such extra, or torch is needed and its
                build is not named.
        """
        oldest = re.search(r">=(\d+)\.(\d+)", self.requires_python)
        if oldest and sys.version_info < (int(oldest[1]), int(oldest[2])):
            raise ConfigError(
                f"{sys.executable} is Python {platform.python_version()}, Motley needs "
                f"{oldest[1]}.{oldest[2]} or newer; install one and start this with it"
            )
        wanted = tuple(sorted(set(extras)))
        found = tuple(sorted(set(self._requirements(frozenset(wanted)))))
        needs_torch = any(_name(requirement) == "torch" for requirement in found)
        if needs_torch and torch not in ("cpu", "cuda"):
            raise ConfigError("torch is among the requirements: say which build, cpu or cuda")
        build: Torch | None = None
        if needs_torch:
            build = "cuda" if torch == "cuda" else "cpu"
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return Recipe(found, wanted, build, python, platform.machine())

    def _requirements(self, extras: frozenset[str], base: bool = True) -> list[str]:
        known = {extra for _, extra in map(_split_extra, self.requires) if extra}
        if extras - known:
            raise ConfigError(f"{self.path.name} has no extra {', '.join(sorted(extras - known))}")
        result: list[str] = []
        for line in self.requires:
            requirement, extra = _split_extra(line)
            if not (extra in extras if extra else base):
                continue
            own = re.fullmatch(r"motley\[([\w, -]+)\]", requirement)
            if own is None:
                result.append(requirement)
            else:  # an extra that includes others of this same wheel
                inner = frozenset(name.strip() for name in own[1].split(","))
                result += self._requirements(inner, base=False)
        return result


def read_wheel(path: Path) -> WheelFacts:
    """Return what a wheel says of itself.

    Raises:
        ConfigError: it is no wheel of Motley.
    """
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            text = archive.read(names[0]).decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (zipfile.BadZipFile, IndexError, UnicodeDecodeError):
        raise ConfigError(f"{path}: not a wheel, or damaged") from None
    headers = HeaderParser().parsestr(text)
    if headers["Name"] != "motley":
        raise ConfigError(f"{path}: a wheel of {headers['Name']}, not of motley")
    return WheelFacts(
        path=path.absolute(),
        version=headers["Version"],
        sha256=hashlib.sha256(data).hexdigest(),
        requires=tuple(" ".join(line.split()) for line in headers.get_all("Requires-Dist") or ()),
        requires_python=headers.get("Requires-Python", ""),
    )


def make_environment(folder: Path, recipe: Recipe, index: str, report: Report) -> None:
    """Make an environment in a folder that does not exist yet.

    Raises:
        PreflightError: Python's venv module or disk space is missing.
        LauncherError: pip failed; its last words are in the details.
    """
    free = shutil.disk_usage(folder.parent).free
    if free < recipe.size:
        raise PreflightError(
            f"{folder.parent}: {free / 1e9:.1f} GB free, a new environment takes about "
            f"{recipe.size / 1e9:.1f} GB; make room"
        )
    build = f"torch for {recipe.torch} and " if recipe.torch else ""
    report(f"making environment {recipe.key}: {build}{len(recipe.requirements)} requirements")
    make_venv(folder, with_pip=True)
    pip = Pip(folder, folder.parent.parent / "tmp", report)
    if recipe.torch:
        _install_torch(pip, recipe, index)
    if recipe.requirements:
        pip.run("install", *recipe.requirements)
    tree = {"schema": ENVIRONMENT_SCHEMA, "key": recipe.key, **asdict(recipe)}
    write_atomically(folder / ENVIRONMENT_FILE, json.dumps(tree, indent=1).encode(), 0o644)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a JSON object from a file; None when there is none, or it is damaged."""
    try:
        tree: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None  # pyright: ignore


def make_venv(folder: Path, with_pip: bool) -> None:
    """Make a virtual environment of this machine's Python (not of one that we run in).

    Raises:
        PreflightError: the venv module is missing, as Debian and Ubuntu ship Python.
        LauncherError: it failed; its last words are in the details.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    command = [base, "-m", "venv", *(() if with_pip else ("--without-pip",)), str(folder)]
    result = _call(command, dict(os.environ), 300.0)
    if result.returncode != 0:
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        if "ensurepip" in result.stdout or "No module named venv" in result.stdout:
            raise PreflightError(f"{base} lacks the venv module; install {python}-venv")
        raise LauncherError(f"{folder}: no environment could be made", _last(result.stdout))


def python_runs(folder: Path) -> bool:
    """Whether an environment's Python starts: an upgrade of the system may have taken it away."""
    try:
        return _call([str(folder / "bin/python"), "-c", ""], dict(os.environ), 60.0).returncode == 0
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

    def offers(self, requirement: str) -> bool:
        """Whether the configured indexes have it for this Python."""
        arguments = ("--no-deps", "--dry-run", requirement)
        return self._call("install", arguments).returncode == 0

    def run(self, verb: str, *arguments: str, python: Path | None = None) -> None:
        """Run pip, for another environment's Python if asked.

        Raises:
            LauncherError: it failed; its last words are in the details.
        """
        self._report(f"pip {verb} {' '.join(arguments)}")
        result = self._call(verb, arguments, python)
        if result.returncode != 0:
            lines = [line for line in result.stdout.splitlines() if line.startswith("ERROR")]
            reason = lines[-1] if lines else f"exit code {result.returncode}"
            raise LauncherError(f"pip {verb} failed: {reason}", _last(result.stdout))

    def _call(
        self, verb: str, arguments: Sequence[str], python: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        target = ("--python", str(python)) if python else ()
        command = [str(self._python), "-m", "pip", *target, "--no-input"]
        command += ["--disable-pip-version-check", verb, "--quiet"]
        # /tmp may be memory, and torch's wheels are large.
        environment = {**os.environ, "TMPDIR": str(self._scratch)}
        return _call([*command, *arguments], environment, _PIP_DEADLINE)


def _install_torch(pip: Pip, recipe: Recipe, index: str) -> None:
    """Install the wanted build of torch: the same decision as `make setup`."""
    wanted = next(r for r in recipe.requirements if _name(r) == "torch")
    exact = re.fullmatch(r"torch==([\w.]+)", wanted)
    if recipe.torch == "cuda" or exact is None:
        pip.run("install", wanted)
    elif pip.offers(f"torch=={exact[1]}+cpu"):
        pip.run("install", f"torch=={exact[1]}+cpu")
    else:  # its dependencies come from the usual index with the rest
        pip.run("install", "--no-deps", "--index-url", index, wanted)


def _call(
    command: Sequence[str], environment: dict[str, str], deadline: float
) -> subprocess.CompletedProcess[str]:
    # What we run from (a wheel on PYTHONPATH) is not for pip and its children.
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


def _split_extra(line: str) -> tuple[str, str | None]:
    """Split `x; marker and extra == "y"` into `x; marker` and `y`, as setuptools writes it."""
    found = re.search(r"(?:;| and) extra == [\"']([\w-]+)[\"']$", line)
    return (line[: found.start()].strip(), found[1]) if found else (line, None)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def _last(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-10:]
