"""Name what Motley needs for training and this Python lacks, for `make setup SYSTEM=1`.

    python scripts/missing_packages.py

Another version than pyproject.toml asks for is a note; a missing package, or one older than the
oldest that Motley's tests passed with, ends with 1.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires, version

# pip is there: it has just installed Motley
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

EXTRAS = ("trainer", "coordinator")
OLDEST = {"torch": "2.11", "transformers": "5.17"}
"""The oldest versions that the tests passed with (CONTRIBUTING.md)."""


def requirements() -> list[Requirement]:
    """Return what a machine that trains needs, as the installed Motley declares it."""
    found: list[Requirement] = []
    for line in requires("motley") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if requirement.name != "motley" and (
            marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        ):
            found.append(requirement)
    return found


def main() -> int:
    """Print a line each on what is missing, too old or another version; return the exit code."""
    missing: list[str] = []
    old: list[str] = []
    others: list[str] = []
    for requirement in requirements():
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing.append(wanted)
            continue
        oldest = OLDEST.get(requirement.name)
        if oldest and Version(installed) < Version(oldest):
            old.append(f"{requirement.name} {installed} (at least {oldest})")
        elif not requirement.specifier.contains(installed, prereleases=True):
            others.append(f"{requirement.name} {installed} for {requirement.specifier}")
    if others:
        print(f"setup: another version than Motley's: {'; '.join(others)}", file=sys.stderr)
    if old:
        print(f"setup: too old: {', '.join(old)}", file=sys.stderr)
    if missing:
        print(f"setup: missing here: {', '.join(missing)}", file=sys.stderr)
    return bool(old or missing)


if __name__ == "__main__":
    sys.exit(main())
