"""An NFS client for hosts whose kernel has none: the share role's mount units work with it.

`install_client(host)` puts mount_nfs.c in the place of nfs-common's mount.nfs4, also when that
package comes later. It speaks NFS version 3: the inventory sets `share_protocols: [3, 4]`.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from tests.testbed.errors import LabError
from tests.testbed.host import Host
from tests.testbed.image import cache_folder
from tests.testbed.processes import run

SOURCE = Path(__file__).with_name("mount_nfs.c")
LIBRARIES = ("libfuse3-dev", "libnfs-dev", "gcc", "libc6-dev")
AUTOFS = "--bind=/dev/autofs"
"""For a host's `nspawn` arguments: gives its systemd the kernel's automounts."""


def missing_packages() -> list[str]:
    """Return the Debian packages that building the client needs and this machine lacks."""
    headers = [Path("/usr/include/fuse3/fuse.h"), Path("/usr/include/nfsc/libnfs.h")]
    found = [headers[0].exists(), headers[1].exists(), shutil.which("cc"), True]
    return [name for name, there in zip(LIBRARIES, found, strict=True) if not there]


@functools.cache
def client_program() -> Path:
    """Return the built client: libnfs and fuse3 are in it, so it runs on every Debian."""
    if missing := missing_packages():
        raise LabError(
            f"no NFS client for the hosts: {', '.join(missing)} missing "
            f"(apt-get install --no-install-recommends {' '.join(missing)})"
        )
    target = cache_folder() / "mount.nfs4"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror"]
    libraries = ["-Wl,-Bstatic", "-lnfs", "-lfuse3", "-Wl,-Bdynamic", "-lpthread", "-ldl"]
    run(["cc", *flags, SOURCE, "-o", part, "-I/usr/include/fuse3", *libraries])
    part.replace(target)
    return target


def install_client(host: Host) -> None:
    """Make `mount -t nfs4` work in a host."""
    program = client_program()
    for path in ("/usr/sbin/mount.nfs4", "/sbin/mount.nfs4"):  # Debian 13 and 12 own one each
        divert = ["dpkg-divert", "--local", "--rename", "--divert", f"{path}.kernel", "--add", path]
        host.exec(divert)
    inside = host.folder / "root/usr/sbin/mount.nfs4"
    host.lab.inside("cp", program, inside)
    host.lab.inside("chmod", "755", inside)
    # nfs-common wants it mounted at boot, and this kernel has no such file system.
    host.exec(["systemctl", "mask", "--quiet", "run-rpc_pipefs.mount"])
