"""spend.jsonl: whole after a kill -9, a full disk and many writers."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.planning.budget import ledger
from trainer.planning.budget.ledger import SpendLedger, SpendRecord, earlier_attempts, parse_spend
from trainer.system.errors import InputError

ROOT = Path(__file__).parents[4]
WRITER = """
import sys
from pathlib import Path
from trainer.planning.budget.ledger import SpendLedger, SpendRecord
print("ready", flush=True)
n = 0
while n < int(sys.argv[3]):
    rest = dict(until=n, seconds=1, kwh=0, measured_seconds=0, cost=1)
    lines = [SpendRecord(run_id=sys.argv[2], host=h, **rest) for h in ("a", "b")]
    try:
        SpendLedger(Path(sys.argv[1])).append_records(lines)
    except BlockingIOError:
        continue  # for a second others had the lock: a run keeps its lines then, and tries again
    print(n, flush=True)
    n += 1
"""


def record(run: str = "r", until: float = 1.0, money: float = 1.0, **more: object) -> SpendRecord:
    fields = {"host": "a", "seconds": 60.0, "kwh": 0.1, "measured_seconds": 0.0, "currency": "EUR"}
    return SpendRecord.model_validate(
        {"run_id": run, "until": until, "cost": money, **fields, **more}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "spend.jsonl"


def writer(path: Path, run: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), run, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_what_is_appended_is_read(path: Path) -> None:
    book = SpendLedger(path)
    assert book.read_records() == []
    book.append_records([record(), record(until=2.0, is_final=True)])
    book.append_records([record(run="other")])
    assert book.read_records() == [record(), record(until=2.0, is_final=True), record(run="other")]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(path: Path) -> None:
    book = SpendLedger(path)
    book.append_records([record(), record(until=2.0)])
    whole = path.read_bytes()
    for torn in (b'{"run_id": "r", "hos', b"\0" * 200_000, b"x"):
        path.write_bytes(whole + torn)
        assert book.read_records() == [record(), record(until=2.0)]
    book.append_records([record(until=3.0)])
    assert [line.until for line in book.read_records()] == [1.0, 2.0, 3.0]
    assert b"x" not in path.read_bytes()


def test_a_file_of_one_torn_line_begins_again(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"run_id": ')
    SpendLedger(path).append_records([record()])
    assert SpendLedger(path).read_records() == [record()]


def test_a_damaged_line_is_named_and_not_passed_over(path: Path) -> None:
    book = SpendLedger(path)
    book.append_records([record()])
    with path.open("ab") as file:
        file.write(b'{"run_id": "r", "cost": -3}\n')
    book.append_records([record()])
    with pytest.raises(InputError, match=r"spend\.jsonl:2: not a line of spending: .*correct or"):
        book.read_records()


def test_many_writers_and_a_kill_leave_whole_lines(path: Path) -> None:
    """Every pair of lines is there or not; the killed writer's are those that it had reported."""
    steady, killed = writer(path, "steady", 20), writer(path, "killed", 10_000)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line == "5\n":
            break
    killed.send_signal(signal.SIGKILL)
    reported = 6 + sum(1 for line in killed.stdout if line.strip().isdigit())
    killed.wait(60)
    killed.stdout.close()
    steady.communicate(timeout=120)
    assert steady.returncode == 0
    SpendLedger(path).append_records([record()])
    records = SpendLedger(path).read_records()
    assert sum(r.run_id == "steady" for r in records) == 40
    own = [(r.host, r.until) for r in records if r.run_id == "killed"]
    assert own == [(host, n) for n in range(len(own) // 2) for host in ("a", "b")]
    assert reported <= len(own) // 2 <= reported + 1


def test_a_full_disk_appends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = SpendLedger(path)
    book.append_records([record()])
    before, write = path.read_bytes(), os.write

    def half(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) // 2])

    def none(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for failing in (half, none):
        monkeypatch.setattr(ledger.os, "write", failing)
        with pytest.raises(OSError):
            book.append_records([record(until=2.0)])
        assert path.read_bytes() == before


def test_a_writer_that_was_stopped_under_the_lock_stops_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_LOCK_PATIENCE", 0.05)
    book = SpendLedger(path)
    book.append_records([record()])
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            book.append_records([record(until=2.0)])
    book.append_records([record(until=2.0)])
    assert len(book.read_records()) == 2


def test_attempts_of_a_run_add_up() -> None:
    lines = [
        record(until=60.0, step=4),
        record(run="other", until=70.0, money=100.0),
        record(until=120.0, step=9),
        record(until=180.0, step=9),
        record(until=180.0, host="b", step=9),
    ]
    found = earlier_attempts(lines, "r", "EUR")
    assert (found.money, found.until, found.ended, found.progress_at) == (
        4.0,
        180.0,
        False,
        120.0,
    )
    ended = [*lines, record(until=200.0, step=9, is_final=True)]
    assert earlier_attempts(ended, "r", "EUR").ended
    assert earlier_attempts(lines, "new", "EUR").until is None
    with pytest.raises(InputError, match=r"two currencies: run r was paid in EUR.* in USD"):
        earlier_attempts(lines, "r", "USD")


def test_lines_of_later_versions_are_read() -> None:
    text = record().model_dump_json().replace('"run"', '"colour":"red","run"')
    assert parse_spend(text.encode() + b"\n", "spend.jsonl") == [record()]


@pytest.mark.parametrize("value", ["1e300", "-1.0", "NaN", "Infinity", "1e999", "253402300800.0"])
@pytest.mark.parametrize("field", ["until", "seconds", "measured_seconds", "kwh", "cost"])
def test_a_number_that_cannot_be_is_named(field: str, value: str) -> None:
    line = dict.fromkeys(("until", "seconds", "measured_seconds", "kwh", "cost"), "1.0")
    if value == "253402300800.0" and field in {"kwh", "cost"}:
        value = "1e15"
    text = ", ".join(f'"{name}": {number}' for name, number in (line | {field: value}).items())
    with pytest.raises(InputError, match=r"spend\.jsonl:1: not a line of spending") as caught:
        parse_spend(f'{{"run_id": "r", "host": "h", {text}}}\n'.encode(), "spend.jsonl")
    assert "\n" not in str(caught.value)


def test_a_process_that_is_forked_during_a_write_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread of a coordinator, which starts a worker or a command."""
    waits, ends = os.pipe()
    children: list[int] = []

    def sync(_descriptor: int) -> None:
        if not (child := os.fork()):
            os.read(waits, 1)
            os._exit(0)
        children.append(child)

    file = SpendLedger(tmp_path / "spend.jsonl")
    with monkeypatch.context() as slow:
        slow.setattr(os, "fdatasync", sync)
        file.append_records([record(until=1.0)])
    file.append_records([record(until=2.0)])
    os.write(ends, b"!")
    os.waitpid(children[0], 0)
    assert [each.until for each in file.read_records()] == [1.0, 2.0]
