"""`spend.jsonl`: the spending, a line for each host and interval.

The file is only appended to, under a lock, and a line is complete once it ends with a newline.
Bytes after the last newline, left by a kill or a full disk, were never counted: readers skip them,
and the next writer removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.config.budget import LEDGER
from trainer.planning.cost import JOULES_OF_KWH
from trainer.system.errors import InputError
from trainer.system.regular_file import MOST_LINES, read_file

SPEND_FILE = LEDGER
LATEST = 253402300800.0
"""Unix seconds at the end of the year 9999, the last that a date can name."""
MOST = 1e15
"""Limit of money or kWh in a line: no sum of lines overflows."""
_LOCK_PATIENCE = 1.0
"""Seconds: a writer holds the lock for one write; one that was stopped must not stop others."""
_TAIL = 1 << 16


class SpendRecord(BaseModel):
    """One line: the spending of a run on a host since the previous line, up to `until`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    run_id: str = Field(max_length=1000)
    host: str = Field(max_length=1000)
    until: float = Field(ge=0, lt=LATEST)
    """Unix seconds."""
    seconds: float = Field(ge=0, lt=LATEST)
    kwh: float = Field(ge=0, lt=MOST)
    measured_seconds: float = Field(ge=0, lt=LATEST)
    """Seconds whose power was measured; that of the others is planned."""
    cost: float = Field(ge=0, lt=MOST)
    currency: str | None = Field(default=None, max_length=1000)
    step: int = Field(default=0, ge=0, lt=2**63)
    """Completed steps of the run."""
    is_final: bool = False
    """Whether the attempt ended cleanly with this line."""


@dataclass(frozen=True)
class EarlierSpend:
    """The spending of the earlier attempts of a run."""

    money: float = 0.0
    until: float | None = None
    """Unix seconds of the last line; None: there is none."""
    ended: bool = True
    """Whether the last attempt ended cleanly, and was not killed."""
    progress_at: float | None = None
    """Unix seconds of the first line with the most completed steps."""
    watts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The mean power of each host in its last line that tells one."""


def earlier_attempts(
    records: Iterable[SpendRecord], run: str, currency: str | None
) -> EarlierSpend:
    """Return the cost of a run so far.

    Raises:
        InputError: it was paid in another currency.
    """
    own = [record for record in records if record.run_id == run]
    other = {record.currency for record in own if record.cost} - {currency}
    if other:
        raise InputError(
            f"two currencies: run {run} was paid in {other.pop()}, its budget is now in {currency}"
        )
    if not own:
        return EarlierSpend()
    most = max(record.step for record in own)
    last = max(record.until for record in own)
    return EarlierSpend(
        money=sum(record.cost for record in own),
        until=last,
        ended=own[-1].is_final,
        progress_at=min(record.until for record in own if record.step == most),
        watts={
            record.host: record.kwh * JOULES_OF_KWH / record.seconds
            for record in own
            if record.kwh and record.seconds >= 0.1  # of less it would be a wild guess
        },
    )


def parse_spend(data: bytes, name: str) -> list[SpendRecord]:
    """Return the lines of a ledger; bytes behind the last newline are left out.

    Raises:
        InputError: a whole line is damaged; names it.
    """
    records: list[SpendRecord] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            records.append(SpendRecord.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(
                f"{name}:{number}: not a line of spending: {where + ': ' if where else ''}"
                f"{first['msg'].lower()}; correct or remove the line"
            ) from None
    return records


class SpendLedger:
    """A spend.jsonl that this process reads and, concurrently with others, appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_records(self) -> list[SpendRecord]:
        """Return every whole line.

        Raises:
            InputError: a line is damaged, or the file cannot be read.
        """
        try:
            return parse_spend(read_file(self.path, MOST_LINES), str(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None

    def append_records(self, records: Sequence[SpendRecord]) -> None:
        """Append lines, all or none of them, and wait for the disk.

        Raises:
            OSError: nothing was appended.
        """
        text = "".join(record.model_dump_json(exclude_defaults=True) + "\n" for record in records)
        data = text.encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            _lock_file(descriptor)
            size = _truncate_torn_line(descriptor)
            try:
                written = os.write(descriptor, data)
                if written < len(data):
                    raise OSError(None, "the disk wrote only part of a line")
                os.fdatasync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            with contextlib.suppress(OSError):  # which a process forked meanwhile has, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock_file(descriptor: int) -> None:
    until = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)


def _truncate_torn_line(descriptor: int) -> int:
    """Remove everything after the last newline; return the remaining size."""
    size = end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _TAIL)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
    return end
