"""The checks of a distillation by host: models, texts, folders, one that all share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from launcher.agent.checks import job
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host import check_folder
from launcher.agent.checks.unit_sandbox import check_sandboxes
from launcher.agent.operation import CHECK_DEADLINE, Operation
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.plan.distill_commands import path_below
from launcher.plan.plan import unit_name
from launcher.runs.preflight.check import CheckContext, Question, host_question
from launcher.runs.preflight.content import AGAIN
from trainer.config.run import DATA_ON_HUB

Probe = Callable[[CheckContext, str], Iterator[Question]]

_LEAST_SPACE = 256 << 20
_ANOTHER = "another file in the job"
_MOUNT = "mount the shared folder on all hosts (docs/share.md), or name one common to all of them"


def files_probe(check: str, question: Operation[[Path], Finding]) -> Probe:
    """Return the probe of the hosts whose processes read files that a check is for."""

    def probe(cluster: CheckContext, name: str) -> Iterator[Question]:
        paths = {
            path
            for each in cluster.list_processes(name)
            for path in each.required_paths.get(check, ())
        }
        yield from (host_question(question, Path(path)) for path in sorted(paths))

    return probe


def held_out(cluster: CheckContext, name: str) -> Iterator[Question]:
    """The samples that a student or an evaluator reads, with their names of keys."""
    distillation, found = cluster.distillation, dict[str, Mapping[str, str]]()
    for process in cluster.list_processes(name):
        columns = distillation.student.columns
        if (evaluation := distillation.evaluation) is not None and process.role == "evaluator":
            columns = evaluation.columns
            if evaluation.problems is not None:  # which have keys of their own
                found[path_below(process.state_folder, evaluation.problems)] = {}
        for path in process.required_paths.get("validation", ()):
            found.setdefault(path, columns)
    for path in sorted(found):
        yield host_question(job.check_data, Path(path), _ANOTHER, dict(found[path]))


def folders_probe(check: str) -> Probe:
    """Return the probe of the hosts whose processes write to a folder that a check is for."""

    def probe(cluster: CheckContext, name: str) -> Iterator[Question]:
        for folder in sorted(
            {p.writable_folders.get(check, "") for p in cluster.list_processes(name)} - {""}
        ):
            yield partial(_find_common, cluster, name, folder, check), CHECK_DEADLINE

    return probe


def probe_output(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Only the student writes to the output."""
    for process in cluster.list_processes(name):
        if "output" in process.writable_folders:
            output = Path(process.writable_folders["output"])
            yield host_question(job.check_output, output, cluster.plan.run_id)


def _find_common(
    cluster: CheckContext, name: str, folder: str, check: str, own: Connection
) -> Finding:
    """Return whether a folder can be written to, and is the leader's of that name."""
    finding = own.ask(check_folder, folder, _LEAST_SPACE)
    there = cluster.plan.leader.writable_folders.get(check)
    far = cluster.leader_host in cluster.hosts_to_ask("distillation") and not cluster.same_machine(
        name, cluster.leader_host
    )
    if finding.status == "fail" or there is None or not far:
        return finding
    return _compare_with_leader(cluster, own, folder, there, finding)


def _compare_with_leader(
    cluster: CheckContext, own: Connection, folder: str, there: str, finding: Finding
) -> Finding:
    """Return a host's finding of a folder, or that the leader has a different one of that name.

    A file in the parent folder proves it: the folder itself may not exist yet.
    """
    head = cluster.leader_host
    mark = f".motley-{secrets.token_hex(8)}"
    path = str(PurePosixPath(folder).parent / mark)
    try:
        own.write(path, b"")
        try:
            seen = cluster.find_connection(head).exists(str(PurePosixPath(there).parent / mark))
        finally:
            own.remove_file(path)
    except (LauncherError, OSError) as error:
        return Finding("fail", f"{folder}: cannot be compared with {head}'s: {error}", AGAIN)
    if not seen:
        return Finding("fail", f"{folder} is not {head}'s {there}", _MOUNT)
    return Finding("ok", f"{finding.detail}, the same as on {head}")


def probe_units(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Check what a host's units can see and write, which no other check covers."""
    if cluster.find_connection(name).units:
        asked = {
            unit_name(cluster.plan.run_id, process): {
                "reads": [
                    path
                    for paths in process.required_paths.values()
                    for path in paths
                    if not path.startswith(DATA_ON_HUB)
                ],
                "writes": [process.folder, *process.writable_folders.values()],
            }
            for process in cluster.list_processes(name)
        }
        yield host_question(check_sandboxes, asked)
