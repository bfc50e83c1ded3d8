"""The workers that a coordinator with --gpus runs on its own machine, and their restarts."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from trainer.system.errors import InputError, TrainerError, should_restart
from trainer.system.process.child import FALLBACK_VARIABLE

log = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds that a worker has to end by itself."""


class LocalWorkers:
    """One process for each command, all of which read the open file `run_file`.

    Args:
        on_refused: called from any thread with the reason if a worker cannot start as requested.
    """

    def __init__(self, run_file: int, on_refused: Callable[[TrainerError], None]) -> None:
        self._run_file = run_file
        self._on_refused = on_refused
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # no worker is started once stopping has begun

    def start(self, commands: Sequence[list[str]]) -> None:
        """Start a process for each command; to be called once."""
        for index, command in enumerate(commands):
            threading.Thread(
                target=self._supervise_worker, args=(index, command), daemon=True
            ).start()

    def stop(self) -> None:
        """Stop all workers, by force after 10 s each; none is started again."""
        with self._lock:
            self._stopping.set()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()  # none outlives its coordinator

    def _supervise_worker(self, index: int, command: list[str]) -> None:
        delay = 0.5
        environment = dict(os.environ)
        while True:
            began = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                process = subprocess.Popen(command, pass_fds=(self._run_file,), env=environment)
                self._processes[index] = process
            code = process.wait()
            if time.monotonic() - began > 60:  # not a crash at every start
                delay = 0.5
            if code == InputError.exit_code and FALLBACK_VARIABLE not in environment:
                self._on_refused(InputError(f"worker {index} cannot start; its error is above"))
            if not should_restart(code) or self._stopping.wait(delay):
                return
            environment[FALLBACK_VARIABLE] = "1"
            log.warning("worker %d exited with code %d, restarting it", index, code)
            delay = min(2 * delay, 30.0)
