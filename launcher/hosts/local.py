"""This machine as a host: operations run in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from launcher.agent import operations
from launcher.agent.operation import DEADLINE
from launcher.files import default_state_folder
from launcher.hosts.base import Connection


class LocalConnection(Connection):
    """This machine, as this user."""

    def __init__(self) -> None:
        self.python = sys.executable
        self.state_folder = str(default_state_folder())
        self.user = operations.user_name()

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = DEADLINE
    ) -> Any:
        """Do an operation in this thread; the caller enforces the deadline."""
        del deadline
        found = operations.perform_operation(name, arguments or {})
        return json.loads(json.dumps(found, default=asdict))  # the types as from a remote host

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`."""
        return operations.read_file(path, offset, limit)

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step."""
        operations.write_file(path, data)

    def lock(self, path: str, purpose: str) -> AbstractContextManager[None]:
        """Hold a lock file; the kernel frees it when this process dies."""
        return operations.lock_file(path, purpose)

    def close(self) -> None:
        """Nothing to release."""
