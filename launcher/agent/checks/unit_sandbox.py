"""The paths that systemd's sandbox lets a process read and write.

An agent runs outside the sandbox, so its own access does not tell what a unit may access. A
folder that a unit may not write to would end a run with `Read-only file system`, and one in its
private /tmp would be deleted with it. Standard library only: an agent runs this on its host.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.checks.finding import Finding
from launcher.agent.checks.unit_states import show_units
from launcher.agent.operation import check

PROPERTIES = ("Id", "ProtectSystem", "ReadWritePaths", "ProtectHome", "PrivateTmp")

_HOMES = ("/home", "/root", "/run/user")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - names that are compared, nothing is made there
_WRITE_ELSEWHERE = (
    "choose a folder there, or add yours to trainer_writable_folders and run: "
    "ansible-playbook recipes/gpu-training.yml --tags trainer"
)
_MOVE = "choose another folder; launch sync inputs copies models and data to inputs/"


@dataclass(frozen=True)
class Sandbox:
    """Files that a unit's processes may access; links are resolved to their targets."""

    writable: tuple[str, ...] | None
    """They write only below these; None: wherever their user may."""
    hidden: tuple[str, ...]
    """They see an empty folder here, or a private one that is deleted with them."""

    def hidden_folder(self, path: str) -> str | None:
        """Return the hidden folder that contains a path; None if the path is visible."""
        return next((folder for folder in self.hidden if _is_below(path, folder)), None)

    def lets_write(self, path: str) -> bool:
        """Whether a path that can be seen is not read-only."""
        return self.writable is None or any(_is_below(path, folder) for folder in self.writable)


def read_fence(properties: Mapping[str, str]) -> Sandbox:
    """Return the sandbox that `systemctl show` describes."""
    writable: tuple[str, ...] | None = None
    if properties.get("ProtectSystem") == "strict":
        # A leading - means that the folder need not exist, a + marks where its path begins.
        words = shlex.split(properties.get("ReadWritePaths", ""))
        writable = tuple(word.lstrip("-+") for word in words)
    hidden = _HOMES if properties.get("ProtectHome") in ("yes", "tmpfs") else ()
    if properties.get("PrivateTmp") in ("yes", "connected", "disconnected"):
        hidden += _TEMPORARY
    return Sandbox(writable, hidden)


@check("fences")
def check_sandboxes(units: Mapping[str, Mapping[str, Sequence[str]]]) -> Finding:
    """Check whether units can access their planned paths: by unit, the paths it `reads`, `writes`.

    Raises:
        OSError: systemd does not answer.
    """
    shown = show_units(list(units), PROPERTIES).units
    problems: dict[str, str] = {}
    limits: set[str] = set()
    for unit, paths in units.items():
        who = f"{unit.partition('@')[0]}@.service"
        if unit not in shown:
            detail = f"not checked: systemd does not report on {who}"
            return Finding(
                "warn", detail, "ansible-playbook recipes/gpu-training.yml --tags trainer"
            )
        fence = read_fence(shown[unit])
        limit = f"writes below {' and '.join(fence.writable or ('/',))}"
        limits.add(limit)
        for path in (*paths["reads"], *paths["writes"]):
            if (folder := fence.hidden_folder(path)) is not None:
                problems[f"{path}: {who} cannot see {folder}"] = _MOVE
            elif path in paths["writes"] and not fence.lets_write(path):
                problems[f"{path} is read-only for {who}, which {limit}"] = _WRITE_ELSEWHERE
    if problems:
        return Finding("fail", "; ".join(problems), "; ".join(dict.fromkeys(problems.values())))
    return Finding("ok", "; ".join(sorted(limits)))


def _is_below(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
