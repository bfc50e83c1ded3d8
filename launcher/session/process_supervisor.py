"""Supervises one process: `python -P -m launcher.session SPEC.json`, or `--instance RUN:NAME`.

An instance is the process of that name in $MOTLEY_STATE_DIR: systemd's units name theirs so. A host
that was rebooted resumes an unfinished process and leaves a finished one alone.

It outlives the terminal and the SSH session that started it, restarts its child with backoff, and
records its state in `state.json`. Standard library only.

The child runs in a process group of its own and dies with its supervisor (PR_SET_PDEATHSIG), so a
killed supervisor never leaves an unsupervised training process behind. A program that supports it
forks a child for each attempt instead of starting from nothing (`prefork.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from launcher.session.log_index import GRANULARITY, LogMarks
from launcher.session.prefork import Children
from launcher.session.processes import RUN_VARIABLE, ProcessIdentity, identify_process
from launcher.session.spec import (
    FINAL_PHASES,
    PROGRESS,
    SAVING,
    Phase,
    SessionSpec,
    log_name,
)
from trainer.system.errors import BudgetStopError, InputError, StorageError
from trainer.system.process.child import (
    FALLBACK_VARIABLE,
    PROGRESS_VARIABLE,
    SAVING_VARIABLE,
    adopt_orphans,
    signal_group,
)
from trainer.system.process.notification import COMMAND_VARIABLE, run_notify_command
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import write_atomically

STATE_SCHEMA = "motley.process/2"

_INSTANCE = r"[a-z0-9][a-z0-9._-]*:((worker|teacher|evaluator)-[0-9]+|coordinator|student)"
_LEADER_POLL = GRANULARITY  # how often it wakes without a signal
WANTED_VARIABLE = "MOTLEY_UNIT_WANTED"
"""Set by the units: the link that is there while systemd starts this one at boot."""
_WRONG_COMMAND = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENOEXEC,
    errno.E2BIG,
)
"""Why a command cannot be started, now or later; other reasons pass, such as a full disk."""
_MOST_PROGRESS = 500
"""Characters of a line of progress."""
_HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})


class ProcessSupervisor:
    """Runs one child until it is done, fails for good or is asked to stop. Not reusable."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self._saving = self._folder / SAVING
        self._progress_file = self._folder / PROGRESS
        self._progress: str | None = None
        self._attempt = _last_attempt(self._folder)  # a resumed run continues the count
        self._goes_on = _is_unfinished(self._folder / "state.json")
        self._began_with = _read_program(self._folder / "state.json")
        self._program = _describe_version(spec.argv[0], self._began_with)
        self._failures = 0
        self._phase: Phase = "starting"
        self._child: ProcessIdentity | None = None
        self._children = Children()
        self._returncode: int | None = None
        self._started: float | None = None
        self._retry_at: float | None = None
        self._message: str | None = None
        self._notify_failure: str | None = None
        self._unwritten = False
        self._stopping = False
        self._leaving = False

    def run(self) -> None:
        """Keep the child until the end; the final state is on disk when this returns."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        adopt_orphans()
        self._write_state()
        try:
            self._supervise()
        finally:
            self._children.end()

    def _supervise(self) -> None:
        while True:
            if self._is_taken_down():
                return self._record_end("stopped", "the run was stopped")
            began = time.monotonic()
            returncode = self._run_once()
            self._returncode = returncode
            self._child = None
            if self._leaving:
                return self._write_state()  # no end: the next boot resumes it
            if self._stopping:
                return self._record_end("stopped", None)
            if returncode == 0:
                return self._record_end("exited", None)
            if self._leader_is_over():
                return self._record_end("stopped", "the run is over")
            if time.monotonic() - began >= self._spec.restart.healthy_after:
                self._failures = 0
            self._failures += 1
            if returncode == BudgetStopError.exit_code:
                return self._record_end("exited", "the budget guard stopped it")
            if not self._spec.restart.is_restarted(returncode):
                return self._record_end("failed", "this exit code is not retried")
            if self._failures >= self._spec.restart.max_failures:
                return self._give_up(returncode)
            if not self._wait_to_restart(self._spec.restart.draw_delay(self._failures)):
                return None if _is_wanted() else self._record_end("stopped", None)

    def _run_once(self) -> int:
        """Start one attempt and return how it ended, with nothing of it left running."""
        self._attempt += 1
        self._started = time.time()
        self._retry_at = None
        self._message = None
        log = self._folder / log_name(self._attempt)
        environment = {**os.environ, **self._spec.env, RUN_VARIABLE: self._spec.run_id}
        environment[SAVING_VARIABLE] = str(self._saving)
        environment[PROGRESS_VARIABLE] = str(self._progress_file)
        environment[COMMAND_VARIABLE] = json.dumps(self._spec.notify)
        if self._goes_on or self._failures:  # its device may have been lost
            environment[FALLBACK_VARIABLE] = "1"
        with contextlib.suppress(OSError):  # of an attempt that was killed in the middle of a save
            self._saving.unlink(missing_ok=True)
            self._progress_file.unlink(missing_ok=True)
        self._progress = None
        marks = LogMarks(log)
        marks.take_mark()
        with self._open_log(log) as output:
            if self._began_with not in (None, self._program):
                _write_line(output, f"{self._began_with} is gone: {self._program}")
            argv = (self._program, *self._spec.argv[1:])
            try:
                pid = self._children.start(argv, self._spec.folder, environment, output)
            except OSError as error:
                _write_line(output, f"cannot start {self._program}: {error.strerror}")
                wrong = error.errno in _WRONG_COMMAND
                return (InputError if wrong else StorageError).exit_code
        self._phase = "running"
        self._is_running(pid)
        return self._wait_for(pid, marks)

    def _open_log(self, log: Path) -> BinaryIO:
        """Return where an attempt's output goes; nowhere while the disk takes no log."""
        try:
            output = log.open("ab", buffering=0)
            log.chmod(0o600)
        except OSError as error:
            self._message = f"{log.name} cannot be written: {error.strerror}"
            return Path(os.devnull).open("ab", buffering=0)
        return output

    def _is_running(self, pid: int) -> None:
        self._child = identify_process(pid)
        self._write_state()
        self._children.release_child()

    def _wait_for(self, pid: int, marks: LogMarks) -> int:
        kill_at: float | None = None
        wait_until, saved = 0.0, False
        over_since: float | None = None
        while True:
            if (forked := self._children.find_forked_child()) is not None:
                pid = forked
                self._is_running(pid)
            returncode = self._children.poll_child(pid)
            if returncode is not None:
                marks.take_mark()
                return returncode
            marks.take_mark(unless_younger_than=GRANULARITY - 1.0)
            self._take_progress()
            self._catch_up()
            now = time.monotonic()
            timeout = _LEADER_POLL if kill_at is None else max(0.0, kill_at - now)
            caught = signal.sigtimedwait(_HANDLED, timeout)
            if caught is None and kill_at is None and self._leader_is_over():
                over_since = over_since or now
            abandoned = (
                over_since is not None and time.monotonic() - over_since > self._spec.grace_seconds
            )
            now = time.monotonic()
            saves = kill_at is not None and now >= kill_at and self._saving.exists()
            if kill_at is not None and kill_at <= now < wait_until and (saves or saved):
                # What has just ended its save has the grace once more, to end itself.
                kill_at, saved = min(now + self._spec.grace_seconds, wait_until), saves
            elif kill_at is not None and now >= kill_at:
                signal_group(pid, signal.SIGKILL)
            elif (_asks_to_stop(caught) or abandoned) and not self._stopping:
                self._stopping = True
                self._leaving = _is_wanted() and not abandoned and not self._is_taken_down()
                self._phase = "stopping"
                self._write_state()
                # A coordinator that is asked to stop ends its workers; one that dies with its
                # host is waited for.
                kill_at = time.monotonic() + (0.0 if self._leaving else self._spec.grace_seconds)
                if self._leaving:
                    continue
                wait_until = kill_at + self._spec.max_save_seconds
                signal_group(pid, signal.SIGTERM)
                signal_group(pid, signal.SIGCONT)  # a stopped group must hear it too

    def _wait_to_restart(self, seconds: float) -> bool:
        """Wait before the next attempt; False if asked to stop during the wait."""
        self._phase = "backoff"
        self._retry_at = time.time() + seconds
        self._write_state()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            caught = signal.sigtimedwait(_HANDLED, min(left, _LEADER_POLL))
            if _asks_to_stop(caught):
                return False
            self._children.reap_children()
            self._catch_up()
        return True

    def _is_taken_down(self) -> bool:
        """Whether the run was asked to stop."""
        return self._spec.stop_file is not None and Path(self._spec.stop_file).exists()

    def _leader_is_over(self) -> bool:
        """Whether the process that this one serves has ended for good.

        A worker that comes back after the last step would wait for its coordinator in vain.
        """
        return self._spec.leader_state is not None and is_final(Path(self._spec.leader_state))

    def _record_end(self, phase: Phase, message: str | None) -> None:
        self._children.end()
        self._phase = phase
        self._message = message
        self._retry_at = None
        self._remove_keys()
        self._write_state()
        # The disk may be full. Without its end in the file the process would count as lost.
        while self._unwritten and not self._stopping and not self._is_taken_down():
            if _asks_to_stop(signal.sigtimedwait(_HANDLED, _LEADER_POLL)):
                return
            self._catch_up()

    def _give_up(self, returncode: int) -> None:
        """Give up for good and notify; the process did not, because it expected to be restarted."""
        reason = f"gave up after {self._failures} failures in a row"
        self._record_end("failed", reason)
        if self._spec.notify:
            name, run_id = self._spec.name, self._spec.run_id
            how = f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"
            text = f"{run_id} has failed: the supervisor of {name} {reason}, the last with {how}"
            event = {"event": "failed", "run_id": run_id, "process": name, "reason": reason}
            event |= {"time": time.time(), "host": socket.gethostname(), "text": text}
            if run_notify_command(self._spec.notify, event, report=self._note_failed_try) is None:
                self._notify_failure = None
                self._write_state()

    def _note_failed_try(self, failure: str) -> None:
        """Record why the command for notifications failed; it is tried again meanwhile."""
        self._notify_failure = f"failed: {self._spec.notify[0]}: {failure}"
        self._write_state()
        with contextlib.suppress(OSError):
            os.write(2, f"notification failed: {self._notify_failure}\n".encode())

    def _remove_keys(self) -> None:
        """Remove the certificate of a process that has ended for good; a start makes another."""
        with contextlib.suppress(OSError):
            for path in (self._folder / "tls").iterdir():
                path.unlink()

    def _take_progress(self) -> None:
        """Record the progress that the child reports, if it has changed."""
        progress = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            progress = read_file(self._progress_file).decode()[:_MOST_PROGRESS]
        if progress != self._progress:
            self._progress = progress
            self._write_state()

    def _catch_up(self) -> None:
        if self._unwritten:
            self._write_state()

    def _write_state(self) -> None:
        returncode = self._returncode
        state = {
            "schema": STATE_SCHEMA,
            "name": self._spec.name,
            "run_id": self._spec.run_id,
            "state": self._phase,
            "message": self._message,
            "progress": self._progress,
            "notify_failure": self._notify_failure,
            "program": self._program,
            "supervisor": _as_dict(identify_process(os.getpid())),
            "child": _as_dict(self._child),
            "attempt": self._attempt,
            "failures": self._failures,
            "exit_code": returncode if returncode is not None and returncode >= 0 else None,
            "signal": -returncode if returncode is not None and returncode < 0 else None,
            "started": self._started,
            "retry_at": self._retry_at,
            "updated": time.time(),
        }
        data = json.dumps(state, indent=1).encode()
        try:
            write_atomically(self._folder / "state.json", data, durable=False)
            self._unwritten = False
        except OSError as error:  # a full disk must not end the training it reports on
            if not self._unwritten:
                with contextlib.suppress(OSError):  # its own log lies on the same disk
                    os.write(2, f"state.json not written: {error}\n".encode())
            self._unwritten = True


