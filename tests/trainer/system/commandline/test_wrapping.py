"""Lines on a terminal: broken between words, and commands that stay commands."""

from __future__ import annotations

import io
import logging
import shlex

import pytest

from trainer.system.commandline.wrapping import (
    LogFormatter,
    terminal_width,
    wrap_card,
    wrap_command,
    wrap_line,
)

LINE = "cpu: gradient checkpointing off: with all activations of 128 tokens the run needs 12 MiB"
COMMAND = "  trainer evaluate 'my output' --data /a/long/path/train.jsonl --held-out"


@pytest.mark.parametrize("width", [20, 60, 80, 100])
def test_a_line_is_broken_between_words(width: int) -> None:
    lines = wrap_line(LINE, width, "    ")
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == LINE
    assert all(line.startswith("    ") for line in lines[1:])


def test_columns_of_a_line_that_fits_stay() -> None:
    row = "  task                classify  lines have a label"
    assert wrap_line(row, 60) == [row]
    assert wrap_line(row, 45, "      ") == [
        "  task                classify  lines have a",
        "      label",
    ]
    assert wrap_line(LINE, None) == [LINE]
    assert wrap_line("", 60) == [""]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_command_can_be_pasted(width: int) -> None:
    lines = wrap_command(COMMAND, width)
    assert max(map(len, lines)) <= width
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == shlex.split(COMMAND)
    assert all(line.endswith(" \\") for line in lines[:-1])


def test_a_card_from_a_host_does_no_harm() -> None:
    assert wrap_card(["  not a command's quote" + " x" * 30], 40) == [
        "  not a command's quote" + " x" * 30
    ]
    assert wrap_card(["a\x1b[2Jb"], 40) == ["a\\x1b[2Jb"]


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert terminal_width(io.StringIO()) is None
    assert terminal_width(None) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_on_a_terminal_is_indented_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    record = logging.LogRecord("x", logging.INFO, "", 0, LINE, (), None)
    lines = LogFormatter(Terminal()).format(record).splitlines()
    assert max(map(len, lines)) <= 60
    assert [line[:9].strip().count(":") for line in lines] == [2, 0]
    assert LogFormatter(io.StringIO()).format(record).count("\n") == 0
