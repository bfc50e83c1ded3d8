"""A wheel of this checkout: `python -P -m launcher.transfer.wheel --output DIR`.

Equal sources give equal bytes (for one version of setuptools), independent of user and time: the
hash of the wheel identifies the code that a host runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import ConfigError, LauncherError
from launcher.installation.environments import WheelFacts, read_wheel
from trainer.system.storage.atomic_file import write_atomically

_EPOCH = "1577836800"
"""2020-01-01, the date of every file in the wheel; see reproducible-builds.org."""
_FILES = ("pyproject.toml", "README.md", "LICENSE")
_PACKAGES = ("launcher", "trainer")
_DEADLINE = 300.0
_BACKEND = """
import sys
from setuptools import build_meta

sys.tracebacklimit = 0  # what is wrong with the sources, not where setuptools saw it
build_meta.build_wheel(sys.argv[1])
"""
"""Program that builds in the folder of the sources: `pyproject.toml` names its `build-backend`."""


def checkout_folder() -> Path | None:
    """Return the checkout that this package runs from; None when it was installed."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def choose_wheel(named: Path | None, folder: Path) -> WheelFacts:
    """Return the named wheel, else one of this checkout, which is built into `folder`.

    Raises:
        LauncherError: it is no wheel of Motley, or there is no checkout to build one of.
    """
    if named is not None:
        return read_wheel(named)
    checkout = checkout_folder()
    if checkout is None:
        raise ConfigError("Motley is installed here without a checkout; give --wheel FILE")
    return build_wheel(checkout, folder)


def build_wheel(checkout: Path, folder: Path) -> WheelFacts:
    """Build the wheel of a checkout into `folder`, which is made.

    It is built from a copy: nothing is written to the checkout, stale files (`build/`) are
    left out, and files, links and permissions do not depend on how it was cloned.

    Raises:
        ConfigError: this is no checkout of Motley.
        LauncherError: setuptools could not build it; its last lines are in the details.
    """
    missing = [name for name in (*_FILES, *_PACKAGES) if not (checkout / name).exists()]
    if missing:
        raise ConfigError(f"{checkout}: not a checkout of Motley:{', '.join(missing)} is missing")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="motley-wheel-") as scratch:
        source = Path(scratch) / "source"
        _copy_sources(checkout, source)
        built = _build_wheel(source, Path(scratch) / "wheel")
        target = folder / built.name
        write_atomically(target, built.read_bytes(), 0o644)
    return read_wheel(target)


def _copy_sources(checkout: Path, source: Path) -> None:
    source.mkdir()
    for name in _FILES:
        shutil.copyfile(checkout / name, source / name)
    for package in _PACKAGES:  # links are followed: the wheel gets what they point to
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(checkout / package, source / package, ignore=ignored)
    for path in source.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _build_wheel(source: Path, folder: Path) -> Path:
    # By the setuptools of this environment, from the locks, asked directly: pip would look for an
    # index, and takes as long again.
    if find_spec("setuptools") is None:
        raise LauncherError(f"{sys.executable} has no setuptools to build a wheel with: make setup")
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-P", "-c", _BACKEND, str(folder)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        umask=0o022,
    )
    wheels = list(folder.glob("motley-*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        words = [line for line in result.stderr.splitlines() if line.strip()]
        raise LauncherError("setuptools could not build a wheel of this checkout", words[-10:])
    return wheels[0]


def main(arguments: list[str] | None = None) -> int:
    """Build the wheel of this checkout and print where it is, as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -P -m launcher.transfer.wheel", description=main.__doc__
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    output: Path = parser.parse_args(arguments).output
    checkout = checkout_folder()
    try:
        if checkout is None:
            raise ConfigError(
                "launcher.transfer.wheel runs from a checkout; this is an installed Motley"
            )
        built = build_wheel(checkout, output)
    except LauncherError as error:
        sys.stderr.write("\n".join([f"launcher.transfer.wheel: {error}", *error.details]) + "\n")
        return error.exit_code
    tree = {"wheel": str(built.path), "version": built.version, "sha256": built.sha256}
    sys.stdout.write(json.dumps(tree) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
