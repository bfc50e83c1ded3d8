"""The output of a run's processes: whole, its end, or as it grows over several attempts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from launcher.errors import ConfigError
from launcher.observation import Cockpit
from launcher.plan import ProcessPlan
from launcher.runs import Run

_POLL = 0.2


class Printer:
    """Prints lines on stdout as they are: plain, with the name in front, or as JSON lines."""

    def __init__(self, as_json: bool, prefixed: bool) -> None:
        self._as_json = as_json
        self._prefixed = prefixed

    def print(self, process: ProcessPlan, attempt: int, lines: Sequence[bytes]) -> None:
        """Print complete lines (without their ends) of one attempt."""
        for line in lines:
            if self._as_json:
                tree = {
                    "schema": "motley.log/1",
                    "name": process.name,
                    "attempt": attempt,
                    "line": line.decode(errors="replace"),
                }
                line = json.dumps(tree).encode()
            elif self._prefixed:
                line = f"{process.name} | ".encode() + line
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


class LogReader:
    """Reads the logs of some processes; remembers how far, so nothing is lost or doubled."""

    def __init__(self, cockpit: Cockpit, chosen: Sequence[ProcessPlan], printer: Printer) -> None:
        self._cockpit = cockpit
        self._chosen = chosen
        self._printer = printer
        self._offsets: dict[tuple[str, int], int] = {}

    def print_existing(self, attempt: int | None, tail: int | None) -> None:
        """Print what is there of an attempt (None: the last one), `tail` lines at most.

        Raises:
            ConfigError: there is no such attempt.
        """
        for process in self._chosen:
            attempts = self._cockpit.supervisor(process).attempts(process)
            if attempt is not None and attempt not in attempts:
                known = ", ".join(map(str, attempts)) or "none"
                raise ConfigError(f"{process.name} has no attempt {attempt} (there are: {known})")
            if attempts:
                self._advance(process, attempt or attempts[-1], tail, whole=True)

    def follow(self, announce: Callable[[str], None]) -> None:
        """Print what is added, until every process is over; new attempts are announced."""
        for process in self._chosen:  # what came before the latest attempt is not news
            for attempt in self._cockpit.supervisor(process).attempts(process)[:-1]:
                self._offsets.setdefault((process.name, attempt), -1)
        open_processes = list(self._chosen)
        while open_processes:
            for process in list(open_processes):
                state = self._cockpit.state(process)  # before reading: its last words are included
                self._catch_up(process, announce, final=state.is_over)
                if state.is_over:
                    open_processes.remove(process)
                    ending = f" ({state.ending})" if state.ending else ""
                    announce(f"--- {process.name} {state.state}{ending} ---")
            if open_processes:
                time.sleep(_POLL)

    def _catch_up(self, process: ProcessPlan, announce: Callable[[str], None], final: bool) -> None:
        attempts = self._cockpit.supervisor(process).attempts(process)
        for attempt in attempts:
            key = (process.name, attempt)
            if self._offsets.get(key, 0) < 0:
                continue
            if key not in self._offsets:
                if attempt > 1:
                    announce(f"--- {process.name}: attempt {attempt} ---")
                self._offsets[key] = 0
            ended = attempt != attempts[-1]
            self._advance(process, attempt, None, whole=final or ended)
            if ended:
                self._offsets[key] = -1

    def _advance(self, process: ProcessPlan, attempt: int, tail: int | None, whole: bool) -> None:
        """Print from the remembered offset on; without `whole` an unfinished line waits."""
        key = (process.name, attempt)
        offset = self._offsets.get(key, 0)
        data = self._cockpit.supervisor(process).read_log(process, attempt, offset)
        end = len(data) if whole else data.rfind(b"\n") + 1
        lines = data[:end].split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        self._offsets[key] = offset + end
        self._printer.print(process, attempt, lines if tail is None else lines[len(lines) - tail :])


def choose(run: Run, names: Sequence[str]) -> list[ProcessPlan]:
    """Return the named processes of a run.

    Raises:
        ConfigError: a name does not exist; lists those that do.
    """
    chosen: list[ProcessPlan] = []
    for name in names:
        process = run.plan.process(name)
        if process is None:
            known = ", ".join(process.name for process in run.plan.processes)
            raise ConfigError(f"run {run.run_id} has no process {name} (there are: {known})")
        if process not in chosen:
            chosen.append(process)
    return chosen