def main(arguments: list[str]) -> int:
    """Run the supervisor of the spec file, or of the instance, named on the command line."""
    state = os.environ.get("MOTLEY_STATE_DIR")
    match arguments:
        case ["--instance", instance] if state and re.fullmatch(_INSTANCE, instance):
            run_id, _, name = instance.rpartition(":")
            folder = Path(state, "runs", run_id, "processes", name)
            if not (folder / "spec.json").exists() or is_final(folder / "state.json"):
                return 0
            _restart_with_run_id(run_id)
            spec = folder / "spec.json"
        case [path] if not path.startswith("-"):
            spec = Path(path)
        case _:
            usage = "SPEC.json | --instance RUN:NAME (with MOTLEY_STATE_DIR set)"
            print(f"usage: python -P -m launcher.session {usage}", file=sys.stderr)  # noqa: T201 - a program
            return 2
    ProcessSupervisor(SessionSpec.from_json(spec.read_bytes())).run()
    return 0


def _restart_with_run_id(run_id: str) -> None:
    """Restart this program with the run's id, by which `find_run` finds the run's processes.

    systemd gives every instance of a unit the same environment, and what /proc shows of one's
    environment is how one was started.
    """
    if os.environ.get(RUN_VARIABLE) != run_id:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, RUN_VARIABLE: run_id})  # noqa: S606 - itself


