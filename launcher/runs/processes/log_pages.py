"""Lines of a process's log, read piece by piece: whole, its end, or the lines after a moment.

An offset always lies at the beginning of a line, so reading can resume there without a lost or
repeated line.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import SessionSupervisor
from launcher.terminal import visible_lines

PIECE = 1 << 20
LONGEST = 16 << 20
"""Bytes of a line beyond which it is shown in parts."""
_BACK = 1 << 16


@dataclass(frozen=True)
class LogPage:
    """Some complete lines, without their ends."""

    lines: list[bytes]
    end: int
    """The offset behind them."""


class LogPages:
    """The log of one attempt of a process."""

    def __init__(self, supervisor: SessionSupervisor, process: ProcessPlan, attempt: int) -> None:
        self._supervisor = supervisor
        self._process = process
        self._attempt = attempt

    def read_pages(self, offset: int, whole: bool) -> Generator[LogPage]:
        """Read from an offset to the end; without `whole` an unfinished line at the end waits."""
        return line_pages(self._read_bytes, offset, whole)

    def find_tail_offset(self, count: int) -> int:
        """Return where the last `count` lines begin."""
        start = end = self._supervisor.log_size(self._process, self._attempt)
        data = b""
        while end - start < min(end, LONGEST) and data.removesuffix(b"\n").count(b"\n") < count:
            before = start
            start = max(0, start - max(_BACK, end - start))
            data = self._read_bytes(start, before - start)[: before - start] + data
        if count == 0:
            return end
        ended = data.removesuffix(b"\n")
        position = len(ended)
        for _ in range(count):
            position = ended.rfind(b"\n", 0, position)
            if position < 0:
                return start
        return start + position + 1

    def offset_since(self, moment: float) -> int | None:
        """Return the offset of the lines after a moment; None: unknown."""
        offset = self._supervisor.log_offset(self._process, self._attempt, moment)
        if offset is None or offset == 0:
            return offset
        start = max(0, offset - _BACK)  # the line that was being written then belongs to both
        data = self._read_bytes(start, offset - start)
        cut = data.rfind(b"\n") + 1
        return start + cut if cut or start == 0 else offset

    def _read_bytes(self, offset: int, limit: int) -> bytes:
        return self._supervisor.read_log(self._process, self._attempt, offset, limit)


def line_pages(read: Callable[[int, int], bytes], offset: int, whole: bool) -> Generator[LogPage]:
    """Read the lines of a file, by `read(offset, limit)`, as `LogPages.pages` does."""
    limit = PIECE
    while True:
        data = read(offset, limit)
        at_end = len(data) < limit
        cut = len(data) if whole and at_end else data.rfind(b"\n") + 1
        if not cut and len(data) >= LONGEST:
            cut = len(data)
        if cut:
            lines = data[:cut].split(b"\n")
            if lines[-1] == b"":
                lines.pop()
            offset += cut
            yield LogPage(lines, offset)
        if at_end:
            return
        limit = PIECE if cut else 2 * limit  # a line longer than a piece


def last_lines(
    supervisor: SessionSupervisor, process: ProcessPlan, count: int, attempt: int | None = None
) -> list[str]:
    """Return the end of an attempt's log; without one, of the newest that is not empty."""
    attempts = supervisor.list_attempts(process) if attempt is None else [attempt]
    for number in reversed(attempts):
        pages = LogPages(supervisor, process, number)
        offset = pages.find_tail_offset(4 * count)  # blank lines do not count
        lines = [
            line
            for page in pages.read_pages(offset, whole=True)
            for written in page.lines
            for line in visible_lines(written)
            if line.strip()
        ]
        if lines:
            return lines[-count:]
    return []
