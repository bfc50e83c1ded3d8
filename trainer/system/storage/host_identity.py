"""The identity of this machine among those that share a folder."""

from __future__ import annotations

import functools
import hashlib
import socket
from pathlib import Path


@functools.cache
def host_identity() -> str:
    """Return 8 hex digits for this boot of this machine and this container.

    Two processes with the same identity share process ids and the locks of local file systems.
    Host names do not show that: cloned machines have the same one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        identity = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        identity = socket.gethostname()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
