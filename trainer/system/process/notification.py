"""Runs a person's command for an event of a run: JSON on stdin, a time limit, more tries.

Also for the launcher's supervisors: standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.system.process.child import signal_group

SCHEMA = "motley.notify/2"
COMMAND_VARIABLE = "MOTLEY_NOTIFY"
"""Variable that a supervisor sets for its process: the start's command as a JSON list, or empty."""
TIME_LIMIT = 10.0
"""Seconds that one try may take."""
PAUSES = (1.0, 5.0, 25.0)
"""Seconds between tries."""
_LONGEST = 400


def run_notify_command(
    command: Sequence[str],
    event: Mapping[str, Any],
    *,
    time_limit: float = TIME_LIMIT,
    pauses: Sequence[float] = PAUSES,
    pause: Callable[[float], object] = time.sleep,
    report: Callable[[str], object] = lambda _: None,
) -> str | None:
    """Run a command until it ends with 0; return why the last try failed, None if one did not.

    Args:
        event: with `event`, `run_id` and `text`, which the command also gets as MOTLEY_EVENT,
            MOTLEY_RUN and MOTLEY_TEXT.
        report: takes why a try failed, at once.
    """
    for seconds in (*pauses, None):
        reason = _run_once(command, event, time_limit)
        if reason is None:
            return None
        report(reason)
        if seconds is not None:
            pause(seconds)
    return reason


def plain_text(text: str) -> str:
    """Return a text as one line of bounded length, which says nothing to a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def _run_once(command: Sequence[str], event: Mapping[str, Any], time_limit: float) -> str | None:
    variables = {f"MOTLEY_{name}": str(event[key]) for name, key in _VARIABLES.items()}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it may repeat an address that is a secret
            env={**os.environ, **variables},
            process_group=0,
        )
    except OSError as error:
        return error.strerror or str(error)
    try:
        child.communicate(json.dumps({"schema": SCHEMA, **event}).encode() + b"\n", time_limit)
    except subprocess.TimeoutExpired:
        signal_group(child.pid, signal.SIGKILL)
        child.wait()
        return f"not finished within {time_limit:g} s"
    return None if child.returncode == 0 else f"exit code {child.returncode}"


_VARIABLES = {"EVENT": "event", "RUN": "run_id", "TEXT": "text"}
