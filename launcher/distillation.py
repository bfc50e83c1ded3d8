"""Which process of a distillation runs where: Hosts + job -> LaunchPlan. Pure: asks no machine.

The processes talk through files alone: teachers write a folder of logits, the student reads it and
writes checkpoints, the evaluator reads these. So they share a machine, or a share; what lies on the
share has its own path on each host. Everything else is looked up on the host that needs it:
relative paths below its state folder, where `launch sync inputs` brings things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from launcher.devices import Device
from launcher.errors import ConfigError
from launcher.inventory import Host
from launcher.placement import (
    REMOTE_STATE,
    Setting,
    environment,
    machine_of,
    process_folder,
    refuse_unknown_devices,
    share_cores,
    trainer_of,
)
from launcher.plan import LaunchPlan, ProcessPlan, Role
from trainer.distill_job import DistillJob, TeacherJob, is_file_name

STUDENT, EVALUATOR = "student", "evaluator"
_CPU = Device("cpu", "cpu")


@dataclass(frozen=True)
class _Seat:
    name: str
    role: Role
    host: Host
    device: Device


def place_distillation(hosts: Sequence[Host], job: DistillJob, setting: Setting) -> LaunchPlan:
    """Return the plan of a distillation: the student leads.

    Raises:
        ConfigError: the hosts' roles, devices or folders do not fit together.
    """
    refuse_unknown_devices(hosts)
    seats = _seats(hosts, job)
    where = _Where(job, setting, seats)
    processes = [
        ProcessPlan(
            name=seat.name,
            role=seat.role,
            host=seat.host.name,
            device=seat.device.id,
            backend=seat.device.backend,
            threads=seat.device.threads,
            argv=(*trainer_of(seat.host, setting), *_arguments(seat, seats, job, where)),
            env=environment(seat.device.threads),
            folder=process_folder(seat.host, setting, seat.name),
            beat=where.beat(seat),
            reads=_reads(seat, job, where),
            writes=_writes(seat, where),
        )
        for seat in seats
    ]
    used = {seat.host.name for seat in seats}
    return LaunchPlan(
        run_id=setting.run_id,
        output=where.output,
        hosts=tuple(host for host in hosts if host.name in used),
        processes=tuple(processes),
    )


class _Where:
    """Where things lie, on each host."""

    def __init__(self, job: DistillJob, setting: Setting, seats: Sequence[_Seat]) -> None:
        self._job, self._setting = job, setting
        self.run_id = setting.run_id
        self._student = seats[0].host
        self.output = self.own(self._student, job.student.output)
        self._apart = len({machine_of(seat.host, setting) for seat in seats}) > 1

    def own(self, host: Host, path: str) -> str:
        """Return a path of a host's own disk."""
        default = self._setting.state_folder if host.is_local else REMOTE_STATE
        return str(PurePosixPath(host.state_folder or default) / path)

    def logits(self, host: Host) -> str:
        """Return the folder between teachers and student."""
        return self._shared(host, "logits", self._job.logits)

    def checkpoints(self, host: Host) -> str | None:
        """Return where a host finds the student's checkpoints; None: in the student's output."""
        named = self._job.student.checkpoint.folder
        if named is None and not self._apart and host.share_folder is None:
            return None
        return self._shared(host, "checkpoints", named or self.run_id)

    def watched(self, host: Host) -> str:
        """Return the folder with the checkpoints, and with the word that the run is over."""
        return self.checkpoints(host) or self.output

    def beat(self, seat: _Seat) -> str:
        """Return the file in which a process says how it is."""
        if seat.role != "teacher":
            return ""
        return str(PurePosixPath(self.logits(seat.host)) / "teachers" / f"{seat.name}.json")

    def _shared(self, host: Host, part: str, name: str) -> str:
        if PurePosixPath(name).is_absolute():
            return name
        if host.share_folder is not None:
            return str(PurePosixPath(host.share_folder) / part / name)
        if self._apart:
            raise ConfigError(
                f"host {host.name}: teacher and student are on several machines, so all of them "
                "need motley_share_folder (docs/share.md)"
            )
        return self.own(host, f"{part}/{name}")


