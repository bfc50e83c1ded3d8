"""`trainer` and `launch` on a shell's path, forked from the servers that have imported them.

A document's block has many commands, and each would import torch again. They are started as a
reader types them, with the shell's folder, environment and streams.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import ROOT
from tests.cluster.fork_server import ForkServer
from tests.cluster.real_process import fork_server, meeting_of
from tests.waiting import PATIENCE

MODULES = {"trainer": "trainer.cli", "launch": "launcher.cli"}


def write_commands(folder: Path) -> Path:
    """Write both programs into a folder, which is made; return it."""
    folder.mkdir()
    for name, module in MODULES.items():
        package = module.partition(".")[0]
        fork_server(package)  # stays as long as this process
        program = folder / name
        program.write_text(
            f"#!{sys.executable} -I\n"
            "import site\n"
            f"site.addsitedir({str(ROOT)!r})\n"
            "from tests.cluster.forked_command import main\n"
            f"main({package!r}, {str(meeting_of(package))!r}, {module!r})\n"
        )
        program.chmod(0o755)
    return folder


def main(package: str, meeting: str, module: str) -> None:
    """Be a program: run the module with this command line, and end as it does."""
    server = ForkServer(package, meeting=Path(meeting))
    argv = ["-m", module, *sys.argv[1:]]
    code = server.start(argv, Path.cwd(), os.environ, (0, 1, 2)).wait(PATIENCE)
    sys.exit(128 - code if code < 0 else code)
