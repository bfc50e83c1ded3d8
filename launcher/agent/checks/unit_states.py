"""The state of systemd units, read without privileges. Standard library only: agents run it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.agent.operation import operation
from launcher.session.processes import boot_id

PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "Result")
_DEADLINE = 8.0


@dataclass(frozen=True)
class UnitStates:
    """systemd's properties of units, by name."""

    boot: str
    units: dict[str, dict[str, str]]


@operation("units")
def show_units(names: Sequence[str], properties: Sequence[str] = PROPERTIES) -> UnitStates:
    """Return the properties of units; no units without systemd.

    Among the properties must be `Id`: the name, which is not repeated in the mapping.

    Raises:
        OSError: systemd does not answer.
    """
    systemctl = shutil.which("systemctl")
    if systemctl is None or not names:
        return UnitStates(boot_id(), {})
    try:
        done = subprocess.run(
            [systemctl, "show", f"--property={','.join(properties)}", "--", *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"systemctl does not answer within {_DEADLINE:.0f} s") from None
    return UnitStates(boot_id(), read_properties(done.stdout))


def read_properties(text: str) -> dict[str, dict[str, str]]:
    """Read `systemctl show` of several units: paragraphs of `Property=value`."""
    units: dict[str, dict[str, str]] = {}
    for paragraph in text.split("\n\n"):
        pairs = [line.partition("=") for line in paragraph.splitlines() if "=" in line]
        properties = {name: value for name, _, value in pairs}
        if "Id" in properties:
            units[properties.pop("Id")] = properties
    return units
