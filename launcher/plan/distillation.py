"""Which process of a distillation runs where: Hosts + job -> LaunchPlan. Pure: no remote calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.distill_commands import (
    Assignment,
    Paths,
    build_command,
    list_read_paths,
    list_written_folders,
)
from launcher.plan.placement import build_environment, refuse_unknown_devices, share_cores
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.plan.plan_context import PlanContext
from trainer.config.distill_job import DistillJob

CPU = Device("cpu", "cpu")
"""A host's processor, with its share of the cores."""


def place_distillation(hosts: Sequence[Host], job: DistillJob, setting: PlanContext) -> LaunchPlan:
    """Return the plan of a distillation: the student leads.

    Raises:
        ConfigError: the hosts' roles, devices or folders do not fit together.
    """
    refuse_unknown_devices(hosts)
    assignments = _assign_processes(hosts, job)
    where = Paths(job, setting, assignments)
    processes = [
        ProcessPlan(
            name=assignment.name,
            role=assignment.role,
            host=assignment.host.name,
            device=assignment.device.id,
            backend=assignment.device.backend,
            threads=assignment.device.threads,
            argv=(
                *setting.get_trainer_command(assignment.host),
                *build_command(assignment, assignments, job, where),
            ),
            env=build_environment(
                assignment.device.threads, may_fall_back=assignment.host.auto_devices
            ),
            folder=setting.process_folder(assignment.host, assignment.name),
            report_file=where.heartbeat_file(assignment),
            required_paths=list_read_paths(assignment, job, where),
            writable_folders=list_written_folders(assignment, where),
        )
        for assignment in assignments
    ]
    used = {assignment.host.name for assignment in assignments}
    return LaunchPlan(
        run_id=setting.run_id,
        output=where.output,
        hosts=tuple(host for host in hosts if host.name in used),
        processes=tuple(processes),
    )


def _assign_processes(hosts: Sequence[Host], job: DistillJob) -> list[Assignment]:
    """Return the assignment of each process, the student first."""
    student = student_host(hosts)
    teachers = teacher_hosts(hosts, student)
    assignments = [Assignment("student", "student", student, student_device(student))]
    kind = job.teacher.backend
    for number in range(job.teacher.processes or len(teachers)):
        able = teachers if job.teacher.processes else [teachers[number]]
        host, device = _least_used(able, kind, "teacher", assignments)
        assignments.append(Assignment(f"teacher-{number}", "teacher", host, device))
    if job.evaluation is not None:
        host = _find_only_host(hosts, "evaluator") or teachers[0]
        for number in range(job.evaluation.processes):
            _, device = _least_used([host], job.evaluation.backend, "evaluator", assignments)
            if device == CPU and host.cores is not None:
                # They wait most of the time, so teachers on the same host keep most of the cores.
                device = replace(CPU, threads=max(1, host.cores // 4 // job.evaluation.processes))
            assignments.append(Assignment(f"evaluator-{number}", "evaluator", host, device))
    return [_with_threads(assignment, assignments) for assignment in assignments]


def _with_threads(assignment: Assignment, assignments: Sequence[Assignment]) -> Assignment:
    """Return an assignment with its part of the host's cores."""
    beside = [other for other in assignments if other.host.name == assignment.host.name]
    devices = share_cores(assignment.host, [other.device for other in beside])
    return replace(assignment, device=devices[beside.index(assignment)])


def student_host(hosts: Sequence[Host]) -> Host:
    """Return the host with that role, else the one with the best device: CUDA, by its memory.

    Without CUDA the one with the most cores; one that trains nothing only if all of them do.
    """

    def rank_host(host: Host) -> tuple[int, bool, int]:
        cards = [device.memory or 1 for device in host.devices or () if device.backend == "cuda"]
        trains = host.devices != () or host.fill_with_cpu
        return max(cards, default=0), trains, 0 if cards else host.cores or 0

    return _find_only_host(hosts, "student") or max(hosts, key=rank_host)


def teacher_hosts(hosts: Sequence[Host], student: Host) -> list[Host]:
    """Return the hosts with that role, else the one with the most memory, preferably another."""
    chosen = [host for host in hosts if host.teacher]
    others = [host for host in hosts if host is not student] or [student]
    return chosen or [max(others, key=lambda host: host.memory or 0)]


def _find_only_host(hosts: Sequence[Host], role: str) -> Host | None:
    chosen = [host for host in hosts if getattr(host, role)]
    if len(chosen) > 1:
        names = ", ".join(host.name for host in chosen)
        raise ConfigError(f"motley_{role} is true on {names}; choose one host")
    return chosen[0] if chosen else None


def student_device(host: Host) -> Device:
    """Return the device for a student: the card with the most memory, else the CPU."""
    cards = [device for device in host.devices or () if device.backend == "cuda"]
    listed = [device for device in host.devices or () if not device.is_gpu]
    return max(cards, key=lambda card: card.memory or 0) if cards else (*listed, CPU)[0]


def _least_used(
    hosts: Sequence[Host], backend: str, role: str, assignments: Sequence[Assignment]
) -> tuple[Host, Device]:
    """Return the device of a backend with the fewest processes, on the host with the fewest of a
    role; of equal ones that with the most cores, or the card with the most memory.

    Raises:
        ConfigError: no host has such a device.
    """
    places = [(host, device) for host in hosts for device in _list_devices(host, backend)]
    if not places:
        raise ConfigError(
            f"host {hosts[0].name}: the job asks for {backend}, and it has no such device"
        )

    def measure_load(place: tuple[Host, Device]) -> tuple[int, int, int]:
        host, device = place
        beside = [assignment for assignment in assignments if assignment.host is host]
        used = sum(
            (assignment.device.backend, assignment.device.id) == (backend, device.id)
            for assignment in beside
        )
        best = host.cores if device == CPU else device.memory
        return used, sum(assignment.role == role for assignment in beside), -(best or 0)

    return min(places, key=measure_load)


def _list_devices(host: Host, backend: str) -> list[Device]:
    if backend == "cpu":
        return [CPU]
    return [device for device in host.devices or () if device.backend == backend]
