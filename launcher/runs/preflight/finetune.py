"""The checks of a training run by host: model, data, output, units, memory.

Every host that trains needs the model and the data, with the same content as the coordinator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from launcher.agent.checks import job
from launcher.agent.checks.digests import HASH_DEADLINE, file_content
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host import check_folder
from launcher.agent.checks.logits_folder import logits_content
from launcher.agent.checks.memory import check_layers, check_memory
from launcher.agent.checks.unit_sandbox import check_sandboxes
from launcher.agent.operation import Operation
from launcher.plan.plan import LaunchPlan, unit_name
from launcher.runs.preflight.check import CheckContext, Question, host_question
from launcher.runs.preflight.content import HostDigests, compare_content
from trainer.config.run import SCRIPT, RunConfig

P = ParamSpec("P")
R = TypeVar("R")

_LEAST_CHECKPOINT_SPACE = 256 << 20


@dataclass(frozen=True)
class _Input:
    """Files that every host which trains must have."""

    path: str
    question: Operation[..., Finding]
    arguments: dict[str, Any]
    content: Operation[..., dict[str, str]]
    """The question for its digests."""
    subject: dict[str, Any]


def _model_files(config: RunConfig) -> _Input:
    subject = {"config": config}
    question = _extend_deadline(job.check_model, config)
    return _Input(config.model.path, question, subject, job.model_content, subject)


def _extend_deadline(question: Operation[P, R], config: RunConfig) -> Operation[P, R]:
    """Return a question about the model with its deadline: a host converts a GGUF file first."""
    return (
        question.with_deadline(HASH_DEADLINE) if config.model.path.endswith(".gguf") else question
    )


def _data_files(config: RunConfig) -> _Input:
    train, taught = config.data.train, config.distillation is not None
    content = logits_content if taught else file_content
    return _Input(train, job.check_training_data, {"config": config}, content, {"path": train})


def _validation_files(config: RunConfig) -> _Input | None:
    place = {"path": config.data.validation}
    remedy = "--set data.validation=FILE, or =null for none"
    asked = {**place, "remedy": remedy, "columns": config.data.columns}
    path = config.data.validation
    return None if path is None else _Input(path, job.check_data, asked, file_content, place)


def _input_probe(
    files_of: Callable[[RunConfig], _Input | None],
) -> Callable[[CheckContext, str], Iterator[Question]]:
    """Return the probe of an input: whether it is there, and equals the coordinator's."""

    def probe(cluster: CheckContext, name: str) -> Iterator[Question]:
        if cluster.config.task == SCRIPT:  # the hosts get it, and workers prove what it makes
            return
        files, head = files_of(cluster.config), cluster.leader_host
        if files is None:
            return
        find, deadline = host_question(files.question, **files.arguments)
        if _is_compared(cluster, name, files.path):
            own, reference = (_host_digests(cluster, each, files) for each in (name, head))
            yield partial(compare_content, find, own, reference, head), HASH_DEADLINE + deadline
        else:
            yield find, deadline

    return probe


model, data, validation = (
    _input_probe(_model_files),
    _input_probe(_data_files),
    _input_probe(_validation_files),
)


def _is_compared(cluster: CheckContext, name: str, path: str) -> bool:
    """Whether a host and the coordinator's have different files at a path."""
    head = cluster.leader_host
    if head not in cluster.hosts_to_ask("training") or cluster.same_machine(name, head):
        return False
    share = cluster.plan.get_host(name).share_folder
    shared = share is not None and share == cluster.plan.get_host(head).share_folder
    return not (shared and PurePosixPath(path).is_relative_to(str(share)))


def _host_digests(cluster: CheckContext, name: str, files: _Input) -> HostDigests:
    subject = {**files.subject, "state_folder": cluster.state_folder(name)}
    new = HostDigests(lambda: cluster.find_connection(name).ask(files.content, **subject))
    return cluster.contents.setdefault((name, files.content.name, files.path), new)


def probe_output(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Only the coordinator writes the output."""
    if name == cluster.leader_host:
        config = cluster.config
        path = Path(config.output)
        checkpoints = Path(config.checkpoint.folder or path / "checkpoints")
        yield host_question(job.check_output, path, cluster.plan.run_id, checkpoints)


def probe_checkpoints(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Checkpoints are in the output folder unless they have their own."""
    folder = cluster.config.checkpoint.folder
    if name == cluster.leader_host and folder is not None:
        yield host_question(check_folder, folder, _LEAST_CHECKPOINT_SPACE)


def probe_units(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Check what a host's units can see and write, which no other check covers."""
    if not cluster.find_connection(name).units:
        return
    config = cluster.config
    inputs = [config.model.path, config.data.train, config.data.validation]
    reads = [path for path in inputs if path is not None and PurePosixPath(path).is_absolute()]
    asked: dict[str, dict[str, list[str]]] = {}
    for process in cluster.list_processes(name):
        writes = [cluster.state_folder(name)]
        if process is cluster.plan.leader:
            writes += filter(None, [config.output, config.checkpoint.folder])
        asked[unit_name(cluster.plan.run_id, process)] = {"reads": reads, "writes": writes}
    yield host_question(check_sandboxes, asked)


def _memory_probe(
    check: Operation[[LaunchPlan, RunConfig, list[str]], Finding],
) -> Callable[[CheckContext, str], Iterator[Question]]:
    """Return a probe of a machine's memory: of its names only the first is asked."""

    def probe(cluster: CheckContext, name: str) -> Iterator[Question]:
        twins = [other for other in cluster.names if cluster.same_machine(name, other)]
        if name == twins[0] and cluster.config.task != SCRIPT:
            question = _extend_deadline(check, cluster.config)
            yield host_question(question, cluster.plan, cluster.config, twins)

    return probe


probe_memory, probe_layers = _memory_probe(check_memory), _memory_probe(check_layers)
