"""Python environments of a host: torch and everything else that Motley imports, without Motley.

The locks in a wheel of Motley determine the content of one: exact versions with their hashes, and
nothing else. Versions of Motley with equal locks share one, so an update takes seconds. An
environment is complete once its `environment.json` exists; an interrupted one has none.
Standard library only: this runs straight from a wheel on a bare host.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Literal

from launcher.errors import ConfigError, PreflightError
from launcher.installation.venvs import Pip, Report, locked, make_venv
from trainer.system.storage.atomic_file import write_atomically

Torch = Literal["cpu", "cuda"]

ENVIRONMENT_SCHEMA = "motley.environment/1"
ENVIRONMENT_FILE = "environment.json"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU build comes from when pip's own configuration offers none; as in the Makefile."""

_SIZES = {"cuda": 9.0e9, "cpu": 2.5e9, None: 0.6e9}
"""Bytes that making an environment takes, including the downloads that pip unpacks next to it."""
_TORCH_EXTRAS = frozenset({"trainer"})
"""Extras that need torch, whose builds have locks of their own."""


@dataclass(frozen=True)
class Recipe:
    """What determines the content of an environment."""

    packages: str
    """A requirements file for pip: `name==version; marker --hash=...`, without comments."""
    extras: tuple[str, ...]
    torch: Torch | None
    """Which build of torch; None where none is required."""
    torch_lock: str
    """The same for that build, which may come from an index of its own."""
    python: str
    """`3.11`: packages of one minor version of Python do not load in another."""
    machine: str

    @property
    def key(self) -> str:
        """The environment's name: equal recipes give equal names."""
        parts = [self.packages, self.torch_lock, f"torch {self.torch}", self.python, self.machine]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    @property
    def size(self) -> float:
        """Bytes that it takes to make, about."""
        return _SIZES[self.torch]


@dataclass(frozen=True)
class WheelFacts:
    """A wheel of Motley, by its metadata."""

    path: Path
    version: str
    sha256: str
    locks: Mapping[str, str]
    """Each lock in it by its name: that of an extra, or `torch-BUILD`."""
    requires_python: str

    @property
    def installation(self) -> str:
        """The name of its installation: two builds of one version have two names."""
        return f"{self.version}-{self.sha256[:12]}"

    def recipe(self, extras: Sequence[str], torch: str | None) -> Recipe:
        """Return the recipe of these extras of the wheel on this machine.

        Raises:
            ConfigError: this Python is too old, there is no lock for an extra, or torch is needed
                and its build is not named.
        """
        oldest = re.search(r">=(\d+)\.(\d+)", self.requires_python)
        if oldest and sys.version_info < (int(oldest[1]), int(oldest[2])):
            raise ConfigError(
                f"{sys.executable} is Python {platform.python_version()}, Motley needs "
                f"{oldest[1]}.{oldest[2]} or newer; install one and start this with it"
            )
        wanted = tuple(sorted(set(extras)))
        unknown = [extra for extra in wanted if extra not in self.locks]
        if unknown:
            raise ConfigError(f"{self.path.name} has no lock for extra {', '.join(unknown)}")
        build: Torch | None = None
        if _TORCH_EXTRAS.intersection(wanted):
            if torch not in ("cpu", "cuda"):
                raise ConfigError("torch is among the requirements: name its build, cpu or cuda")
            build = "cuda" if torch == "cuda" else "cpu"
        return Recipe(
            packages="".join(self.locks[extra] for extra in wanted),
            extras=wanted,
            torch=build,
            torch_lock=self.locks[f"torch-{build}"] if build else "",
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            machine=platform.machine(),
        )


def read_wheel(path: Path) -> WheelFacts:
    """Return the metadata of a wheel.

    Raises:
        ConfigError: it is no wheel of Motley.
    """
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
            text = archive.read(metadata).decode()
            found = [re.fullmatch(r"launcher/locks/([\w-]+)\.txt", name) for name in names]
            locks = {one[1]: archive.read(one[0]).decode() for one in found if one}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (zipfile.BadZipFile, StopIteration, UnicodeDecodeError):
        raise ConfigError(f"{path}: not a wheel, or damaged") from None
    headers = HeaderParser().parsestr(text)
    if headers["Name"] != "motley":
        raise ConfigError(f"{path}: a wheel of {headers['Name']}, not of motley")
    return WheelFacts(
        path=path.absolute(),
        version=headers["Version"],
        sha256=hashlib.sha256(data).hexdigest(),
        locks={name: _without_comments(lock) for name, lock in locks.items()},
        requires_python=headers.get("Requires-Python", ""),
    )


def make_environment(folder: Path, recipe: Recipe, index: str, report: Report) -> None:
    """Make an environment in a folder that does not exist yet.

    Raises:
        PreflightError: Python's venv module or disk space is missing.
        LauncherError: pip failed, or a file is not the one that was locked; pip's last lines are
            in the details.
    """
    free = shutil.disk_usage(folder.parent).free
    if free < recipe.size:
        raise PreflightError(
            f"{folder.parent}: {free / 1e9:.1f} GB free, a new environment takes about "
            f"{recipe.size / 1e9:.1f} GB; free some space"
        )
    build = f"torch for {recipe.torch} and " if recipe.torch else ""
    report(f"making environment {recipe.key}: {build}{recipe.packages.count('==')} packages")
    make_venv(folder, with_pip=True)
    pip = Pip(folder, folder.parent.parent / "tmp", report)
    lock, torch_lock = folder / "lock.txt", folder / "lock-torch.txt"
    lock.write_text(recipe.packages, encoding="utf-8")
    if recipe.torch:
        torch_lock.write_text(recipe.torch_lock, encoding="utf-8")
        # The same decision as that of `make setup`.
        elsewhere = recipe.torch == "cpu" and not pip.offers(torch_lock)
        pip.run("install", *locked(torch_lock), index=index if elsewhere else None)
    if recipe.packages:
        pip.run("install", *locked(lock))
    tree = {
        "schema": ENVIRONMENT_SCHEMA,
        "key": recipe.key,
        "extras": recipe.extras,
        "torch": recipe.torch,
        "python": recipe.python,
        "machine": recipe.machine,
    }
    write_atomically(folder / ENVIRONMENT_FILE, json.dumps(tree, indent=1).encode(), 0o644)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a JSON object from a file; None when there is none, or it is damaged."""
    try:
        tree: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None  # pyright: ignore


def _without_comments(lock: str) -> str:
    lines = (line for line in lock.splitlines() if not line.lstrip().startswith("#"))
    return "".join(f"{line}\n" for line in lines)
