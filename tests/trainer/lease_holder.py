"""A process that holds the lease of a folder: `lease_holder FOLDER SILENCE [IDENTITY]`.

Says `held` and what becomes of it, and gives it back at the end of its input. With an identity it
stands for a process of another host: locks do not reach it, nor does it ask for any.
"""

import errno
import fcntl
import logging
import os
import sys
from pathlib import Path

from trainer.system.errors import TrainerError
from trainer.system.storage import atomic_folder, lease, lease_folder


def become(identity: str) -> None:
    """Stand for another host."""
    for module in (lease, lease_folder, atomic_folder):
        module.host_identity = lambda: identity  # type: ignore[attr-defined]  # what another host would say

    def local_only(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks that others see")

    fcntl.flock = local_only  # type: ignore[assignment]  # locks of a share are local


def main(folder: str, silence: str, identity: str | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if identity:
        become(identity)
    try:
        held = lease.acquire_lease(Path(folder), f"run-of-{os.getpid()}", silence=float(silence))
    except TrainerError as error:
        print(error, flush=True)
        return error.exit_code
    print("held", flush=True)
    sys.stdin.read()
    held.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
