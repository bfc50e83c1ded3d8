"""Name what Motley needs for training and this Python lacks, for `make setup SYSTEM=1`.

    python scripts/missing_packages.py

Another version than pyproject.toml asks for is a note; a missing package ends with 1.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from pip._vendor.packaging.requirements import Requirement  # pip has just installed Motley

EXTRAS = ("trainer", "coordinator")


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
    """Print a line on what is missing, and one on other versions; return the exit code."""
    missing: list[str] = []
    others: list[str] = []
    for requirement in requirements():
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing.append(wanted)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            others.append(f"{requirement.name} {installed} for {requirement.specifier}")
    if others:
        print(f"setup: another version than Motley's: {'; '.join(others)}", file=sys.stderr)
    if missing:
        print(f"setup: missing here: {', '.join(missing)}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