def _seats(hosts: Sequence[Host], job: DistillJob) -> list[_Seat]:
    """Return who sits where, the student first."""
    student = _student_host(hosts)
    teachers = _teacher_hosts(hosts, student)
    seats = [_Seat(STUDENT, "student", student, _best(student))]
    for number in range(job.teacher.processes or len(teachers)):
        host, turn = teachers[number % len(teachers)], number // len(teachers)
        device = _device(host, job.teacher.backend, turn)
        seats.append(_Seat(f"teacher-{number}", "teacher", host, device))
    if job.evaluation is not None:
        host = _only(hosts, "evaluator") or teachers[0]
        device = _device(host, job.evaluation.backend, 0)
        if device == _CPU and host.cores is not None:
            # It waits most of the time, so the teachers beside it keep most of the cores.
            device = replace(_CPU, threads=max(1, host.cores // 4))
        seats.append(_Seat(EVALUATOR, "evaluator", host, device))
    return [_threaded(seat, seats) for seat in seats]


def _threaded(seat: _Seat, seats: Sequence[_Seat]) -> _Seat:
    """Return a seat with its part of the host's cores."""
    beside = [other for other in seats if other.host.name == seat.host.name]
    devices = share_cores(seat.host, [other.device for other in beside])
    return replace(seat, device=devices[beside.index(seat)])


def _student_host(hosts: Sequence[Host]) -> Host:
    """Return the host that says so, else the one with the best device: CUDA, by its memory."""

    def worth(host: Host) -> tuple[int, int]:
        cards = [device.memory or 1 for device in host.devices or () if device.backend == "cuda"]
        return max(cards, default=0), 0 if cards else host.cores or 0

    return _only(hosts, "student") or max(hosts, key=worth)


def _teacher_hosts(hosts: Sequence[Host], student: Host) -> list[Host]:
    """Return the hosts that say so, else the one with the most memory, if possible another one."""
    chosen = [host for host in hosts if host.teacher]
    others = [host for host in hosts if host is not student] or [student]
    return chosen or [max(others, key=lambda host: host.memory or 0)]


def _only(hosts: Sequence[Host], role: str) -> Host | None:
    chosen = [host for host in hosts if getattr(host, role)]
    if len(chosen) > 1:
        names = ", ".join(host.name for host in chosen)
        raise ConfigError(f"motley_{role} is true on {names}; one host must be it")
    return chosen[0] if chosen else None


def _best(host: Host) -> Device:
    """Return what a student trains on: the card with the most memory, else the CPU."""
    cards = [device for device in host.devices or () if device.backend == "cuda"]
    listed = [device for device in host.devices or () if device.backend == "cpu"]
    return max(cards, key=lambda card: card.memory or 0) if cards else (*listed, _CPU)[0]


def _device(host: Host, backend: str, turn: int) -> Device:
    """Return the device of a backend for the process of that turn on a host."""
    if backend == "cpu":
        return _CPU
    found = [device for device in host.devices or () if device.backend == backend]
    if not found:
        raise ConfigError(
            f"host {host.name}: the job asks for {backend}, and it has no such device"
        )
    return found[turn % len(found)]


def _arguments(
    seat: _Seat, seats: Sequence[_Seat], job: DistillJob, where: _Where
) -> tuple[str, ...]:
    """Return the trainer's command line of a process."""
    match seat.role:
        case "student":
            words = _student_words(seat, job, where)
        case "teacher":
            words = _teacher_words(seat, sum(s.role == "teacher" for s in seats), job, where)
        case _:
            words = _evaluator_words(seat, job, where)
    threads = () if seat.device.threads is None else ("--threads", str(seat.device.threads))
    return (*words, *threads)


def _student_words(seat: _Seat, job: DistillJob, where: _Where) -> tuple[str, ...]:
    student, host = job.student, seat.host
    settings = student.settings()
    if (folder := where.checkpoints(host)) is not None:
        settings["checkpoint.folder"] = folder
    if student.validation is not None:
        settings["data.validation"] = where.own(host, student.validation)
    return (
        *("distill", "student", "--teacher-logits", where.logits(host)),
        *_model_words(job, host, where),
        *("--output", where.output, "--run-id", where.run_id),
        *(word for key, value in settings.items() for word in ("--set", _assignment(key, value))),
        *_flags(
            {
                "max_seq_len": student.max_seq_len or job.teacher.max_seq_len,
                "teacher_timeout": student.teacher_timeout,
            }
        ),
        *(("--compile",) if student.compile else ()),
        *_device_words(seat.device),
    )


def _model_words(job: DistillJob, host: Host, where: _Where) -> tuple[str, ...]:
    student, tokenizer = job.student, job.teacher.tokenizer
    if student.model is not None:
        return ("--student", where.own(host, student.model))
    assert student.config is not None
    assert tokenizer is not None
    shape = where.own(host, student.config) if is_file_name(student.config) else student.config
    return ("--student-config", shape, "--tokenizer", where.own(host, tokenizer))


def _teacher_words(seat: _Seat, teachers: int, job: DistillJob, where: _Where) -> tuple[str, ...]:
    teacher, host = job.teacher, seat.host
    number = int(seat.name.removeprefix("teacher-")) + 1
    tokenizer = None if teacher.tokenizer is None else where.own(host, teacher.tokenizer)
    return (
        *("distill", "teacher", where.own(host, teacher.model)),
        *(word for path in teacher.data for word in ("--data", where.own(host, path))),
        *("--out", where.logits(host), *_flags({"tokenizer": tokenizer})),
        *("--workers", f"{number}/{teachers}", "--name", seat.name),
        *("--stay", "--until", str(PurePosixPath(where.watched(host)) / "status.json")),
        *_flags(_scoring(teacher)),
        *_device_words(seat.device),
    )


def _evaluator_words(seat: _Seat, job: DistillJob, where: _Where) -> tuple[str, ...]:
    assert job.evaluation is not None
    evaluation, host = job.evaluation, seat.host
    files = {
        name: None if path is None else where.own(host, path)
        for name, path in (("prompts", evaluation.prompts), ("problems", evaluation.problems))
    }
    values = evaluation.model_dump(include={"samples", "max_new_tokens", "temperature", "every"})
    gpu = () if seat.device.backend == "cpu" else ("--gpu", seat.device.id)
    return (
        *("evaluate", "--watch", where.watched(host), "--tasks", ",".join(evaluation.tasks)),
        *(word for path in evaluation.data for word in ("--data", where.own(host, path))),
        *_flags({**files, **values}),
        *(("--run-code",) if evaluation.run_code else ()),
        *("--runner", EVALUATOR, "--gpu-backend", seat.device.backend, *gpu),
    )


def _reads(seat: _Seat, job: DistillJob, where: _Where) -> dict[str, tuple[str, ...]]:
    """Return what a process needs on its host, by the check that looks at it."""
    match seat.role:
        case "student":
            texts = [job.teacher.tokenizer] if job.student.config is not None else []
            wanted = {
                "model": [job.student.model],
                "data": texts,
                "validation": [job.student.validation],
            }
        case "teacher":
            texts = [*job.teacher.data, job.teacher.tokenizer]
            wanted = {"model": [job.teacher.model], "data": texts}
        case _:
            assert job.evaluation is not None
            files = [*job.evaluation.data, job.evaluation.prompts, job.evaluation.problems]
            wanted = {"validation": files}
    found = {
        check: tuple(where.own(seat.host, path) for path in paths if path is not None)
        for check, paths in wanted.items()
    }
    return {check: paths for check, paths in found.items() if paths}


def _writes(seat: _Seat, where: _Where) -> dict[str, str]:
    """Return the folders that a process writes to, by the check that looks at them."""
    folders = {
        "output": where.output if seat.role == "student" else None,
        "logits": None if seat.role == "evaluator" else where.logits(seat.host),
        "checkpoints": None if seat.role == "teacher" else where.checkpoints(seat.host),
    }
    return {check: folder for check, folder in folders.items() if folder is not None}


def _scoring(teacher: TeacherJob) -> dict[str, Any]:
    """Return the settings that go to the teacher's flags of the same names."""
    elsewhere = {"model", "data", "tokenizer", "processes", "backend"}
    return teacher.model_dump(exclude=elsewhere)


def _flags(values: dict[str, Any]) -> tuple[str, ...]:
    """Return `--top-k 64` for `top_k: 64`; what is None is left to the command."""
    return tuple(
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    )


def _device_words(device: Device) -> tuple[str, ...]:
    gpu = () if device.backend == "cpu" else ("--gpus", device.id)
    return ("--gpu-backend", device.backend, *gpu)


def _assignment(key: str, value: object) -> str:
    """Return `KEY=VALUE` with the value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 16).removesuffix("...\n")
    return f"{key}={text.strip()}"
