"""Debian systems to start hosts from: made once with mmdebstrap, kept outside the project.

An image is a folder that hosts only read: each host's disk is an overlay on top of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.testbed.mirrors import apt_options, apt_sources
from tests.testbed.processes import run

SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}

PACKAGES = (
    "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,openssh-server,sudo,python3,"
    "python3-apt,ca-certificates,iproute2,iputils-ping,nftables,procps,kmod,rsync"
)
"""A small server as an operator finds it: reachable, with Python for Ansible, nothing of ours."""

BARE = "systemd,systemd-sysv,dbus,libpam-systemd,ca-certificates,python3,python3-venv,git,make"
"""What boots, and what the README asks a newcomer for: no sudo, ssh, rsync, compiler or driver."""

CUSTOMIZE = Path(__file__).with_name("customize.sh")


def cache_folder() -> Path:
    """Return where images are kept: $MOTLEY_TESTBED_CACHE or the user's cache folder."""
    if named := os.environ.get("MOTLEY_TESTBED_CACHE"):
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "motley", "testbed").absolute()


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def image(suite: str, rebuild: bool = False, *, bare: bool = False) -> Path:
    """Return the root folder of a suite's image; made first (about 20 s) where there is none.

    A `bare` one has no more than a newcomer's computer, see `BARE`.

    Its name holds a hash of what it is made from: a changed recipe or mirror makes another.
    """
    sources, options = apt_sources(suite), apt_options()
    packages = BARE if bare else PACKAGES
    recipe = [suite, packages, CUSTOMIZE.read_text(encoding="utf-8"), *sources, *options]
    key = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:12]
    kind = f"bare-{suite}" if bare else suite
    folder = cache_folder() / "images" / f"{kind}-{key}"
    with _alone(cache_folder() / f"{kind}.lock"):
        if rebuild and folder.exists():
            shutil.rmtree(folder)
        if not folder.exists():
            for old in folder.parent.glob(f"{kind}-*.part"):
                shutil.rmtree(old)
            part = folder.with_name(f"{folder.name}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            _build(suite, packages, part, sources, options)
            part.rename(folder)
    return folder


def _build(suite: str, packages: str, target: Path, sources: list[str], options: list[str]) -> None:
    # In namespaces of its own: whatever happens, no mount and no process of it stays.
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--quiet"]
    command += ["--skip=output/dev", f"--include={packages}", f"--customize-hook={CUSTOMIZE}"]
    command += [f"--aptopt={option}" for option in options]
    try:
        run([*apart, *command, suite, target, *sources], timeout=900)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    # Old enough for every `cache_valid_time`: a new host has never run `apt-get update`.
    os.utime(target / "var/lib/apt/lists", (0, 0))
