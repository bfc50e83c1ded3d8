"""Which machine this process runs on, as others that share a folder with it must tell it apart."""

from __future__ import annotations

import functools
import hashlib
import socket
from pathlib import Path


@functools.cache
def host_identity() -> str:
    """Return 8 hex digits for this boot of this machine, and for this container of it.

    Two processes that have the same identity also share process ids and the locks of local file
    systems. Host names cannot say so: machines that were cloned have the same one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        identity = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # no Linux
        identity = socket.gethostname()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
