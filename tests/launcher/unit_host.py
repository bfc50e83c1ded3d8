"""A host whose units are run here as systemd runs them, as far as supervisors rely on it.

What systemd itself does (cgroups, boot, hardening) is tested on the test bed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.agent.operation import DEADLINE
from launcher.errors import PreflightError, UnreachableError
from launcher.hosts.base import UNIT_DEADLINE
from launcher.hosts.local import LocalConnection
from launcher.session.process_supervisor import WANTED_VARIABLE
from launcher.session.processes import boot_id

UNIT = re.compile(r"motley-(?:worker|coordinator)@([a-z0-9][a-z0-9._-]*:[a-z0-9-]+)\.service")


class Unit:
    """One instance: ExecStart, Restart=on-failure, and whether it is wanted at boot."""

    def __init__(self, argv: list[str], state_folder: Path) -> None:
        self._wanted = state_folder / "wants" / argv[-1]
        self._wanted.parent.mkdir(parents=True, exist_ok=True)
        self._argv = argv
        self._environment = {
            **os.environ,
            "MOTLEY_STATE_DIR": str(state_folder),
            WANTED_VARIABLE: str(self._wanted),
        }
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._guard = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._wanted.is_symlink()

    def _disable(self) -> None:
        self._wanted.unlink(missing_ok=True)

    def go_down_with_the_host(self) -> None:
        """What a shutdown does: SIGTERM to a unit that stays enabled."""
        assert self._supervisor is not None
        self._supervisor.send_signal(signal.SIGTERM)
        self._supervisor.wait(30)

    def enable(self) -> None:
        if not self.enabled:
            self._wanted.symlink_to("unit")

    def start(self) -> None:
        self.enable()
        self._stopping = False
        self._run()

    def _run(self) -> None:
        with self._guard:
            if self._stopping:
                return
            self._supervisor = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, args=(self._supervisor,), daemon=True).start()

    def _watch(self, supervisor: subprocess.Popen[bytes]) -> None:
        if supervisor.wait() != 0:
            self._run()

    def stop(self, deadline: float) -> None:
        self._disable()
        with self._guard:
            self._stopping = True
        if self._supervisor is None:
            return
        self._supervisor.send_signal(signal.SIGTERM)
        try:
            self._supervisor.wait(deadline)
        except subprocess.TimeoutExpired:
            raise UnreachableError("the unit did not stop in time") from None

    def kill(self) -> None:
        self._disable()
        with self._guard:
            self._stopping = True
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()

    def _runs(self) -> bool:
        """Whether it runs, or will again; `poll` says it does until `_watch` has noted its end."""
        if self._supervisor is None:
            return False
        try:
            ended = os.waitid(os.P_PID, self._supervisor.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # noted, or about to be
            return self._supervisor.wait() != 0 and not self._stopping
        return ended is None or (ended.si_status != 0 and not self._stopping)

    def show(self) -> dict[str, str]:
        runs = self._runs()
        return {
            "ActiveState": "active" if runs else "inactive",
            "SubState": "running" if runs else "dead",
            "UnitFileState": "enabled" if self.enabled else "disabled",
            "Result": "success",
        }


class UnitHost(LocalConnection):
    """This machine, with units; `asked` is what `control_unit` was told."""

    units = True

    def __init__(self, state_folder: Path, program: str = sys.executable) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []
        self._state_folder = state_folder
        self._program = program
        self._units: dict[str, Unit] = {}

    def unit(self, name: str) -> Unit:
        found = UNIT.fullmatch(name)
        if found is None:
            raise PreflightError(f"not a unit of Motley: {name}")
        argv = [self._program, "-P", "-m", "launcher.session", "--instance", found.group(1)]
        return self._units.setdefault(name, Unit(argv, self._state_folder))

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        self.asked.append((verb, unit))
        found = self.unit(unit)
        {"start": found.start, "stop": lambda: found.stop(deadline), "kill": found.kill}[verb]()

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = DEADLINE
    ) -> Any:
        if name != "units":
            return super().call(name, arguments, deadline)
        wanted = (arguments or {})["names"]
        return {"boot": boot_id(), "units": {unit: self.unit(unit).show() for unit in wanted}}

    def close(self) -> None:
        for unit in self._units.values():
            unit.kill()
