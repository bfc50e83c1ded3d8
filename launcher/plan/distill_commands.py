"""The command lines of a distillation, and the paths of its files on each host.

The processes share only files: teachers write a folder of logits, the student reads it and
writes checkpoints, the evaluator reads these. What lies on the share has its own path on each host;
everything else is resolved on the host that needs it: relative paths start at its state folder, to
which `launch sync inputs` copies inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.plan import Role
from launcher.plan.plan_context import PlanContext
from trainer.config.distill_job import DistillJob, TeacherJob, is_shape_file
from trainer.config.run import DATA_ON_HUB


@dataclass(frozen=True)
class Assignment:
    """Which process computes on which device."""

    name: str
    role: Role
    host: Host
    device: Device


def path_below(folder: str, path: str) -> str:
    """Return a job's path on a host with this state folder; a data set of the hub stays."""
    return path if path.startswith(DATA_ON_HUB) else str(PurePosixPath(folder) / path)


class Paths:
    """The paths of a distillation on each host."""

    def __init__(
        self, job: DistillJob, setting: PlanContext, assignments: Sequence[Assignment]
    ) -> None:
        self._job, self._setting = job, setting
        self.run_id = setting.run_id
        self._student = assignments[0].host
        self.output = self.local_path(self._student, job.student.output)
        self._apart = (
            len({setting.get_machine_id(assignment.host) for assignment in assignments}) > 1
        )

    def local_path(self, host: Host, path: str) -> str:
        """Return a path of a host's own disk, or a data set of the hub as it is."""
        return path_below(self._setting.get_state_folder(host), path)

    def logits_folder(self, host: Host) -> str:
        """Return the folder between teachers and student."""
        return self._shared_folder(host, "logits", self._job.logits)

    def checkpoints_folder(self, host: Host) -> str | None:
        """Return where a host finds the student's checkpoints; None: in the student's output."""
        named = self._job.student.checkpoint.folder
        if named is None and not self._apart and host.share_folder is None:
            return None
        return self._shared_folder(host, "checkpoints", named or self.run_id)

    def watched_folder(self, host: Host) -> str:
        """Return the folder with the checkpoints and the marker of the run's end."""
        return self.checkpoints_folder(host) or self.output

    def heartbeat_file(self, assignment: Assignment) -> str:
        """Return the file in which a process reports its state."""
        if assignment.role != "teacher":
            return ""
        return str(
            PurePosixPath(self.logits_folder(assignment.host))
            / "teachers"
            / f"{assignment.name}.json"
        )

    def _shared_folder(self, host: Host, part: str, name: str) -> str:
        if PurePosixPath(name).is_absolute():
            return name
        if host.share_folder is not None:
            return str(PurePosixPath(host.share_folder) / part / name)
        if self._apart:
            raise ConfigError(
                f"host {host.name}: teacher and student are on several machines, so all of them "
                "need motley_share_folder (docs/share.md)"
            )
        return self.local_path(host, f"{part}/{name}")


def build_command(
    assignment: Assignment, assignments: Sequence[Assignment], job: DistillJob, where: Paths
) -> tuple[str, ...]:
    """Return the trainer's command line of a process."""
    match assignment.role:
        case "student":
            words = _student_words(assignment, job, where)
        case "teacher":
            words = _teacher_words(
                assignment, sum(s.role == "teacher" for s in assignments), job, where
            )
        case _:
            words = _evaluator_words(assignment, job, where)
    threads = (
        () if assignment.device.threads is None else ("--threads", str(assignment.device.threads))
    )
    return (*words, *threads)


def _student_words(assignment: Assignment, job: DistillJob, where: Paths) -> tuple[str, ...]:
    student, host = job.student, assignment.host
    settings = student.collect_settings()
    if (folder := where.checkpoints_folder(host)) is not None:
        settings["checkpoint.folder"] = folder
    if student.validation is not None:
        settings["data.validation"] = where.local_path(host, student.validation)
        settings |= {"data.columns": student.columns} if student.columns else {}
    if (own := student.distillation.on_policy) is not None:
        settings["distillation.on_policy.prompts"] = where.local_path(host, own.prompts)
    if job.budget is not None:
        settings["budget"] = job.budget.model_dump(mode="json", exclude_none=True)
    return (
        *("distill", "student", "--teacher-logits", where.logits_folder(host)),
        *_model_words(job, host, where),
        *("--output", where.output, "--run-id", where.run_id),
        *(
            word
            for key, value in settings.items()
            for word in ("--set", _format_setting(key, value))
        ),
        *_format_flags(
            {
                "max_seq_len": student.max_seq_len or job.teacher.max_seq_len,
                "teacher_timeout": student.teacher_timeout,
            }
        ),
        *(("--compile",) if student.compile else ()),
        *(("--await-scores",) if job.budget is not None and job.evaluation is not None else ()),
        *_device_words(assignment.device),
    )


