"""Renderings that are forked by a `launch` that was forked itself: Ansible is imported once.

To be imported by the fork server of `launch`. A rendering with other settings of Ansible than the
server's starts from nothing, as users' do; `tests/launcher/inventory` and the soak start it so too.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.inventory import hosts, rendering
from tests.cluster.fork_server import IMPORTED_LATER

_SET_BY_A_RENDERING = {
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
    "ANSIBLE_NOCOLOR": "1",
}
"""Before it imports Ansible, which reads its settings then."""


def _settings() -> tuple[Path, Path, dict[str, str]]:
    """Return what Ansible's settings follow from: the folder, the home and its variables."""
    variables = {key: value for key, value in os.environ.items() if key.startswith("ANSIBLE_")}
    return Path.cwd(), Path.home(), variables


def _run(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    assert list(command[1:]) == ["-P", "-m", "launcher.inventory.rendering"]
    if _settings() != _AT_IMPORT or threading.active_count() > 1:
        return subprocess.run(command, **how)
    with ExitStack() as open_files:
        streams = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        streams[0].write(how["input"])
        for stream in (streams[0], sys.stdout, sys.stderr):
            stream.flush()
        streams[0].seek(0)
        pid = os.fork()
        if pid == 0:
            _render([stream.fileno() for stream in streams])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers: list[str] = []
        for stream in streams[1:]:
            stream.seek(0)
            answers.append(stream.read())
        return subprocess.CompletedProcess(command, code, *answers)


def _render(descriptors: Sequence[int]) -> None:
    """Answer as the program does, and end."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8") for number, mode in enumerate("rww")
        )
        code = rendering.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_AT_IMPORT = _settings()
os.environ.update(_SET_BY_A_RENDERING)
for _name in IMPORTED_LATER["launcher.inventory"]:
    importlib.import_module(_name)
for _name in _SET_BY_A_RENDERING.keys() - _AT_IMPORT[2].keys():
    del os.environ[_name]
hosts.subprocess = SimpleNamespace(**(vars(subprocess) | {"run": _run}))  # pyright: ignore
