"""Packages of a version of Motley: torch and everything else that it imports.

The locks in a wheel of Motley determine them: exact versions with their hashes, and nothing else.
Standard library only: this runs straight from a wheel on a bare host.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Literal

from launcher.errors import ConfigError

Torch = Literal["cpu", "cuda"]

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU build comes from when pip's own configuration offers none; as in the Makefile."""

_SIZES = {"cuda": 9.0e9, "cpu": 2.5e9, None: 0.6e9}
"""Bytes that the packages take, including what is there only while they are installed."""
_TORCH_EXTRAS = frozenset({"trainer"})
"""Extras that need torch, whose builds have locks of their own."""


@dataclass(frozen=True)
class Recipe:
    """The inputs that determine the packages of a version."""

    packages: str
    """A requirements file: `name==version; marker --hash=...`, without comments."""
    extras: tuple[str, ...]
    torch: Torch | None
    """Which build of torch; None where none is required."""
    torch_lock: str
    """The same for that build, which may come from an index of its own."""
    uv_lock: str
    """The same for uv, which installs all others."""
    python: str
    """`3.11`: packages of one minor version of Python do not load in another."""
    machine: str

    @property
    def lock(self) -> str:
        """The lock of everything."""
        return self.packages + self.torch_lock + self.uv_lock

    @property
    def choice_name(self) -> str:
        """A name for what the wheel leaves open: `trainer-cpu-py3.11`."""
        torch = f"-{self.torch}" if self.torch else ""
        return f"{'+'.join(self.extras)}{torch}-py{self.python}"

    @property
    def estimated_bytes(self) -> float:
        """Bytes that a first installation takes, about."""
        return _SIZES[self.torch]


@dataclass(frozen=True)
class WheelFacts:
    """A wheel of Motley, by its metadata."""

    path: Path
    version: str
    sha256: str
    locks: Mapping[str, str]
    """Each lock in it by its name: that of an extra, `torch-BUILD`, or `uv`."""
    requires_python: str

    def name_installation(self, recipe: Recipe) -> str:
        """Return a name that no other installation has: what `current` names is never remade."""
        return f"{self.version}-{self.sha256[:12]}-{recipe.choice_name}"

    def make_recipe(self, extras: Sequence[str], torch: str | None) -> Recipe:
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
        unknown = [name for name in (*wanted, "uv") if name not in self.locks]
        if unknown:
            raise ConfigError(f"{self.path.name} has no lock for {', '.join(unknown)}")
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
            uv_lock=self.locks["uv"],
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


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a JSON object from a file; None when there is none, or it is damaged."""
    try:
        tree: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None  # pyright: ignore


def split_lock(lock: str) -> set[str]:
    """Return the packages of a lock, each with its marker and its hashes."""
    return set(re.findall(r"^\S.*(?:\n[ \t].*)*", lock, re.MULTILINE))


def _without_comments(lock: str) -> str:
    lines = (line for line in lock.splitlines() if not line.lstrip().startswith("#"))
    return "".join(f"{line}\n" for line in lines)
