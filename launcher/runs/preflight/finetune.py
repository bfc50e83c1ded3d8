"""The checks of a training run by host: model, data, output, units, memory.

Every host that trains needs the model and the data, with the same content as the coordinator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from launcher.plan.plan import unit_of
from launcher.runs.preflight.content import HASH_DEADLINE, Content, compare_content
from launcher.runs.preflight.examination import Asked, Check, Examination
from launcher.runs.preflight.probe import DEADLINE
from trainer.config.run import RunConfig

_LEAST_CHECKPOINT_SPACE = 256 << 20


@dataclass(frozen=True)
class _Input:
    """Files that every host which trains must have."""

    path: str
    question: str
    arguments: dict[str, Any]
    content: str
    """The question for its digests."""
    subject: dict[str, Any]
    deadline: float = DEADLINE
    """Seconds."""


def _model(config: RunConfig) -> _Input:
    model = {"config": config.model_dump(mode="json")}
    return _Input(config.model.path, "model", model, "model_content", model, _patience(config))


def _patience(config: RunConfig) -> float:
    """Return the seconds for an answer about the model: a host converts a GGUF file first."""
    return HASH_DEADLINE if config.model.path.endswith(".gguf") else DEADLINE


def _data(config: RunConfig) -> _Input:
    train, taught = config.data.train, config.distillation is not None
    content = "logits_content" if taught else "file_content"
    asked = {"config": config.model_dump(mode="json")}
    return _Input(train, "training_data", asked, content, {"path": train}, HASH_DEADLINE)


def _validation(config: RunConfig) -> _Input | None:
    place = {"path": config.data.validation}
    remedy = "--set data.validation=FILE, or =null for none"
    asked = {**place, "remedy": remedy, "columns": config.data.columns}
    path = config.data.validation
    return None if path is None else _Input(path, "data", asked, "file_content", place)


def _check(check: str, files_of: Callable[[RunConfig], _Input | None]) -> Check:
    """Return the check of an input: whether it is there, and equals the coordinator's."""

    def probe(cluster: Examination, name: str) -> Asked:
        files, head = files_of(cluster.config), cluster.head
        if files is None:
            return
        ask, deadline = cluster.ask(name, files.question, files.arguments, files.deadline)
        if _is_compared(cluster, name, files.path):
            own, reference = (_content(cluster, each, files) for each in (name, head))
            yield partial(compare_content, ask, own, reference, head), HASH_DEADLINE + deadline
        else:
            yield ask, deadline

    return Check(check, "training", probe)


INPUTS = (_check("model", _model), _check("data", _data), _check("validation", _validation))


def _is_compared(cluster: Examination, name: str, path: str) -> bool:
    """Whether a host and the coordinator's have different files at a path."""
    head = cluster.head
    if head not in cluster.asked("training") or cluster.same_machine(name, head):
        return False
    share = cluster.plan.host(name).share_folder
    shared = share is not None and share == cluster.plan.host(head).share_folder
    return not (shared and PurePosixPath(path).is_relative_to(str(share)))


def _content(cluster: Examination, name: str, files: _Input) -> Content:
    subject = {**files.subject, "state_folder": cluster.state_folder(name)}
    new = Content(cluster.connection(name), files.content, subject)
    return cluster.contents.setdefault((name, files.content, files.path), new)


def output(cluster: Examination, name: str) -> Asked:
    """Only the coordinator writes the output."""
    if name == cluster.head:
        config = cluster.config
        checkpoints = config.checkpoint.folder or str(PurePosixPath(config.output) / "checkpoints")
        asked = {"path": config.output, "run_id": cluster.plan.run_id, "checkpoints": checkpoints}
        yield cluster.ask(name, "output", asked)


def checkpoints(cluster: Examination, name: str) -> Asked:
    """Checkpoints are in the output folder unless they have their own."""
    folder = cluster.config.checkpoint.folder
    if name == cluster.head and folder is not None:
        yield cluster.ask(name, "folder", {"path": folder, "least": _LEAST_CHECKPOINT_SPACE})


def units(cluster: Examination, name: str) -> Asked:
    """What a host's units can see and write, which no other check covers."""
    if not cluster.connection(name).units:
        return
    config = cluster.config
    inputs = [config.model.path, config.data.train, config.data.validation]
    reads = [path for path in inputs if path is not None and PurePosixPath(path).is_absolute()]
    asked: dict[str, dict[str, list[str]]] = {}
    for process in cluster.processes(name):
        writes = [cluster.state_folder(name)]
        if process is cluster.plan.leader:
            writes += filter(None, [config.output, config.checkpoint.folder])
        asked[unit_of(cluster.plan.run_id, process)] = {"reads": reads, "writes": writes}
    yield cluster.ask(name, "fences", {"units": asked})


def memory(cluster: Examination, name: str) -> Asked:
    """Names of one machine share its memory, so only the first is asked."""
    twins = [other for other in cluster.names if cluster.same_machine(name, other)]
    if name == twins[0]:
        plan, config = json.loads(cluster.plan.to_json()), cluster.config.model_dump(mode="json")
        asked = {"plan": plan, "config": config, "hosts": twins}
        yield cluster.ask(name, "memory", asked, _patience(cluster.config))
