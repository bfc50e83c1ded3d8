"""What the test bed needs of the machine, and how to get it.

`python3 -m tests.testbed.requirements` prints the Debian packages that are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "slirp4netns": "slirp4netns",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
}
"""Programs by the Debian package that brings them."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def missing_packages() -> list[str]:
    """Return the Debian packages that the test bed needs and this machine lacks."""
    wanted = {package for program, package in PROGRAMS.items() if not shutil.which(program)}
    if not KEYRING.exists():  # Ubuntu
        wanted.add("debian-archive-keyring")
    return sorted(wanted)


def missing_rights() -> str | None:
    """Return why this user may not make a lab, None if it may."""
    if not sys.platform.startswith("linux"):
        return "needs root on Linux: hosts are systemd-nspawn containers"
    if os.geteuid() != 0:
        return "needs root: the hosts of the test bed live in namespaces and mounts of their own"
    probe = ["unshare", "--mount", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "t", "/mnt"]
    if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode:
        return "needs root that may make namespaces and mounts (not that of a plain container)"
    return None


def complaint() -> str | None:
    """Return the reason why no lab can be made here, with its remedy, None if one can."""
    if reason := missing_rights():
        return reason
    if packages := missing_packages():
        return (
            f"no test bed: {', '.join(packages)} missing "
            f"(apt-get install --no-install-recommends {' '.join(packages)})"
        )
    return None


if __name__ == "__main__":
    from tests.testbed import nfs  # the NFS client is built here, for the hosts

    sys.stdout.write(" ".join(sorted({*missing_packages(), *nfs.missing_packages()})) + "\n")
