"""What a host sends has no effect on the operator's terminal, through whichever door it comes."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import pytest

from launcher import cli
from launcher.agent.checks.finding import Result
from launcher.errors import PreflightError
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from launcher.runs.failures import Failure
from launcher.runs.processes.log_pages import last_lines
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from launcher.runs.records.run import Run
from launcher.runs.status import RunView
from launcher.terminal import note, redraw_line, sanitize_text, visible_lines
from launcher.views import render
from launcher.views.live_view import live_view
from launcher.views.log_printer import LinePrinter
from launcher.views.processes import processes_table
from launcher.views.telemetry import TelemetrySnapshot
from tests.launcher.keeping import python_process

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J\x1b[H"
ATTACKS = (
    TITLE,
    CLEAR,
    "\x1b[31mred\x1b[0m",
    "\x9b2J",
    "\x1bP1;2|x\x1b\\",
    "\x1b[6n",
    "a\rb",
    "a\bb",
    "\x7f\x00\x05\x0e",
    "\u202egnp.exe",
    "\u2066x\u2069\u200f",
    "one\u2028two",
    "one\ntwo",
    "\ud800",
    "\U000e0041",
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # of our own; of ours alone, for a host's are left out
EVIL = f"{TITLE}{CLEAR}\x9b2Jfake\u202e"


def assert_harmless(text: str) -> None:
    assert _CONTROL.findall(_STYLE.sub("", text)) == []


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_line_stays_one_line_without_effects(attack: str) -> None:
    shown = sanitize_text(f"before {attack} behind")
    assert_harmless(shown)
    assert "\n" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" behind")
    shown.encode()
    assert sanitize_text(shown) == shown


def test_what_is_shown_instead() -> None:
    assert sanitize_text("plain, ümläut, 日本, 👩‍🚀, \ttab") == "plain, ümläut, 日本, 👩‍🚀, \ttab"
    assert sanitize_text("\x1b[1;31mred\x1b[0m and \x9b32mgreen") == "red and green"
    assert sanitize_text(TITLE) == r"\x1b]0;owned\x07"
    assert sanitize_text("a\nb\u202ec") == r"a\nb\u202ec"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", ["plain"]),
        (b"", [""]),
        (b"windows\r", ["windows"]),
        (b"\r", [""]),
        (b"  1%\r 50%\r100%", ["  1%", " 50%", "100%"]),
        (b"\r  1%\r  2%\r", ["  1%", "  2%"]),
        (b"\xff\x9b2J", [r"\xff\x9b2J"]),
        ("\x9b2J".encode(), [r"\x9b2J"]),
        (b"\x1b[32mINFO\x1b[0m done", ["INFO done"]),
        (b"real\r\x1b[2Kfake", ["real", r"\x1b[2Kfake"]),
    ],
)
def test_lines_of_logs(line: bytes, shown: list[str]) -> None:
    assert visible_lines(line) == shown


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """In latin-1 the second byte of a letter like Û in UTF-8 would be a command."""
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding=encoding))
    two = [python_process(tmp_path, "", f"worker-{n}") for n in range(2)]
    LinePrinter(False, two).print_lines(
        two[0], 1, [attack.encode(errors="surrogatepass") for attack in ATTACKS]
    )
    LinePrinter(False, two[:1]).print_lines(two[0], 1, ["Û".encode(), b"\x9b2J", b"a\rb"])
    data = out.getvalue()
    assert re.findall(rb"[\x00-\x09\x0b-\x1f\x7f-\x9f]", data.replace("Û".encode(), b"")) == []
    lines = data.decode(encoding).splitlines()
    assert all(line.startswith("worker-0 | ") for line in lines[:-4])
    assert lines[-2:] == ["a", "b"]


def test_logs_for_programs_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = python_process(tmp_path, "")
    LinePrinter(True, [process]).print_lines(
        process, 1, [attack.encode(errors="replace") for attack in ATTACKS]
    )
    out = capsys.readouterr().out
    assert out.isascii()
    assert_harmless(out)
    assert json.loads(out.splitlines()[0])["line"] == TITLE


def test_the_end_of_a_log_in_errors(tmp_path: Path) -> None:
    process = python_process(tmp_path, "")
    folder = Path(process.folder)
    folder.mkdir()
    (folder / "attempt-1.log").write_bytes(b"real\r" + EVIL.encode() + b"\n\n")
    found = last_lines(SessionSupervisor(LocalConnection(), "r"), process, 5)
    assert found == ["real", r"\x1b]0;owned\x07\x1b[2J\x1b[H\x9b2Jfake\u202e"]


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    """Return a look at a run of which the host has made up everything that it can."""
    process = replace(python_process(tmp_path, ""), host=EVIL, device=EVIL, backend="cuda")
    leader = replace(process, name="coordinator", role="coordinator", rank=None)
    host = Host(name=EVIL)
    plan = LaunchPlan(run_id="r", output=EVIL, hosts=(host,), processes=(leader, process))
    state = ProcessState(state="running", attempt=1, message=EVIL)
    training = {"step": 1, "total_steps": 2, "state": EVIL, "reason": EVIL, "loss": 1.0}
    training["workers"] = [{"rank": 0, "state": EVIL, "samples": 3}]
    states = {"coordinator": state, "worker-0": state}
    unreachable = {EVIL: f"host {EVIL}: {EVIL}"}
    return RunView(Run(plan, 1e9, (host,)), "running", EVIL, states, training, {}, unreachable)


@pytest.mark.parametrize("tty", [True, False])
def test_tables_and_pictures(
    view: RunView, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tty: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    failure = Failure(f"worker-0 on {EVIL}", (EVIL,))
    console = render.make_console()
    console.print(processes_table(view, 150))
    console.print(render.checks_table([Result(EVIL, EVIL, "fail", EVIL, EVIL)], 150))
    console.print(live_view(TelemetrySnapshot(view, 0.0, failures=(failure,)), 150))
    console.print(render.runs_table([view], 150))
    render.print_line(render.run_headline(view))
    render.note(f"{EVIL}: is away")
    for line in render.command_lines(view.run.plan):
        render.print_line(line)
    said = capsys.readouterr()
    assert "fake" in said.out
    assert_harmless(said.out)
    assert_harmless(said.err)


def test_what_programs_get_is_escaped(view: RunView, capsys: pytest.CaptureFixture[str]) -> None:
    render.print_json(render.status_tree(view))
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["reason"] == EVIL


@pytest.mark.parametrize(
    "error",
    [
        PreflightError(f"host a: {EVIL}", [EVIL, "one\ntwo"]),
        click.UsageError(EVIL),
        click.ClickException(EVIL),
        RuntimeError(EVIL),
    ],
)
def test_errors(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("MOTLEY_DEBUG", "1")
    monkeypatch.setattr(cli.cli, "main", fail)
    assert cli.run(["status", "--json"]) in (1, 2, 4)
    said = capsys.readouterr()
    assert_harmless(said.out)
    assert_harmless(said.err)
    assert "two" not in said.err.splitlines()


DOORS = {
    "cli.py": "errors, and the version",
    "terminal.py": "notes",
    "views/render.py": "say, JSON",
    "views/log_printer.py": "logs",
    "installation/install.py": "on a host, into a log",
    "inventory/rendering.py": "JSON to the launcher",
    "session/process_supervisor.py": "on a host, into a log",
    "agent/checks/shared_folder.py": "on a host, to its parent",
    "agent/server.py": "on a host, the answer to a single request",
    "transfer/wheel.py": "about this checkout",
}
"""Files that write to stdout or stderr; everything else goes through these."""


def test_there_are_no_other_doors() -> None:
    root = Path(cli.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if writes(path)}
    assert found <= DOORS.keys()


def writes(path: Path) -> bool:
    return any(True for _ in _writing(ast.parse(path.read_text())))


def _writing(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.fullmatch(r"print|click\.(echo|secho|style)|sys\.std(out|err)\.\S*write", called):
                yield called


def test_progress_redraws_one_line_of_a_terminal_and_stays_out_of_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = pty.openpty()
    clear = "\r\x1b[2K"
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        with redraw_line(note) as draw:
            draw("step 1")
            draw(f"step 2{TITLE}")
            note("worker-1 is lost")
            draw("step 3" * 100)
            draw("step 4")
    data = bytearray()
    with suppress(OSError):  # its end; what was written comes in parts
        while part := os.read(reader, 1 << 12):
            data += part
    shown = data.decode().replace("\r\n", "\n")
    os.close(reader)
    steps = [part for part in shown.split(clear) if part]
    assert steps[0] == "step 1"
    assert "\x1b" not in steps[1]
    assert steps[2] == "worker-1 is lost\n"
    assert len(steps[3]) < 80
    assert steps[4:] == ["step 4", "step 4\n"]
    lines: list[str] = []
    monkeypatch.setenv("TERM", "dumb")
    with redraw_line(lines.append) as draw:
        draw("step 1")
    assert lines == ["step 1"]
