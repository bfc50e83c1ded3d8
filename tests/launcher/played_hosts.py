"""Hosts of a cluster that are all this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.hosts.local import LocalConnection


class Disk(LocalConnection):
    """A host with a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.state_folder = str(folder)


class Units(LocalConnection):
    """A host whose processes are units of systemd; all that it is asked is well."""

    units = True

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self._asked = asked

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 1.0
    ) -> Any:
        self._asked[name] = arguments
        return {"status": "ok", "detail": "", "remedy": ""}
