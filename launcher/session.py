"""The keeper of one process: `python -m launcher.session SPEC.json`, or `--instance RUN:NAME`.

An instance is the process of that name in $MOTLEY_STATE_DIR: systemd's units name theirs so. A host
that was rebooted goes on with an unfinished process and leaves a finished one alone.

It outlives the terminal and the SSH session that started it, restarts its child with backoff,
and writes down what it knows in `state.json`. It needs nothing but the standard library.

The child runs in a process group of its own and dies with its keeper (PR_SET_PDEATHSIG), so a
killed keeper never leaves a training process behind that nobody looks after.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.child_group import adopt_orphans, kill_orphans, reap, signal_group, start_child
from launcher.files import write_atomically
from launcher.log_marks import GRANULARITY, LogMarks
from launcher.processes import RUN_VARIABLE, ProcessIdentity, identify
from launcher.session_spec import FINAL_PHASES, Phase, SessionSpec, log_name

STATE_SCHEMA = "motley.process/1"

_INSTANCE = r"[a-z0-9][a-z0-9._-]*:((worker|teacher)-[0-9]+|coordinator|student|evaluator)"
_LEADER_POLL = GRANULARITY  # how often it wakes without a signal
WANTED_VARIABLE = "MOTLEY_UNIT_WANTED"
"""Set by the units: the link that is there while systemd starts this one at boot."""
_HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})


class Keeper:
    """Runs one child until it is done, hopeless or asked to stop. Not reusable."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self._attempt = _last_attempt(self._folder)  # a resumed run goes on counting
        self._failures = 0
        self._phase: Phase = "starting"
        self._child: ProcessIdentity | None = None
        self._returncode: int | None = None
        self._started: float | None = None
        self._retry_at: float | None = None
        self._message: str | None = None
        self._stopping = False
        self._leaving = False

    def run(self) -> None:
        """Keep the child until the end; the final state is on disk when this returns."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        adopt_orphans()
        self._write_state()
        while True:
            if self._is_taken_down():
                return self._finish("stopped", "the run was taken down")
            began = time.monotonic()
            returncode = self._run_once()
            self._returncode = returncode
            self._child = None
            if self._leaving:
                return self._write_state()  # no end: the next boot goes on
            if self._stopping:
                return self._finish("stopped", None)
            if returncode == 0:
                return self._finish("exited", None)
            if self._leader_is_over():
                return self._finish("stopped", "the run is over")
            if time.monotonic() - began >= self._spec.restart.healthy_after:
                self._failures = 0
            self._failures += 1
            if not self._spec.restart.restarts(returncode):
                return self._finish("failed", "this exit code is not worth another attempt")
            if self._failures >= self._spec.restart.most_failures:
                return self._finish("failed", f"gave up after {self._failures} failures in a row")
            if not self._pause(self._spec.restart.delay(self._failures)):
                return None if _is_wanted() else self._finish("stopped", None)

    def _run_once(self) -> int:
        """Start one attempt and return how it ended, with nothing of it left running."""
        self._attempt += 1
        self._started = time.time()
        self._retry_at = None
        log = self._folder / log_name(self._attempt)
        environment = {**os.environ, **self._spec.env, RUN_VARIABLE: self._spec.run_id}
        marks = LogMarks(log)
        marks.take()
        with log.open("ab", buffering=0) as output:
            log.chmod(0o600)
            try:
                child = start_child(self._spec.argv, self._spec.folder, environment, output)
            except OSError as error:
                output.write(f"cannot start {self._spec.argv[0]}: {error.strerror}\n".encode())
                return 2
        self._child = identify(child.pid)
        self._phase = "running"
        self._write_state()
        return self._wait_for(child, marks)

    def _wait_for(self, child: subprocess.Popen[bytes], marks: LogMarks) -> int:
        kill_at: float | None = None
        over_since: float | None = None
        while True:
            returncode = reap(child.pid)
            if returncode is not None:
                child.returncode = returncode
                signal_group(child.pid, signal.SIGKILL)
                kill_orphans()
                marks.take()
                return returncode
            marks.take(unless_younger_than=GRANULARITY - 1.0)
            now = time.monotonic()
            timeout = _LEADER_POLL if kill_at is None else max(0.0, kill_at - now)
            caught = signal.sigtimedwait(_HANDLED, timeout)
            if caught is None and kill_at is None and self._leader_is_over():
                over_since = over_since or now
            abandoned = over_since is not None and time.monotonic() - over_since > self._spec.grace
            if kill_at is not None and time.monotonic() >= kill_at:
                signal_group(child.pid, signal.SIGKILL)
            elif (_asks_to_stop(caught) or abandoned) and not self._stopping:
                self._stopping = True
                self._leaving = _is_wanted() and not abandoned and not self._is_taken_down()
                self._phase = "stopping"
                self._write_state()
                # A coordinator that is asked to stop sends everybody home; one that dies with its
                # host is waited for.
                kill_at = time.monotonic() + (0.0 if self._leaving else self._spec.grace)
                if self._leaving:
                    continue
                signal_group(child.pid, signal.SIGTERM)
                signal_group(child.pid, signal.SIGCONT)  # a stopped group must hear it too

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; False when asked to stop meanwhile."""
        self._phase = "backoff"
        self._retry_at = time.time() + seconds
        self._write_state()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            caught = signal.sigtimedwait(_HANDLED, left)
            if _asks_to_stop(caught):
                return False
            reap(-1)
        return True

    def _is_taken_down(self) -> bool:
        """Whether somebody asked for the end of the run."""
        return self._spec.ended is not None and Path(self._spec.ended).exists()

    def _leader_is_over(self) -> bool:
        """Whether the process that this one serves has ended for good.

        A worker that comes back after the last step would wait for its coordinator in vain.
        """
        return self._spec.leader is not None and is_final(Path(self._spec.leader))

    def _finish(self, phase: Phase, message: str | None) -> None:
        self._phase = phase
        self._message = message
        self._retry_at = None
        self._write_state()

    def _write_state(self) -> None:
        returncode = self._returncode
        state = {
            "schema": STATE_SCHEMA,
            "name": self._spec.name,
            "run_id": self._spec.run_id,
            "state": self._phase,
            "message": self._message,
            "keeper": _as_dict(identify(os.getpid())),
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
        except OSError as error:  # a full disk must not end the training it reports on
            print(f"state.json not written: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its own log


def main(arguments: list[str]) -> int:
    """Run the keeper of the spec file, or of the instance, named on the command line."""
    state = os.environ.get("MOTLEY_STATE_DIR")
    match arguments:
        case ["--instance", instance] if state and re.fullmatch(_INSTANCE, instance):
            run_id, _, name = instance.rpartition(":")
            folder = Path(state, "runs", run_id, "processes", name)
            if not (folder / "spec.json").exists() or is_final(folder / "state.json"):
                return 0
            _carry(run_id)
            spec = folder / "spec.json"
        case [path] if not path.startswith("-"):
            spec = Path(path)
        case _:
            usage = "SPEC.json | --instance RUN:NAME (with MOTLEY_STATE_DIR set)"
            print(f"usage: python -m launcher.session {usage}", file=sys.stderr)  # noqa: T201 - a program
            return 2
    Keeper(SessionSpec.from_json(spec.read_bytes())).run()
    return 0


def _carry(run_id: str) -> None:
    """Start this program anew with the run's id, by which `find_run` finds whoever belongs to it.

    systemd gives every instance of a unit the same environment, and what /proc shows of one's
    environment is how one was started.
    """
    if os.environ.get(RUN_VARIABLE) != run_id:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, RUN_VARIABLE: run_id})  # noqa: S606 - itself


def is_final(state: Path) -> bool:
    """Whether a `state.json` says that its process has ended and is not started again."""
    try:
        tree: Any = json.loads(state.read_bytes())
    except (OSError, ValueError):  # an empty one: its start is under way
        return False
    return isinstance(tree, dict) and tree.get("state") in FINAL_PHASES  # pyright: ignore[reportUnknownMemberType]


def _last_attempt(folder: Path) -> int:
    """Return the highest number of a log in the folder, 0 when there is none."""
    numbers = [path.stem.removeprefix("attempt-") for path in folder.glob("attempt-*.log")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _is_wanted() -> bool:
    """Whether systemd would start this unit at the next boot: then it is the host that goes down.

    Whoever stops a unit for good disables it first (motley-unit).
    """
    link = os.environ.get(WANTED_VARIABLE)
    return link is not None and Path(link).is_symlink()


def _asks_to_stop(caught: signal.struct_siginfo | None) -> bool:
    return caught is not None and caught.si_signo in (signal.SIGTERM, signal.SIGINT)


def _as_dict(process: ProcessIdentity | None) -> dict[str, Any] | None:
    return None if process is None else asdict(process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
