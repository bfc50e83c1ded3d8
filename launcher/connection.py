"""How the launcher reaches a host. The only file that knows local from remote.

`connect` is the one place where a host becomes a connection; what cannot be driven is refused here.
"""

from __future__ import annotations

import sys

from launcher.access import Connection, LocalConnection
from launcher.errors import UnreachableError
from launcher.inventory import Host


def connect(host: Host) -> Connection:
    """Return a connection to a host.

    Raises:
        UnreachableError: the host cannot be driven.
    """
    if not sys.platform.startswith("linux"):
        raise UnreachableError(f"host {host.name}: hosts need Linux, this is {sys.platform}")
    if not host.is_local:
        raise UnreachableError(
            f"host {host.name}: this release drives only the local machine "
            "(ansible_connection: local); hosts over SSH can be planned with --dry-run"
        )
    return LocalConnection()
