"""The locks fit pyproject.toml, are whole, and name files by their hashes and nothing else."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT

LOCKS = {path.stem: path.read_text() for path in (ROOT / "launcher" / "locks").glob("*.txt")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
BUILDS = ("torch-cpu", "torch-cuda")
ENTRY = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[^ ;]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n(?:    # via.*\n(?:    #   .*\n)*)?"
)
MACHINES = [
    {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    for python, machine in itertools.product(
        ("3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64")
    )
]
Machine = dict[str, str]


@dataclass(frozen=True)
class Entry:
    name: str
    version: str
    marker: str | None

    def applies(self, machine: Machine) -> bool:
        return self.marker is None or Marker(self.marker).evaluate(machine)


def entries(lock: str) -> list[Entry]:
    return [Entry(m["name"], m["version"], m["marker"]) for m in ENTRY.finditer(LOCKS[lock])]


def versions(machine: Machine, *locks: str) -> dict[str, str]:
    """Return what a machine installs from locks; no package twice."""
    found: dict[str, str] = {}
    for entry in (entry for lock in locks for entry in entries(lock)):
        if entry.applies(machine):
            assert entry.name not in found, f"{entry.name} twice"
            found[entry.name] = entry.version
    return found


def wanted(requirements: list[str], machine: Machine) -> Iterator[Requirement]:
    """Yield what requirements mean on a machine, those of our own extras among them."""
    for requirement in map(Requirement, requirements):
        if requirement.name == "motley":
            for extra in requirement.extras:
                yield from wanted(EXTRAS[extra], machine)
        elif requirement.marker is None or requirement.marker.evaluate(machine):
            yield requirement


def test_there_is_a_lock_for_every_extra() -> None:
    assert set(LOCKS) == {*EXTRAS, *BUILDS, "uv"}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_is_a_version_and_its_hashes(lock: str) -> None:
    """No address, no option that would change where pip looks, no package without a hash."""
    head, _, rest = LOCKS[lock].partition("\n")
    assert head.startswith("# Made by `make lock`")
    assert ENTRY.sub("", rest) == ""
    assert "://" not in LOCKS[lock]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_lock_fits_the_project(extra: str) -> None:
    base: list[str] = PROJECT["project"]["dependencies"]
    for machine in MACHINES:
        builds = ("torch-cpu", "torch-cuda") if extra not in ("coordinator", "launcher") else ("",)
        for build in builds:
            found = versions(machine, *filter(None, (extra, build)))
            for requirement in wanted([*base, *EXTRAS[extra]], machine):
                name = canonicalize_name(requirement.name)
                assert name in found, f"{name}: run make lock"
                assert requirement.specifier.contains(found[name]), f"{name}: run make lock"


def test_the_build_has_what_it_asks_for() -> None:
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        for machine in MACHINES:
            assert requirement.specifier.contains(versions(machine, "dev")[requirement.name])


def test_nothing_needs_what_no_lock_has() -> None:
    """Of what is installed here: it is installed without its dependencies, so they stand in it."""
    machine = {**MACHINES[0]}
    found = versions(machine, "dev", "torch-cpu")
    known = 0
    for name, version in found.items():
        try:
            there = distribution(name)
        except PackageNotFoundError:
            continue
        if there.version != version:
            continue  # of another set-up
        known += 1
        for requirement in map(Requirement, there.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(machine):
                other = canonicalize_name(requirement.name)
                assert other in found, f"{name} needs {other}"
                assert requirement.specifier.contains(found[other], prereleases=True), name
    assert known > 100


def test_a_package_has_one_version_in_all_locks() -> None:
    found: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for entry in (entry for lock in LOCKS for entry in entries(lock) if lock != "torch-cpu"):
        found[entry.name, entry.marker].add(entry.version)
    assert {key: several for key, several in found.items() if len(several) > 1} == {}


def test_torch_stands_apart() -> None:
    makefile = (ROOT / "Makefile").read_text()
    version = re.search(r"^TORCH_VERSION\s*:=\s*(\S+)$", makefile, re.M)
    assert version
    assert entries("torch-cpu") == [Entry("torch", f"{version[1]}+cpu", None)]
    assert Entry("torch", version[1], None) in entries("torch-cuda")
    # One for each Python and machine; an index has more, for other systems.
    assert LOCKS["torch-cpu"].count("--hash=") >= len(MACHINES)
    for lock in LOCKS.keys() - set(BUILDS):
        names = {entry.name for entry in entries(lock)} - {"nvidia-ml-py"}  # one file, for NVML
        assert not [n for n in names if n.startswith(("torch", "nvidia-", "triton", "cuda-"))]
