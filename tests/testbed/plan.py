"""What a host of a lab is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.testbed.errors import LabError
from tests.testbed.image import SUITES

SIZE = re.compile(r"[1-9][0-9]*[kMG]")
NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")  # v-NAME is an interface: 15 characters at most


@dataclass(frozen=True)
class Plan:
    """What a host is made of; kept as `host.json` in its folder."""

    name: str
    ip: str
    suite: str = "bookworm"
    bare: bool = False
    """A newcomer's computer instead of a server: `image.BARE`; it answers to no ssh."""
    disk: str | None = None
    """Size of the whole disk, such as 600M (held in memory); None: as much as the lab's disk."""
    volumes: dict[str, str] = field(default_factory=dict[str, str])
    """Small file systems of their own, such as {"/var/lib/motley": "20M"}."""
    nspawn: list[str] = field(default_factory=list[str])
    """Further arguments of systemd-nspawn."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise LabError(f"host {self.name!r}: a letter, then at most 11 letters, digits, -")
        if self.suite not in SUITES:
            raise LabError(f"suite {self.suite}: there are {', '.join(SUITES)}")
        for size in filter(None, [self.disk, *self.volumes.values()]):
            if not SIZE.fullmatch(size):
                raise LabError(f"host {self.name}: size {size!r}: a number and k, M or G")
        if bad := [path for path in self.volumes if not path.startswith("/") or ":" in path]:
            raise LabError(f"host {self.name}: volume {bad[0]!r}: an absolute path without `:`")
