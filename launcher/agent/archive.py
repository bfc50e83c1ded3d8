"""The agent's code in one piece, for a host that may not have Motley installed.

It runs in the memory of one process of the operator's login, and nothing is written to disk. It
supports the same operations as an installed agent, with the rights of that login.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

LEAST_PYTHON = (3, 11)

_PARTS = (
    "launcher/__init__.py",
    "launcher/errors.py",
    "launcher/files.py",
    "launcher/agent/*.py",
    "launcher/agent/checks/*.py",
    "launcher/inventory/__init__.py",
    "launcher/inventory/facts/*.py",
    "launcher/session/*.py",
    "trainer/__init__.py",
    "trainer/system/__init__.py",
    "trainer/system/cgroups.py",
    "trainer/system/errors.py",
    "trainer/system/kernel_files.py",
    "trainer/system/nvidia_smi.py",
    "trainer/system/process/__init__.py",
    "trainer/system/process/child.py",
    "trainer/system/storage/__init__.py",
    "trainer/system/storage/atomic_file.py",
)
"""What an agent imports."""

RUN = "; ".join(
    (
        "import os, sys",
        f"sys.version_info < {LEAST_PYTHON} and "
        'sys.exit("motley: python " + ".".join(map(str, sys.version_info[:2])))',
        "data = sys.stdin.buffer.read(int(sys.argv[1]))",
        'memory = os.memfd_create("motley")',
        "os.write(memory, data)",
        'sys.path.insert(0, "/proc/self/fd/" + str(memory))',
        "from launcher.agent.server import main",
        "main()",
    )
)
"""What Python runs that finds the archive on stdin, and its length in its first argument.

Without line ends and single quotes, for every login shell (`hosts/bootstrap.py`).
"""


@cache
def archive() -> bytes:
    """Return the agent's code as a zip file; the same bytes for the same code."""
    root = Path(__file__).parents[2]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in _PARTS:
            for file in sorted(root.glob(part)):
                entry = zipfile.ZipInfo(file.relative_to(root).as_posix())
                packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
