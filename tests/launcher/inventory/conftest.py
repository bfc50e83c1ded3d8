"""Ansible, imported once for the tests of inventories."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.inventory import hosts
from tests.cluster.fork_server import ForkServer


@pytest.fixture(scope="module")
def ansible() -> Iterator[ForkServer]:
    """Yield a process that has imported Ansible with the settings that a rendering has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED", "1")
        patch.setenv("ANSIBLE_NOCOLOR", "1")
        server = ForkServer("launcher.inventory")
    yield server
    server.close()


@pytest.fixture
def forked_ansible(ansible: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let renderings be forked: to import Ansible is most of what one costs.

    Not for a test that changes Ansible's own settings: it reads them when it is imported.
    """

    def run(command: Sequence[str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        assert list(command[1:]) == ["-P", "-m", "launcher.inventory.rendering"]
        with ExitStack() as open_files:
            stdin, stdout, stderr = (
                open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)
            )
            stdin.write(input)
            stdin.seek(0)
            streams = (stdin.fileno(), stdout.fileno(), stderr.fileno())
            code = ansible.start(command[2:], Path.cwd(), os.environ, streams).wait(hosts._DEADLINE)
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())

    monkeypatch.setattr(hosts, "subprocess", SimpleNamespace(**(vars(subprocess) | {"run": run})))
