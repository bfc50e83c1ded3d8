"""The plan of `launch plan --distill`: the hosts that teach and learn, and measured speeds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.checks import job
from launcher.errors import ConfigError, InvalidAnswerError
from launcher.hosts.survey import Survey
from launcher.inventory.hosts import load_inventory
from launcher.plan.distillation import CPU, student_device, student_host, teacher_hosts
from launcher.plan.placement import share_cores
from launcher.runs.plan_inputs import describe_cluster
from launcher.runs.up import survey_hosts
from launcher.terminal import show_progress
from trainer.planning.cost import Cost
from trainer.planning.devices import ClusterShape
from trainer.planning.distillation import distillation_seconds
from trainer.planning.logits_size import StoredScores, bytes_per_token
from trainer.planning.shapes import ModelShape
from trainer.planning.strategies import Request, StrategyOption
from trainer.planning.strategies import plan_option as plan_strategy
from trainer.planning.strategy import Strategy
from trainer.planning.teachers import (
    Measured,
    TeacherDevice,
    TeacherOption,
    pick_teacher,
    teacher_options,
)


@dataclass(frozen=True, kw_only=True)
class DistillationDevices:
    """The devices of a distillation."""

    teachers: Sequence[TeacherDevice]
    """Devices that each teacher may compute on."""
    student: ClusterShape
    """One device."""
    found: Survey | None = None
    """The hosts; None if they were only described."""
    remarks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class DistillationRequest:
    """A distillation to plan."""

    shape: ModelShape
    """The teacher's."""
    student: ModelShape | None
    tokens: float
    length: int
    """Tokens of a window."""
    kept: StoredScores
    devices: DistillationDevices
    given: float | None = None
    """Tokens a second of a teacher."""
    measured: Sequence[Measured] = ()


@dataclass(frozen=True, kw_only=True)
class DistillationPlan:
    """How a distillation would go."""

    options: Sequence[TeacherOption]
    pick: TeacherOption | None
    bytes_per_token: float
    bytes_measured: bool
    learning: StrategyOption | None
    """The student's part; None: no student is named."""

    def total_seconds(self, tokens: float) -> float | None:
        """Return the time of the whole, of a student that reads each window once; None: unknown."""
        scoring = None if self.pick is None else self.pick.scoring_seconds(tokens)
        if self.learning is None:
            return scoring
        learning = self.learning_cost
        if scoring is None or learning is None:
            return None
        return distillation_seconds(scoring, learning.seconds, 1.0)

    @property
    def student_fits(self) -> bool:
        """Whether its device holds the student, if one is named."""
        return self.learning is None or self.learning.fits

    @property
    def learning_cost(self) -> Cost | None:
        """The student's; None if it does not fit, or its speed is unknown."""
        learning = self.learning
        return learning.cost if learning is not None and learning.fits else None


def read_described_devices(cluster: ClusterShape) -> DistillationDevices:
    """Return a cluster that was described: the student has the device with the highest speed.

    The teachers have the others, or that one too if no other of CUDA or a processor is there.
    Students do not compute on Vulkan.
    """
    each = [group for group in cluster.groups for _ in range(group.count)]
    able = [pool for pool in each if pool.device.backend != "wgpu"]
    if not able:
        raise ConfigError(
            "--cluster: a distillation needs a student that can compute on CUDA or a processor;"
            f" there is only {each[0].device.name}"
        )
    best = max(able, key=lambda pool: (pool.device.flops or 0, pool.device.memory))
    others = list(each)
    others.remove(best)
    # A Vulkan device does not compute every teacher.
    beside = able if all(pool.device.backend == "wgpu" for pool in others) else []
    candidates = [
        TeacherDevice(pool.device.backend, pool.device, pool) for pool in (*others, *beside)
    ]
    return DistillationDevices(
        teachers=candidates,
        student=ClusterShape(groups=(replace(best, hosts=1, devices=1),), between=None),
        remarks=cluster.remarks,
    )


