"""The spec file of a process supervisor. Standard library only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.system.errors import RESTARTED

SPEC_SCHEMA = "motley.session/2"
SAVING = "saving"
"""The file in a process's folder that is there while the process saves what it must not lose."""
PROGRESS = "progress"
"""The file there in which a process that reads data says how far it is, in a line."""
LONGEST_SAVE = 600.0
"""Seconds beyond the grace that a process which saves is given in all: 7 GB at 12 MB/s. A disk that
hangs must not put off an end for ever."""

Phase = Literal["starting", "running", "backoff", "stopping", "exited", "failed", "stopped"]
"""`exited` ended well (0), `failed` ended badly for good, `stopped` ended because asked to."""

FINAL_PHASES: frozenset[str] = frozenset({"exited", "failed", "stopped"})


@dataclass(frozen=True)
class RestartPolicy:
    """When a child is started again, after which codes or any signal; durations in seconds."""

    exit_codes: tuple[int, ...] = RESTARTED
    first_delay: float = 0.5
    max_delay: float = 30.0
    healthy_after: float = 60.0
    """A child that lived this long makes the next delay the first one again."""
    max_failures: int = 20
    """Failures in a row after which the supervisor gives up."""

    def is_restarted(self, returncode: int) -> bool:
        """Whether a child that ended so (negative: by that signal) is started again."""
        return returncode < 0 or returncode in self.exit_codes

    def draw_delay(self, failures: int, draw: Callable[[], float] = random.random) -> float:
        """Return the pause before the next start: exponential, with up to half taken off.

        The jitter keeps workers that lost the same coordinator from reconnecting all at once.
        """
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - 0.5 * draw())


@dataclass(frozen=True)
class SessionSpec:
    """The process to keep running. `env` is added to the supervisor's own environment."""

    name: str
    run_id: str
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    """Where state and logs lie; also the child's working directory."""
    grace_seconds: float = 20.0
    """Seconds between SIGTERM, or the end of the last save after it, and SIGKILL."""
    max_save_seconds: float = LONGEST_SAVE
    """Seconds that saves may put SIGKILL off."""
    leader_state: str | None = None
    """The state.json of a process on this host whose end is the end of this one too."""
    stop_file: str | None = None
    """A file that exists once the run is to end: nothing is started from then on."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    notify: tuple[str, ...] = ()
    """The start's command for notifications; the supervisor itself runs it only if it gives up."""

    def to_json(self) -> bytes:
        """Return the file that `launcher.session` reads."""
        return json.dumps({"schema": SPEC_SCHEMA, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> SessionSpec:
        """Read a spec back; raises ValueError or KeyError when it is not one."""
        tree: dict[str, Any] = json.loads(text)
        if tree.pop("schema") != SPEC_SCHEMA:
            raise ValueError(f"not a {SPEC_SCHEMA} file")
        restart: dict[str, Any] = tree.pop("restart")
        restart["exit_codes"] = tuple(restart["exit_codes"])
        tree["argv"], tree["notify"] = tuple(tree["argv"]), tuple(tree.get("notify", ()))
        return cls(restart=RestartPolicy(**restart), **tree)


def log_name(attempt: int) -> str:
    """Return the file name of an attempt's output; attempts count from 1."""
    return f"attempt-{attempt}.log"
