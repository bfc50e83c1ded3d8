"""An agent for a host that may not have Motley installed: its code is sent over the login.

An installed agent is used if there is one. Otherwise the code runs in the memory of one process of
the operator's login; nothing is written to disk. It supports the same operations as an installed
agent, with the rights of that login.
"""

from __future__ import annotations

import io
import re
import zipfile
from functools import cache
from pathlib import Path

from launcher.errors import LauncherError, PreflightError, UnreachableError
from launcher.hosts.bootstrap import agent_command
from launcher.hosts.rpc import NoAgentError
from launcher.inventory.hosts import Host

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
    "trainer/system/nvidia_smi.py",
)
"""What an agent imports."""

_CODE = "; ".join(
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
"""Without line ends and single quotes: every login shell takes it (`bootstrap.py`)."""

_SKIP = 'head -c "$5" >/dev/null;'
"""An installed agent needs no code, which has been sent all the same: one login suffices."""

_VISIT = 'exec python3 -I -c "$4" "$5"'


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


def visitor_command(host: Host) -> str:
    """Return the command of the operator's login shell; it first reads `archive` from stdin."""
    return agent_command(host, _SKIP, _VISIT, (_CODE, str(len(archive()))))


def explain_visit(host: Host, error: NoAgentError) -> LauncherError:
    """Return why no agent started, from the output in place of its hello."""
    where = f"host {host.name}"
    text = "\n".join(error.words)
    if found := re.search(r"(?m)^motley: python (\S+)$", text):
        wanted = ".".join(map(str, LEAST_PYTHON))
        return PreflightError(
            f"{where}: its python3 is {found[1]}, querying it needs {wanted}; install Motley there "
            "first (the recipe brings a Python), with an inventory written by hand"
        )
    if re.search(r"python3: (command )?not found", text):
        return PreflightError(f"{where}: there is no python3; install it: apt install python3")
    last = f": {error.words[-1]}" if error.words and error.words[-1] not in str(error) else ""
    return UnreachableError(f"{error}{last}")