def survey_devices(inventory: Path | None) -> DistillationDevices:
    """Return the hosts of an inventory, which are asked, in the roles of `launch distill up`.

    Teachers may compute on the processor of their host, or on its GPUs.

    Raises:
        ConfigError: the inventory cannot be used.
        UnreachableError: a host does not answer.
    """
    with show_progress("querying the hosts"):
        found = survey_hosts(load_inventory(inventory))
    host = student_host(found.hosts)
    taken = student_device(host)
    candidates, remarks = list[TeacherDevice](), list[str]()
    for teacher in teacher_hosts(found.hosts, host):
        # Beside the student on this host, as it is started.
        beside = [replace(taken, threads=None)] if teacher is host else []
        *_, cpu = share_cores(teacher, [*beside, CPU])
        cards = [card for card in teacher.devices or () if card.is_gpu]
        for device in (cpu, *(card for card in cards if teacher is not host or card != taken)):
            alone = describe_cluster([replace(teacher, devices=(device,))], None)
            (pool,) = alone.groups
            candidates.append(TeacherDevice(device.backend, pool.device, pool))
            remarks += alone.remarks
    student = describe_cluster([replace(host, devices=(taken,))], None)
    notes = tuple(dict.fromkeys((*remarks, *student.remarks)))
    return DistillationDevices(teachers=candidates, student=student, found=found, remarks=notes)


def read_rates(texts: Sequence[str], found: Survey | None) -> tuple[float | None, list[Measured]]:
    """Return a rate that is given as a number, and what folders of logits have measured.

    A folder is read on this machine, else on the first host that has it.

    Raises:
        ConfigError: it is neither, or no teacher has measured its rate there.
        UnreachableError: a host does not answer.
    """
    given, measured = None, list[Measured]()
    for text in texts:
        try:
            number = float(text)
        except ValueError:
            measured += _measured_speeds(Path(text), found)
            continue
        if not 0 < number < math.inf:
            raise ConfigError(f"--rate {text}: give tokens a second, or a folder of logits")
        if given is not None:
            raise ConfigError(f"--rate {text}: give one number; further values are folders")
        given = number
    return given, measured


def _measured_speeds(folder: Path, found: Survey | None) -> list[Measured]:
    answer = job.read_measured_speeds(folder)
    hosts = () if found is None or not folder.is_absolute() else found.connections.values()
    for connection in hosts:
        if answer:
            break
        with contextlib.suppress(InvalidAnswerError):
            answer = connection.ask(job.read_measured_speeds, folder)
    if not answer:
        raise ConfigError(
            f"--rate {folder}: no folder of logits in which a teacher has measured its rate; let"
            " `trainer distill teacher` score for a minute into one"
        )
    return answer


def plan_distillation(request: DistillationRequest) -> DistillationPlan:
    """Return the teacher's options, the student's part, and the bytes in the shared folder.

    Raises:
        ConfigError: the rates were measured of a teacher with another vocabulary.
    """
    for one in request.measured:
        if one.vocab_size != request.shape.vocab:
            raise ConfigError(
                f"--rate: it was measured with a teacher of {one.vocab_size:,} tokens, and"
                f" {request.shape.name} has {request.shape.vocab:,}"
            )
    options = teacher_options(
        request.shape,
        request.devices.teachers,
        request.length,
        given=request.given,
        measured=request.measured,
    )
    pick = pick_teacher(options)
    learned = request.student or request.shape
    kept = (request.kept.scheme, request.kept.top_k if request.kept.scheme == "topk" else None)
    sizes = [
        one.bytes_per_token
        for one in request.measured
        if one.bytes_per_token is not None and one.kept == kept
    ]
    learning = None
    if request.student is not None:
        asked = Request(
            shape=request.student,
            cluster=request.devices.student,
            method="full",
            length=request.length,
            tokens=request.tokens,
        )
        learning = plan_strategy(asked, Strategy(), "full")
    return DistillationPlan(
        options=options,
        pick=pick,
        bytes_per_token=sizes[0] if sizes else bytes_per_token(request.kept, learned.vocab),
        bytes_measured=bool(sizes),
        learning=learning,
    )
