"""Lines of a log, piece by piece, through a real supervisor's files."""

from pathlib import Path

import pytest

from launcher.hosts.local import LocalConnection
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes import log_pages
from launcher.runs.processes.log_pages import LogPages, last_lines
from launcher.runs.processes.session import SessionSupervisor
from tests.launcher.keeping import python_process


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "PIECE", 16)
    monkeypatch.setattr(log_pages, "_BACK", 8)


@pytest.fixture
def process(tmp_path: Path) -> ProcessPlan:
    return python_process(tmp_path, "")


def pages(process: ProcessPlan, data: bytes, marks: bytes = b"") -> LogPages:
    folder = Path(process.folder)
    folder.mkdir(exist_ok=True)
    (folder / "attempt-1.log").write_bytes(data)
    (folder / "attempt-1.times").write_bytes(marks)
    return LogPages(SessionSupervisor(LocalConnection(), "r"), process, 1)


def lines(log: LogPages, offset: int = 0, whole: bool = True) -> list[bytes]:
    return [line for page in log.read_pages(offset, whole) for line in page.lines]


TEXT = b"one\n\ntwo words\n" + b"long " * 30 + b"\nlast"


@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", TEXT, TEXT + b"\n", b"x" * 100])
def test_every_line_once(process: ProcessPlan, text: bytes) -> None:
    expected = text.removesuffix(b"\n").split(b"\n") if text else []
    assert lines(pages(process, text)) == expected


def test_an_unfinished_line_waits(process: ProcessPlan) -> None:
    log = pages(process, TEXT)
    assert lines(log, whole=False) == TEXT.split(b"\n")[:-1]
    end = [page.end for page in log.read_pages(0, whole=False)][-1]
    assert TEXT[end:] == b"last"
    pages(process, TEXT + b" line\nmore")
    assert lines(log, end, whole=False) == [b"last line"]


@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"\n\n", TEXT, TEXT + b"\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_the_end(process: ProcessPlan, text: bytes, count: int) -> None:
    log = pages(process, text)
    everything = lines(log)
    assert lines(log, log.find_tail_offset(count)) == (everything[-count:] if count else [])


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (50.0, [b"first", b"second", b"third"]),
        (100.0, [b"first", b"second", b"third"]),
        (110.0, [b"second", b"third"]),  # was being written
        (120.0, [b"third"]),
        (130.0, []),
    ],
)
def test_since(process: ProcessPlan, moment: float, expected: list[bytes]) -> None:
    log = pages(process, b"first\nsecond\nthird\n", b"100 0\n110 9\n120 13\n130 19\n")
    offset = log.offset_since(moment)
    assert offset is not None
    assert lines(log, offset) == expected


def test_a_log_without_marks(process: ProcessPlan) -> None:
    assert pages(process, b"a\n").offset_since(1.0) is None


def test_the_last_lines_of_the_newest_attempt_that_said_something(process: ProcessPlan) -> None:
    pages(process, b"one\ntwo\n\n  \nthree\n\n")
    (Path(process.folder) / "attempt-2.log").write_bytes(b"\n")
    supervisor = SessionSupervisor(LocalConnection(), "r")
    assert last_lines(supervisor, process, 2) == ["two", "three"]
    assert last_lines(supervisor, python_process(Path(process.folder), ""), 2) == []


def test_a_line_without_an_end_is_shown_in_parts(
    process: ProcessPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runs.processes.log_pages.PIECE", 16)
    monkeypatch.setattr("launcher.runs.processes.log_pages.LONGEST", 64)
    monkeypatch.setattr("launcher.runs.processes.log_pages._BACK", 16)
    log = pages(process, b"x" * 1000 + b"\nend\n")
    found = list(log.read_pages(0, whole=False))
    assert b"".join(line for page in found for line in page.lines) == b"x" * 1000 + b"end"
    assert max(len(line) for page in found for line in page.lines) <= 128
    assert log.find_tail_offset(5) >= 1004 - 128