def is_final(state: Path) -> bool:
    """Whether a `state.json` says that its process has ended and is not started again."""
    try:
        tree: Any = json.loads(read_file(state))
    except (OSError, ValueError):  # an empty one: its start is under way
        return False
    return isinstance(tree, dict) and tree.get("state") in FINAL_PHASES  # pyright: ignore[reportUnknownMemberType]


def _describe_version(program: str, began_with: str | None) -> str:
    """Return a program below its version's folder instead of `current`, see `versions.py`.

    A process that its host's crash ended thus comes back as what it was, whatever was pushed
    meanwhile: other code, or a version that the coordinator refuses, would end its part in the run.

    Args:
        began_with: what an earlier supervisor of the process started.
    """
    link = Path(program).parent.parent
    if not link.is_symlink():
        return program
    if began_with is not None and Path(began_with).exists():
        return began_with
    return str(link.parent / link.readlink() / Path(program).relative_to(link))


def _read_program(state: Path) -> str | None:
    """Return what an earlier supervisor of the process started; a start empties the file."""
    try:
        found: Any = json.loads(read_file(state))["program"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _write_line(output: BinaryIO, line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        output.write(f"{line}\n".encode())


def _is_unfinished(state: Path) -> bool:
    """Whether an earlier supervisor left the process in the middle; a start empties the file."""
    with contextlib.suppress(OSError):
        return state.stat().st_size > 0 and not is_final(state)
    return False


def _last_attempt(folder: Path) -> int:
    """Return the highest number of a log in the folder, 0 when there is none."""
    numbers = [path.stem.removeprefix("attempt-") for path in folder.glob("attempt-*.log")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _is_wanted() -> bool:
    """Whether systemd would start this unit at the next boot: then it is the host that goes down.

    motley-unit disables a unit before it stops it for good.
    """
    link = os.environ.get(WANTED_VARIABLE)
    return link is not None and Path(link).is_symlink()


def _asks_to_stop(caught: signal.struct_siginfo | None) -> bool:
    return caught is not None and caught.si_signo in (signal.SIGTERM, signal.SIGINT)


def _as_dict(process: ProcessIdentity | None) -> dict[str, Any] | None:
    return None if process is None else asdict(process)
