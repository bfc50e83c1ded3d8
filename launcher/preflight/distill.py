"""The questions to the hosts about a distillation: models, texts, folders, one common share."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from launcher.checks.finding import Finding
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.plan.plan import LaunchPlan, ProcessPlan, unit_of
from launcher.preflight.probe import Probe, ask_finding, question_probe
from launcher.preflight.survey import Survey

_LEAST_SPACE = 256 << 20
_MOUNT = "mount the share on all hosts (docs/share.md), or name a folder common to all of them"


def distill_probes(plan: LaunchPlan, found: Survey, names: Sequence[str]) -> list[Probe]:
    """Return the probes of a distillation's files on the hosts of `names`."""
    probes: list[Probe] = []
    for name in names:
        connection = found.connections[name]
        here = [process for process in plan.processes if process.host == name]
        reads = {(check, path) for p in here for check, paths in p.reads.items() for path in paths}
        for check, path in sorted(reads):
            probes.append(question_probe(check, name, connection, *_question(check, path)))
        writes = {(check, folder) for p in here for check, folder in p.writes.items()}
        for check, folder in sorted(writes):
            probes.append(_folder_probe(check, folder, name, plan, found))
        if connection.units:
            probes.append(_unit_probe(plan, name, here, connection))
    return probes


def _question(check: str, path: str) -> tuple[str, dict[str, Any]]:
    if check == "model":
        return "model_folder", {"path": path}
    if check == "validation":
        return "data", {"path": path, "remedy": "another file in the job"}
    return "text", {"path": path}


def _folder_probe(check: str, folder: str, name: str, plan: LaunchPlan, found: Survey) -> Probe:
    connection = found.connections[name]
    if check == "output":
        subject = {"path": folder, "run_id": plan.run_id}
        return question_probe(check, name, connection, "output", subject)
    ask = partial(ask_finding, connection, "folder", {"path": folder, "least": _LEAST_SPACE})
    head, there = plan.leader.host, plan.leader.writes.get(check)
    if there is None or found.identities.get(head) in (None, found.identities[name]):
        return Probe(check, name, ask)
    return Probe(
        check, name, partial(_meet, ask, connection, folder, found.connections[head], there, head)
    )


def _meet(
    ask: partial[Finding], own: Connection, folder: str, leader: Connection, there: str, head: str
) -> Finding:
    """Return a host's finding of a folder, or that the leader has a different one of that name.

    A file in the parent folder proves it: the folder itself may not exist yet.
    """
    finding = ask()
    if finding.status == "fail":
        return finding
    mark = f".motley-{secrets.token_hex(8)}"
    path = str(PurePosixPath(folder).parent / mark)
    try:
        own.write(path, b"")
        try:
            seen = leader.exists(str(PurePosixPath(there).parent / mark))
        finally:
            own.remove(path)
    except (LauncherError, OSError) as error:
        return Finding("fail", f"{folder}: cannot be compared with {head}'s: {error}")
    if not seen:
        return Finding("fail", f"{folder} is not {head}'s {there}", _MOUNT)
    return Finding("ok", f"{finding.detail}, the same as on {head}")


def _unit_probe(
    plan: LaunchPlan, name: str, here: Sequence[ProcessPlan], connection: Connection
) -> Probe:
    """Return the probe of what a host's units can see and write; no other check covers it."""
    units = {
        unit_of(plan.run_id, process): {
            "reads": [path for paths in process.reads.values() for path in paths],
            "writes": [process.folder, *process.writes.values()],
        }
        for process in here
    }
    return question_probe("unit", name, connection, "fences", {"units": units})
