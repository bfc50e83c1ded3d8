"""The checks of a distillation by host: models, texts, folders, one that all share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from launcher.agent.checks import job
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host import check_folder
from launcher.agent.checks.unit_sandbox import check_fences
from launcher.agent.operation import CHECK_DEADLINE, Operation
from launcher.errors import LauncherError
from launcher.plan.distill_commands import below
from launcher.plan.plan import unit_of
from launcher.runs.preflight.examination import Asked, Examination
from trainer.config.run import DATA_ON_HUB

_LEAST_SPACE = 256 << 20
_ANOTHER = "another file in the job"
_MOUNT = "mount the shared folder on all hosts (docs/share.md), or name one common to all of them"


def files(check: str, question: Operation[[Path], Finding]) -> Callable[[Examination, str], Asked]:
    """Return the probe of the hosts whose processes read files that a check is for."""

    def probe(cluster: Examination, name: str) -> Asked:
        paths = {path for each in cluster.processes(name) for path in each.reads.get(check, ())}
        yield from (cluster.ask(name, question, Path(path)) for path in sorted(paths))

    return probe


def held_out(cluster: Examination, name: str) -> Asked:
    """The samples that a student or an evaluator reads, with their names of keys."""
    distillation, found = cluster.distillation, dict[str, Mapping[str, str]]()
    for process in cluster.processes(name):
        columns = distillation.student.columns
        if (evaluation := distillation.evaluation) is not None and process.role == "evaluator":
            columns = evaluation.columns
            if evaluation.problems is not None:  # which have keys of their own
                found[below(process.state_folder, evaluation.problems)] = {}
        for path in process.reads.get("validation", ()):
            found.setdefault(path, columns)
    for path in sorted(found):
        yield cluster.ask(name, job.check_data, Path(path), _ANOTHER, dict(found[path]))


def folders(check: str) -> Callable[[Examination, str], Asked]:
    """Return the probe of the hosts whose processes write to a folder that a check is for."""

    def probe(cluster: Examination, name: str) -> Asked:
        for folder in sorted({p.writes.get(check, "") for p in cluster.processes(name)} - {""}):
            yield partial(_find_common, cluster, name, folder, check), CHECK_DEADLINE

    return probe


def output(cluster: Examination, name: str) -> Asked:
    """Only the student writes to the output."""
    for process in cluster.processes(name):
        if "output" in process.writes:
            output = Path(process.writes["output"])
            yield cluster.ask(name, job.check_output, output, cluster.plan.run_id)


def _find_common(cluster: Examination, name: str, folder: str, check: str) -> Finding:
    """Return whether a folder can be written to, and is the leader's of that name."""
    finding = cluster.connection(name).ask(check_folder, folder, _LEAST_SPACE)
    there = cluster.plan.leader.writes.get(check)
    far = cluster.head in cluster.asked("distillation") and not cluster.same_machine(
        name, cluster.head
    )
    if finding.status == "fail" or there is None or not far:
        return finding
    return _meet(cluster, name, folder, there, finding)


def _meet(cluster: Examination, name: str, folder: str, there: str, finding: Finding) -> Finding:
    """Return a host's finding of a folder, or that the leader has a different one of that name.

    A file in the parent folder proves it: the folder itself may not exist yet.
    """
    own, head = cluster.connection(name), cluster.head
    mark = f".motley-{secrets.token_hex(8)}"
    path = str(PurePosixPath(folder).parent / mark)
    try:
        own.write(path, b"")
        try:
            seen = cluster.connection(head).exists(str(PurePosixPath(there).parent / mark))
        finally:
            own.remove(path)
    except (LauncherError, OSError) as error:
        return Finding("fail", f"{folder}: cannot be compared with {head}'s: {error}")
    if not seen:
        return Finding("fail", f"{folder} is not {head}'s {there}", _MOUNT)
    return Finding("ok", f"{finding.detail}, the same as on {head}")


def units(cluster: Examination, name: str) -> Asked:
    """What a host's units can see and write, which no other check covers."""
    if cluster.connection(name).units:
        asked = {
            unit_of(cluster.plan.run_id, process): {
                "reads": [
                    path
                    for paths in process.reads.values()
                    for path in paths
                    if not path.startswith(DATA_ON_HUB)
                ],
                "writes": [process.folder, *process.writes.values()],
            }
            for process in cluster.processes(name)
        }
        yield cluster.ask(name, check_fences, asked)