def _model_words(job: DistillJob, host: Host, where: Paths) -> tuple[str, ...]:
    student, tokenizer = job.student, job.teacher.tokenizer
    if student.model is not None:
        return ("--student", where.local_path(host, student.model))
    assert student.config is not None
    assert tokenizer is not None
    shape = (
        where.local_path(host, student.config) if is_shape_file(student.config) else student.config
    )
    return ("--student-config", shape, "--tokenizer", where.local_path(host, tokenizer))


def _teacher_words(
    assignment: Assignment, teachers: int, job: DistillJob, where: Paths
) -> tuple[str, ...]:
    teacher, host = job.teacher, assignment.host
    number = int(assignment.name.removeprefix("teacher-")) + 1
    tokenizer = None if teacher.tokenizer is None else where.local_path(host, teacher.tokenizer)
    return (
        *("distill", "teacher", where.local_path(host, teacher.model)),
        *(word for path in teacher.data for word in ("--data", where.local_path(host, path))),
        *_format_columns(teacher.columns),
        *("--out", where.logits_folder(host), *_format_flags({"tokenizer": tokenizer})),
        *("--workers", f"{number}/{teachers}", "--name", assignment.name),
        *("--stay", "--until", str(PurePosixPath(where.watched_folder(host)) / "status.json")),
        *_with_student(job),
        *_format_flags(_scoring_settings(teacher)),
        *_device_words(assignment.device),
    )


def _evaluator_words(assignment: Assignment, job: DistillJob, where: Paths) -> tuple[str, ...]:
    assert job.evaluation is not None
    evaluation, host = job.evaluation, assignment.host
    files = {
        name: None if path is None else where.local_path(host, path)
        for name, path in (("prompts", evaluation.prompts), ("problems", evaluation.problems))
    }
    values = evaluation.model_dump(include={"samples", "max_new_tokens", "temperature", "every"})
    base = _get_adapted_model(job)
    return (
        *("evaluate", "--watch", where.watched_folder(host), "--tasks", ",".join(evaluation.tasks)),
        *(word for path in evaluation.data for word in ("--data", where.local_path(host, path))),
        *_format_columns(evaluation.columns),
        *_format_flags({"base": base and where.local_path(host, base), **files, **values}),
        *(("--run-code",) if evaluation.run_code else ()),
        *("--runner", assignment.name),
        *_with_student(job),
        *_device_words(assignment.device),
    )


def _with_student(job: DistillJob) -> tuple[str, ...]:
    """Return what ends a process with the student: the budget counts no time after that."""
    return () if job.budget is None else ("--with-student",)


def _get_adapted_model(job: DistillJob) -> str | None:
    """Return the model that a student's checkpoints are adapters of; None if they are whole."""
    return job.student.model if job.student.method == "lora" else None


def list_read_paths(
    assignment: Assignment, job: DistillJob, where: Paths
) -> dict[str, tuple[str, ...]]:
    """Return the paths that a process needs on its host, by the check for them."""
    match assignment.role:
        case "student":
            texts = [job.teacher.tokenizer] if job.student.config is not None else []
            own = job.student.distillation.on_policy
            wanted = {
                "model": [job.student.model],
                "data": texts,
                "validation": [job.student.validation, own and own.prompts],
            }
        case "teacher":
            texts = [*job.teacher.data, job.teacher.tokenizer]
            wanted = {"model": [job.teacher.model], "data": texts}
        case _:
            assert job.evaluation is not None
            files = [*job.evaluation.data, job.evaluation.prompts, job.evaluation.problems]
            wanted = {"model": [_get_adapted_model(job)], "validation": files}
    found = {
        check: tuple(where.local_path(assignment.host, path) for path in paths if path is not None)
        for check, paths in wanted.items()
    }
    return {check: paths for check, paths in found.items() if paths}


def list_written_folders(assignment: Assignment, where: Paths) -> dict[str, str]:
    """Return the folders that a process writes to, by the check for them."""
    folders = {
        "output": where.output if assignment.role == "student" else None,
        "logits": None if assignment.role == "evaluator" else where.logits_folder(assignment.host),
        "checkpoints": None
        if assignment.role == "teacher"
        else where.checkpoints_folder(assignment.host),
    }
    return {check: folder for check, folder in folders.items() if folder is not None}


def _scoring_settings(teacher: TeacherJob) -> dict[str, Any]:
    """Return the settings that go to the teacher's flags of the same names."""
    elsewhere = {"model", "data", "columns", "tokenizer", "processes", "backend"}
    return teacher.model_dump(exclude=elsewhere)


def _format_flags(values: dict[str, Any]) -> tuple[str, ...]:
    """Return `--top-k 64` for `top_k: 64`; None leaves the default to the command."""
    return tuple(
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    )


def _format_columns(columns: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(word for pair in columns.items() for word in ("--column", "=".join(pair)))


def _device_words(device: Device) -> tuple[str, ...]:
    gpu = ("--gpu", device.id) if device.is_gpu else ()
    return ("--gpu-backend", device.backend, *gpu)


def _format_setting(key: str, value: object) -> str:
    """Return `KEY=VALUE` with the value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n")
    return f"{key}={text.strip()}"
