"""How lines look, and what --since takes."""

import datetime
import json
import sys
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.views.log_printer import LinePrinter, parse_since
from tests.launcher.keeping import python_process


@pytest.mark.parametrize(
    ("text", "age"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("1d", 86400.0)]
)
def test_an_age_is_by_the_hosts_clock(text: str, age: float) -> None:
    assert parse_since(text)(1e6) == 1e6 - age


@pytest.mark.parametrize(
    "text", ["2026-11-21T13:00:00+00:00", "2026-11-21T14:00+01:00", "2026-11-21 13:00:00Z"]
)
def test_a_time(text: str) -> None:
    moment = datetime.datetime(2026, 11, 21, 13, tzinfo=datetime.UTC)
    assert parse_since(text)(0.0) == moment.timestamp()


def test_a_time_without_a_zone_is_local() -> None:
    assert parse_since("2026-11-21T13:00")(0.0) == datetime.datetime(2026, 11, 21, 13).timestamp()


@pytest.mark.parametrize("text", ["yesterday", "10", "-5m", "10 m", "", "2026-13-01"])
def test_neither(text: str) -> None:
    with pytest.raises(ConfigError, match="give an age such as"):
        parse_since(text)


@pytest.mark.parametrize(
    ("tty", "no_colour", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_prefixes(
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tty: bool,
    no_colour: str,
    coloured: bool,
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    one, ten = (python_process(tmp_path, "", name) for name in ("worker-1", "worker-10"))
    LinePrinter(False, [one, ten]).print_lines(one, 1, [b"hello \xff", b""])
    LinePrinter(False, [one]).print_lines(one, 1, [b"alone"])
    plain = b"worker-1  | "
    prefix = b"\x1b[36m" + plain + b"\x1b[0m" if coloured else plain
    expected = prefix + b"hello \\xff\n" + prefix + b"\nalone\n"
    assert capsysbinary.readouterr().out == expected


def test_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = python_process(tmp_path, "")
    LinePrinter(True, [process]).print_lines(process, 2, [b"\xffx"])
    assert json.loads(capsys.readouterr().out) == {
        "schema": "motley.log/1",
        "name": "worker-0",
        "rank": 0,
        "host": "localhost",
        "attempt": 2,
        "line": "�x",
    }
