"""The agent's code in one piece, for a host that may not have Motley installed.

It runs in the memory of one process of the operator's login, and nothing is written to disk. It
supports the same operations as an installed agent, with the rights of that login.
"""

from __future__ import annotations

import ast
import base64
import io
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LEAST_PYTHON = (3, 11)

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
"""Code of a Python that reads the archive from stdin, its length being the first argument.

Without line ends and single quotes, for every login shell (`hosts/bootstrap.py`).
"""


SCRIPT = """\
import base64, os, sys
sys.version_info < {least} and sys.exit("needs Python {words}")
memory = os.memfd_create("motley")
os.write(memory, base64.b64decode("{data}"))
sys.path.insert(0, "/proc/self/fd/" + str(memory))
from launcher.agent.server import answer_once
answer_once(*sys.argv[1:])
"""


def agent_script() -> str:
    """Return a program that answers one request, for `python3 -I - OPERATION ARGUMENTS`."""
    data = base64.b64encode(agent_archive()).decode("ascii")
    return SCRIPT.format(least=LEAST_PYTHON, words=".".join(map(str, LEAST_PYTHON)), data=data)


@cache
def agent_archive() -> bytes:
    """Return the agent's code as a zip file; the same bytes for the same code."""
    root = Path(__file__).parents[2]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for file, source in sorted(_collect_sources(root, "launcher.agent.server").items()):
            entry = zipfile.ZipInfo(file.relative_to(root).as_posix())
            packed.writestr(entry, source, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _collect_sources(root: Path, start: str) -> dict[Path, bytes]:
    """Return the sources that a module needs to be imported, by their files.

    What a function imports when it is called is not among them: it may need Motley's dependencies.
    """
    found: dict[Path, bytes] = {}
    due = {start}
    while due:
        path = root.joinpath(*due.pop().split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file in found or not file.is_file():
            continue
        found[file] = file.read_bytes()
        due.update(_imported_names(ast.parse(found[file])))
        due.add(".".join(path.parent.relative_to(root).parts) or start)
    return found


def _imported_names(module: ast.Module) -> Iterator[str]:
    """Yield the names of our modules, and of what may be one, that a module imports at once."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith(("launcher", "trainer")):
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith(("launcher.", "trainer.")))
