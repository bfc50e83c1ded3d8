"""What `launch` draws on terminals of 80 and 60 columns, with real processes behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios

import pytest
from stand_in_cluster import LAUNCH, Cluster, cluster

__all__ = ["cluster"]  # a fixture
pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("columns", [80, 60])
def test_views_fit_a_terminal_and_q_leaves_the_run_alone(cluster: Cluster, columns: int) -> None:
    assert cluster.up().returncode == 0
    for view in (["status"], ["runs"]):
        code, screen = on_a_terminal(cluster, [*LAUNCH, *view], columns)
        assert code == 0
        lines = [line for line in screen.splitlines() if not line.startswith("output: ")]
        assert max(map(len, lines)) <= columns, screen
        assert cluster.runs()[0] in screen
    code, screen = on_a_terminal(cluster, [*LAUNCH, "status", "--watch"], columns, "q")
    assert code == 0, screen
    assert "epoch 1" in screen
    assert "goes on" in screen
    assert cluster.status()["state"] == "running"


def on_a_terminal(
    cluster: Cluster, command: list[str], columns: int, key: str = ""
) -> tuple[int, str]:
    """Run a command on a terminal of its own; a key is pressed once there is a table."""
    terminal, inside = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = cluster.environment | {"TERM": "xterm"}
    environment.pop("COLUMNS", None)
    view = subprocess.Popen(
        command, env=environment, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    screen = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 1 << 16):
            screen += part
            if key and b"SHARE" in screen and b"epoch" in screen:
                os.write(terminal, key.encode())
                key = ""
    os.close(terminal)
    return view.wait(60), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
