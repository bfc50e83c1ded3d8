"""A check's finding, as its host makes it, and its result, as the operator sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Result:
    """One finding: `warn` is reported, `fail` prevents the start."""

    name: str
    host: str
    status: Status
    detail: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The finding and its remedy in one line."""
        return f"{self.host}: {self.name}: {self.detail}{f'; {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True)
class Finding:
    """The finding of one probe about its host."""

    status: Status
    detail: str
    remedy: str = ""
