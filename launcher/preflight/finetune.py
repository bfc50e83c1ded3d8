"""The questions to the hosts about the run itself: model, data, output, units, memory.

Every host that trains needs the model and the data, with the same content as the coordinator's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from launcher.checks.digests import difference
from launcher.checks.finding import Finding
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.hosts.received import receive
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, unit_of
from launcher.preflight.probe import DEADLINE, Probe, ask_finding, question_probe
from launcher.preflight.survey import Survey
from trainer.config.run import RunConfig

HASH_DEADLINE = 900.0
"""Seconds: the first time gigabytes are read from a disk; later the digests are cached."""

_LEAST_CHECKPOINT_SPACE = 256 << 20
_PUSH = "copy it there: launch sync inputs"


class Content:
    """A host's digests of some files: queried once, at first use."""

    def __init__(self, connection: Connection, question: str, arguments: Mapping[str, Any]) -> None:
        self._ask = partial(connection.ask, question, arguments, HASH_DEADLINE)
        self._asked = threading.Lock()
        self._digests: dict[str, str] | None = None

    def get(self) -> dict[str, str]:
        """Return the digests by file name; empty when the host does not have the files."""
        with self._asked:
            if self._digests is None:
                self._digests = receive(dict[str, str], self._ask(), "digests")
            return self._digests


@dataclass(frozen=True)
class _Input:
    """Files that every host which trains must have."""

    check: str
    path: str
    question: str
    arguments: dict[str, Any]
    content: str
    """The question for its digests."""
    subject: dict[str, Any]


def job_probes(
    plan: LaunchPlan, config: RunConfig, found: Survey, names: Sequence[str]
) -> list[Probe]:
    """Return the probes of a run's files and memory on the hosts of `names`."""
    settings = config.model_dump(mode="json")
    head = plan.leader.host
    probes = _output_probes(plan, config, found.connections[head]) if head in names else []
    for wanted in _inputs(config, settings):
        probes += _input_probes(wanted, plan, found, names)
    probes += [
        _unit_probe(plan, config, found, name) for name in names if found.connections[name].units
    ]
    tree = json.loads(plan.to_json())
    for name in names:
        twins = [n for n in names if found.identities[n] == found.identities[name]]
        if name == twins[0]:  # names of one machine share its memory
            arguments = {"plan": tree, "config": settings, "hosts": twins}
            connection = found.connections[name]
            probes.append(question_probe("memory", name, connection, "memory", arguments))
    return probes


def compare_content(
    ask: Callable[[], Finding], own: Content, reference: Content, head: str
) -> Finding:
    """Return a host's finding, or how its files differ from the coordinator's."""
    finding = ask()
    if finding.status == "fail":
        return finding
    try:
        mine, theirs = own.get(), reference.get()
    except (LauncherError, OSError, ValueError) as error:
        return Finding("fail", f"{finding.detail}: cannot be compared with {head}'s: {error}")
    if not mine or not theirs:  # the trainer downloads it, or the coordinator's check fails
        return finding
    if different := difference(mine, theirs):
        return Finding("fail", f"{finding.detail}: {different} than {head}", _PUSH)
    return replace(finding, detail=f"{finding.detail}, the same as on {head}")


def _inputs(config: RunConfig, settings: dict[str, Any]) -> list[_Input]:
    model = {"config": settings}
    wanted = [_Input("model", config.model.path, "model", model, "model_content", model)]
    train, validation = config.data.train, config.data.validation
    taught = config.distillation is not None
    content = "logits_content" if taught else "file_content"
    asked = {"path": train, "taught": taught}
    wanted.append(_Input("data", train, "training_data", asked, content, {"path": train}))
    if validation is not None:
        place = {"path": validation}
        asked = {**place, "remedy": "--set data.validation=FILE, or =null for none"}
        wanted.append(_Input("validation", validation, "data", asked, "file_content", place))
    return wanted


def _input_probes(
    wanted: _Input, plan: LaunchPlan, found: Survey, names: Sequence[str]
) -> list[Probe]:
    head = plan.leader.host
    contents = {
        name: Content(
            found.connections[name],
            wanted.content,
            {**wanted.subject, "state_folder": state_folder(plan, name)},
        )
        for name in names
    }
    probes: list[Probe] = []
    for name in names:
        ask = partial(ask_finding, found.connections[name], wanted.question, wanted.arguments)
        same_files = found.identities[name] == found.identities.get(head) or (
            _is_shared(wanted.path, plan.host(name), plan.host(head))
        )
        if head not in names or same_files:
            probes.append(Probe(wanted.check, name, ask))
            continue
        compare = partial(compare_content, ask, contents[name], contents[head], head)
        probes.append(Probe(wanted.check, name, compare, HASH_DEADLINE + DEADLINE))
    return probes


def _output_probes(plan: LaunchPlan, config: RunConfig, connection: Connection) -> list[Probe]:
    head = plan.leader.host
    output = {"path": config.output, "run_id": plan.run_id}
    probes = [question_probe("output", head, connection, "output", output)]
    if config.checkpoint.folder is not None:
        place = {"path": config.checkpoint.folder, "least": _LEAST_CHECKPOINT_SPACE}
        probes.append(question_probe("checkpoints", head, connection, "folder", place))
    return probes


def _unit_probe(plan: LaunchPlan, config: RunConfig, found: Survey, name: str) -> Probe:
    """Return the probe of what a host's units can see and write; no other check covers it."""
    inputs = [config.model.path, config.data.train, config.data.validation]
    reads = [path for path in inputs if path is not None and PurePosixPath(path).is_absolute()]
    units: dict[str, dict[str, list[str]]] = {}
    for process in plan.processes:
        if process.host == name:
            writes = [state_folder(plan, name)]
            if process is plan.leader:
                writes += filter(None, [config.output, config.checkpoint.folder])
            units[unit_of(plan.run_id, process)] = {"reads": reads, "writes": writes}
    return question_probe("unit", name, found.connections[name], "fences", {"units": units})


def state_folder(plan: LaunchPlan, host: str) -> str:
    """Return where a host of a plan keeps its runs."""
    folder = next(process.folder for process in plan.processes if process.host == host)
    return str(PurePosixPath(folder).parents[3])


def _is_shared(path: str, host: Host, head: Host) -> bool:
    """Whether both hosts have a path on the share: then it is one file."""
    both = host.share_folder is not None and host.share_folder == head.share_folder
    return both and PurePosixPath(path).is_relative_to(str(host.share_folder))
