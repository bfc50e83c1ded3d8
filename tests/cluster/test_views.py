"""What `launch` draws on terminals of 80 and 60 columns, with real processes behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cluster.stand_in_cluster import LAUNCH, Cluster, cluster
from tests.waiting import PATIENCE

__all__ = ["cluster"]  # a fixture
pytestmark = pytest.mark.cluster
SHOWN = ("BATCH", "epoch")


@pytest.mark.parametrize("columns", [80, 60])
def test_views_fit_a_terminal_and_ctrl_c_leaves_the_run_alone(
    cluster: Cluster, columns: int
) -> None:
    assert cluster.up().returncode == 0
    for view in (["status"], ["runs"]):
        code, screen = on_a_terminal(cluster, [*LAUNCH, *view], columns)
        assert code == 0
        lines = [line for line in screen.splitlines() if len(line.split()) > 1]  # no word is broken
        assert max(map(len, lines)) <= columns, screen
        assert cluster.runs()[0] in screen
    code, screen = on_a_terminal(cluster, [*LAUNCH, "status", "--watch"], columns, SHOWN)
    assert code == 130, screen
    assert "epoch 1" in screen
    assert "continues" in screen
    assert cluster.status()["state"] == "running"


def on_a_terminal(
    cluster: Cluster, command: list[str], columns: int, shown: Sequence[str] = ()
) -> tuple[int, str]:
    """Run a command on a terminal of its own; Ctrl-C is pressed once it has shown some words."""
    terminal, inside = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = cluster.environment | {"TERM": "xterm"}
    environment.pop("COLUMNS", None)
    view = subprocess.Popen(
        command, env=environment, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    screen, left = b"", bool(shown)
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 1 << 16):
            screen += part
            if left and all(words.encode() in screen for words in shown):
                view.send_signal(signal.SIGINT)
                left = False
    os.close(terminal)
    assert not left, screen.decode()
    return view.wait(PATIENCE), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())


def text_of(picture: Path) -> str:
    """Return what a reader sees in a drawn terminal."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "textLength" in text.attrib:
            place = float(text.attrib["x"]), (text.text or "").replace("\xa0", " ")
            rows.setdefault(float(text.attrib["y"]), []).append(place)
    width = 12.2  # of a character
    lines: list[str] = []
    for y in sorted(rows):
        line = ""
        for x, words in sorted(rows[y]):
            line = line.ljust(round(x / width)) + words
        lines.append(line.rstrip())
    return "\n".join(lines)
