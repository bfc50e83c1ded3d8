"""The output of a run's processes: all of it, its end, or as it grows over several attempts.

Following survives lost connections: it remembers the offset of the printed lines, and resumes there
when a host is back. Each process is followed in its own thread, so that an unreachable host delays
no other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from launcher.agent.operations import read_clock
from launcher.errors import (
    ConfigError,
    InvalidAnswerError,
    LauncherError,
    UnreachableError,
    raise_all,
)
from launcher.hosts import fleet, ssh
from launcher.hosts.fleet import describe_pending
from launcher.plan.plan import ProcessPlan
from launcher.runs.failures import FailureWatch
from launcher.runs.processes.log_pages import LogPage, LogPages
from launcher.runs.records.run import Run
from launcher.runs.status import RunMonitor
from launcher.views.log_printer import LinePrinter

POLL = 0.2
_FIRST_RETRY = 0.5
_LONGEST_RETRY = 15.0
_OTHERS_EVERY = 2.0
_LOOK = 1.0
"""Seconds of one wait: Ctrl-C in the moment before a wait shows at its end only."""
_AHEAD = 16
"""Pages that may be read before they are printed."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Selection:
    """The selected lines."""

    attempt: int | None = None
    """None: the last one, with `since` all that are as young."""
    tail: int | None = None
    since: Callable[[float], float] | None = None
    """Takes the host's clock, returns the moment; both Unix seconds."""


class ProcessLog:
    """The logs of one process, and how far they have been read."""

    def __init__(self, monitor: RunMonitor, process: ProcessPlan, selection: Selection) -> None:
        self.process = process
        self._monitor = monitor
        self._selection = selection
        self._offsets: dict[int, int] = {}
        self._moment: float | None = None

    def read_existing(self, emit: Callable[[int, list[bytes]], None], announce: Announce) -> None:
        """Hand over the selected existing lines.

        Raises:
            ConfigError: there is no such attempt.
            UnreachableError: the host does not answer; another call resumes.
        """
        supervisor = self._monitor.find_supervisor(self.process)
        attempts = supervisor.list_attempts(self.process)
        wanted = self._selection.attempt
        if wanted is not None and wanted not in attempts:
            known = ", ".join(map(str, attempts)) or "none"
            raise ConfigError(f"{self.process.name} has no attempt {wanted} (there are: {known})")
        for attempt in self._wanted_attempts(attempts):
            if attempt not in self._offsets:
                self._offsets[attempt] = self._find_start(attempt, announce)
            self._read_on(attempt, emit, whole=attempt != attempts[-1])

    def follow(self, emit: Callable[[int, list[bytes]], None], announce: Announce) -> bool:
        """Hand over new lines, also of new attempts; return whether the end was reached.

        Raises:
            UnreachableError: the host does not answer; another call resumes.
        """
        state = self._monitor.read_state(
            self.process
        )  # before reading: its last lines are included
        attempts = self._monitor.find_supervisor(self.process).list_attempts(self.process)
        latest = max(self._offsets, default=0)
        for attempt in attempts:
            if attempt < latest:
                continue
            if attempt not in self._offsets:
                if attempt > 1:
                    announce(f"--- {self.process.name}: attempt {attempt} ---")
                self._offsets[attempt] = 0
            self._read_on(attempt, emit, whole=state.is_over or attempt != attempts[-1])
        if state.is_over:
            ending = f" ({state.last_end})" if state.last_end else ""
            announce(f"--- {self.process.name} {state.state}{ending} ---")
        return state.is_over

    def read_unfinished_line(self, emit: Callable[[int, list[bytes]], None]) -> None:
        """Hand over the unfinished line at the end, when nothing is followed."""
        for attempt in sorted(self._offsets)[-1:]:
            self._read_on(attempt, emit, whole=True)

    def _wanted_attempts(self, attempts: list[int]) -> list[int]:
        if self._selection.attempt is not None:
            return [self._selection.attempt]
        if self._selection.since is None:
            return attempts[-1:]
        if self._moment is None:  # by the clock of the host, which made the marks
            host = self._monitor.run.find_host(self.process.host)
            clock = ssh.connect_host(host).ask(read_clock)
            self._moment = self._selection.since(clock)
        return attempts

    def _find_start(self, attempt: int, announce: Announce) -> int:
        """Return the offset of the first line that is wanted."""
        pages = LogPages(self._monitor.find_supervisor(self.process), self.process, attempt)
        offset = 0
        if self._moment is not None:
            since = pages.offset_since(self._moment)
            if since is None:
                announce(
                    f"--- {self.process.name}: attempt {attempt} has no timestamps; all of it ---"
                )
            offset = since or 0
        tail = self._selection.tail
        return offset if tail is None else max(offset, pages.find_tail_offset(tail))

    def _read_on(self, attempt: int, emit: Callable[[int, list[bytes]], None], whole: bool) -> None:
        """Hand over what is behind the remembered offset, which moves only after that."""
        pages = LogPages(self._monitor.find_supervisor(self.process), self.process, attempt)
        page: LogPage
        for page in pages.read_pages(self._offsets[attempt], whole):
            if page.lines:
                emit(attempt, page.lines)
            self._offsets[attempt] = page.end


def make_log_reader(
    run: Run | None, names: Sequence[str], selection: Selection, as_json: bool
) -> LogReader:
    """Return what prints the logs of a run's processes, all of them without names.

    Raises:
        ConfigError: there is no run, or it has no such process; lists those it has.
    """
    if run is None:
        raise ConfigError("no run has been started here; start one with: launch cluster up")
    chosen = choose_processes(run, names)
    return LogReader(RunMonitor(run), chosen, LinePrinter(as_json, chosen), selection)


