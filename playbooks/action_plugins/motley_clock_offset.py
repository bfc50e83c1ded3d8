"""How far a host's clock is from this machine's, measured over Ansible's connection."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from launcher.hosts.clock_offset import measure_clock_offset


class ActionModule(ActionBase):
    """Changes nothing, so it also runs in check mode."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset()
    _supports_check_mode = True

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return `offset` and `uncertainty` in seconds."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        measured = measure_clock_offset(self._read_clock)
        seconds = {key: round(value, 4) for key, value in measured._asdict().items()}
        return {**result, "changed": False, **seconds}

    def _read_clock(self) -> float:
        # Not by the agent: the start of its Python would widen the uncertainty of every sample.
        answer = self._low_level_execute_command("date +%s.%N", sudoable=False)
        try:
            return float(str(answer["stdout"]).split()[-1])
        except (IndexError, ValueError):
            raise AnsibleActionFail("the host does not report its time") from None
