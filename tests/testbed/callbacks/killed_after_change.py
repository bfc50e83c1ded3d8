"""Kills ansible-playbook as soon as a task has changed something, before the next one begins."""

import os
import signal
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: killed_after_change
type: aggregate
short_description: kills the play after its first task that changed something
description: Of handlers and of what a task registered nothing is left, as after a power cut.
"""


class CallbackModule(CallbackBase):
    """Looks at results in the main process, which then has no task under way."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "killed_after_change"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.changed = False

    def v2_runner_on_ok(self, result: Any) -> None:
        """Note whether the task changed something."""
        self.changed = self.changed or result.is_changed()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Die between two tasks."""
        if self.changed:
            os.kill(os.getpid(), signal.SIGKILL)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Die before a handler."""
        self.v2_playbook_on_task_start(task, False)