class LogReader:
    """Prints the logs of some processes."""

    def __init__(
        self,
        monitor: RunMonitor,
        chosen: Sequence[ProcessPlan],
        printer: LinePrinter,
        selection: Selection,
    ) -> None:
        self._monitor = monitor
        self._logs = [ProcessLog(monitor, process, selection) for process in chosen]
        self._printer = printer

    def print_existing(self, announce: Announce) -> None:
        """Print the existing lines, one process after the other.

        Raises:
            ConfigError: there is no such attempt.
            UnreachableError: hosts do not answer; what the others have is printed.
        """
        errors: dict[str, LauncherError] = {}
        late = self._late_hosts()
        if late:
            announce(describe_pending(late))
        for log in sorted(self._logs, key=lambda log: log.process.host in late):
            if log.process.host in errors:
                continue
            try:
                log.read_existing(self._make_emitter(log.process), announce)
                log.read_unfinished_line(self._make_emitter(log.process))
            except (UnreachableError, InvalidAnswerError) as error:
                errors[log.process.host] = error
        raise_all([*errors.values()])

    def follow(self, announce: Announce) -> None:
        """Print existing and new lines until every process has ended.

        A host that is lost is announced once, and asked again until it is back. When a process
        that is not followed fails, its last lines are announced.

        Raises:
            LauncherError: a host answers with an error that ends following.
        """
        events: queue.Queue[_Event] = queue.Queue(_AHEAD)
        over = threading.Event()
        for log in self._logs:
            threading.Thread(target=_follow_process, args=(log, events), daemon=True).start()
        threading.Thread(target=self._tell_late_hosts, args=(events,), daemon=True).start()
        open_logs = len(self._logs)
        followed = {log.process.name for log in self._logs}
        if len(followed) < len(self._monitor.run.plan.processes):
            arguments = (self._monitor, followed, events, over)
            threading.Thread(target=_watch_others, args=arguments, daemon=True).start()
        try:
            while open_logs:
                try:
                    event = events.get(timeout=_LOOK)
                except queue.Empty:
                    continue
                if event.note is not None:
                    announce(event.note)
                elif event.error is not None:
                    raise event.error
                elif event.process is None:
                    open_logs -= 1
                else:
                    self._printer.print_lines(event.process, event.attempt, event.lines)
        finally:
            over.set()

    def _late_hosts(self) -> list[str]:
        """Return the hosts of these processes whose logins take long, and go on."""
        names = {log.process.host for log in self._logs}
        hosts = [host for host in self._monitor.run.hosts if host.name in names]
        return fleet.ask_hosts(hosts, lambda _host, _connection: None).late

    def _tell_late_hosts(self, events: queue.Queue[_Event]) -> None:
        with contextlib.suppress(LauncherError, OSError):  # of a host: its thread's to report
            if late := self._late_hosts():
                events.put(_Event(note=describe_pending(late)))

    def _make_emitter(self, process: ProcessPlan) -> Callable[[int, list[bytes]], None]:
        return lambda attempt, lines: self._printer.print_lines(process, attempt, lines)


@dataclass(frozen=True)
class _Event:
    """The result of a thread: lines, a message, an error, or (nothing) its end."""

    process: ProcessPlan | None = None
    attempt: int = 0
    lines: Sequence[bytes] = ()
    note: str | None = None
    error: BaseException | None = None


def _follow_process(log: ProcessLog, events: queue.Queue[_Event]) -> None:
    """Follow one process to its end, over as many connections as that takes."""
    process = log.process
    lost_for = 0

    def emit(attempt: int, lines: list[bytes]) -> None:
        events.put(_Event(process, attempt, lines))

    def announce(line: str) -> None:
        events.put(_Event(note=line))

    started = False
    while True:
        try:
            if not started:
                log.read_existing(emit, announce)
                started = True
            over = log.follow(emit, announce)
            if lost_for:
                announce(f"--- {process.name}: {process.host} is reachable again ---")
                lost_for = 0
            if over:
                return events.put(_Event())
            pause = POLL
        except (UnreachableError, InvalidAnswerError, OSError) as error:
            if not lost_for:
                announce(f"--- {process.name}: {error}; trying again ---")
            pause = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(lost_for, 10))
            lost_for += 1
        except BaseException as error:  # the main thread raises it again
            return events.put(_Event(error=error))
        time.sleep(pause)


def _watch_others(
    monitor: RunMonitor,
    followed: Collection[str],
    events: queue.Queue[_Event],
    over: threading.Event,
) -> None:
    """Announce failures of the processes that are not followed, until following is over."""
    watch = FailureWatch(monitor, without=followed)
    while not over.is_set():
        with contextlib.suppress(LauncherError, OSError):
            for failure in watch.new_failures(monitor.observe()):
                for line in failure.lines:
                    events.put(_Event(note=line))
        over.wait(_OTHERS_EVERY)


def choose_processes(run: Run, names: Sequence[str]) -> list[ProcessPlan]:
    """Return the named processes of a run; all of them without a name.

    Raises:
        ConfigError: a name does not exist; lists those that do.
    """
    if not names:
        return list(run.plan.processes)
    chosen: list[ProcessPlan] = []
    for name in names:
        process = run.plan.find_process(name)
        if process is None:
            known = ", ".join(process.name for process in run.plan.processes)
            raise ConfigError(f"run {run.run_id} has no process {name} (there are: {known})")
        if process not in chosen:
            chosen.append(process)
    return chosen
