"""From a run config to a student at work on its device."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.run import Backend, RunConfig
from trainer.data.order import epoch_order
from trainer.distill.stopping import Stop
from trainer.distill.student.inputs import (
    FreshStudent,
    StudentInputs,
    await_description,
    check_ahead,
    read_inputs,
)
from trainer.errors import InputError, InUseError, NonFiniteError, TrainerError
from trainer.logits.dataset import LogitsFolder
from trainer.logits.stream import Position, ShardStream
from trainer.model.initialization import initial_weights
from trainer.process.announcement import announced
from trainer.storage import lease
from trainer.storage.lease import Lease
from trainer.tracking.run_recorder import RunRecorder
from trainer.tracking.status import StatusFile, first_status, say_last

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.checkpoint.store import Restored
    from trainer.distill.student.loop import Student
    from trainer.distill.student.prefetch import Batch
    from trainer.replica.backend import BackendRequest, Choice, Opener
    from trainer.replica.base import Replica

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StudentDevice:
    """What a student computes on."""

    backend: Backend = "auto"
    gpu: str = ""
    """An index, UUID, PCI address or name; empty for the first."""
    threads: int | None = None
    compiled: bool = False
    """By torch.compile."""


def run_student(
    config: RunConfig,
    run_id: str,
    device: StudentDevice,
    *,
    teacher_timeout: float,
    stop: Stop,
    fresh: FreshStudent | None = None,
) -> int:
    """Train a student until its run is over, and return the exit code.

    Args:
        config: `data.train` is a folder of logits, which a teacher may still be writing.
        teacher_timeout: seconds without a sign of a living teacher after which waiting for a
            shard is an error.
        fresh: makes the model folder, once the logits are known.

    Raises:
        InputError: model, folder or settings cannot be used together.
        RefusedError: the student's tokenizer is not the one of the logits.
        UnreachableError: the teacher died, or never came.
        NonFiniteError: NaN or Inf halted the run.
        StorageError: the folder, or the last checkpoint, cannot be read or written.
        InUseError: another process writes the output folder or the checkpoints.
    """
    held = lease.take(Path(config.output), run_id)
    try:
        return _run(config, run_id, device, teacher_timeout, stop, fresh, held)
    finally:
        held.release()


def _run(
    config: RunConfig,
    run_id: str,
    device: StudentDevice,
    teacher_timeout: float,
    stop: Stop,
    fresh: FreshStudent | None,
    held: Lease,
) -> int:
    folder = LogitsFolder(Path(config.data.train))
    status, status_file = first_status(run_id, 0, 1), StatusFile(Path(config.output))

    def on_wait(message: str) -> None:
        log.info("waiting %s", message)
        status["reason"] = message
        status_file.update(status)

    try:
        validation = check_ahead(config, fresh)
        if not await_description(folder, teacher_timeout, stop, on_wait):
            return 0
        if fresh is not None:
            fresh.make(config, folder.description)
        inputs = read_inputs(config, run_id, folder, validation)
        student = _make_student(inputs, device, teacher_timeout, stop, held)
    except TrainerError as error:  # there is no journal yet that would say so
        status.update(state="failed", reason=str(error), exit_code=error.exit_code)
        others = isinstance(error, InUseError)  # the checkpoints are: nothing is written there
        for place in filter(None, (config.output, None if others else config.checkpoint.folder)):
            say_last(Path(place), status)
        raise
    try:
        reason = student.run()
    except TrainerError as error:
        if isinstance(error, NonFiniteError):
            student.journal.emit({"event": "halted", "reason": str(error)})
        student.journal.close(error.exit_code, str(error))
        raise
    return student.journal.close(0, reason)


def _make_student(
    inputs: StudentInputs, device: StudentDevice, teacher_timeout: float, stop: Stop, held: Lease
) -> Student:
    """Open the device, bring the weights there, and begin to read.

    Nothing may hold on to the inputs: a restored state is three times the weights.
    """
    choice = _open(inputs, device)
    from trainer.distill.student.loop import Student
    from trainer.distill.student.optimizer import StudentOptimizer
    from trainer.distill.student.prefetch import Feed, Preparation, batches
    from trainer.replica.torch.replica import TorchReplica

    config, plan, layout, restored = inputs.config, inputs.plan, inputs.layout, inputs.restored
    replica = choice.replica
    assert isinstance(replica, TorchReplica)
    if device.compiled:
        log.info("compiling the layers during the first steps ...")
        replica.compile()
    optimizer = StudentOptimizer(config.optimizer, layout, replica.weights, replica.gradient)
    step, position = 0, Position()
    if restored:
        step, position = _resume(restored)
        optimizer.restore(restored.state)
    else:
        replica.write_trainable(initial_weights(layout, inputs.model_dir, config))
    journal = RunRecorder(Path(config.output), inputs.store, config, inputs.job, plan, 1, held)
    journal.go_on(restored)
    journal.emit(
        {
            "event": "joined",
            "rank": 0,
            "host": socket.gethostname(),
            "device": replica.device,
            "backend": choice.backend,
            "backend_reason": choice.reason,
        }
    )
    assert config.distillation is not None
    folder, scheme = inputs.folder, inputs.folder.description.scheme
    prepare = Preparation(scheme, config.distillation, config.data.max_seq_len)

    def source(feed: Feed) -> Iterator[Batch]:
        stream = ShardStream(
            folder,
            seed=config.training.seed,
            order=epoch_order,
            timeout=teacher_timeout,
            on_wait=feed.waiting,
            on_damage=feed.damaged,
        )
        return batches(stream, plan, step, position, prepare)

    return Student(
        config=config,
        plan=plan,
        replica=replica,
        optimizer=optimizer,
        feed=Feed(source, stop),
        journal=journal,
        validation=inputs.validation,
        stop=stop,
        step=step,
        position=position,
        generation=restored.progress.generation + 1 if restored else 0,
    )


def _open(inputs: StudentInputs, device: StudentDevice) -> Choice:
    from trainer.replica.backend import UnusableError, choose, cuda_device

    def open_torch(wish: BackendRequest, device: str) -> Replica:
        with announced("importing torch"):
            from trainer.replica.torch.replica import TorchReplica
        return TorchReplica(
            wish.model_dir, wish.config, wish.layout, device, wish.threads, moments=True
        )

    def refuse(_: BackendRequest) -> Replica:
        raise UnusableError("students are trained by torch")

    openers: dict[Backend, Opener] = {
        "cuda": lambda wish: open_torch(wish, cuda_device(wish.gpu)),
        "wgpu": refuse,
        "cpu": lambda wish: open_torch(wish, "cpu"),
    }
    model_dir, config, layout = inputs.model_dir, inputs.config, inputs.layout
    choice = choose(device.backend, device.gpu, model_dir, config, layout, device.threads, openers)
    log.info(
        "student on %s%s", choice.replica.device, f" ({choice.reason})" if choice.reason else ""
    )
    return choice


def _resume(restored: Restored) -> tuple[int, Position]:
    """Return the applied updates of a checkpoint, and where its stream stood."""
    stream = restored.progress.stream
    if stream is None:
        raise InputError(
            f"{restored.path}: was not written by a student on its own; give another -o"
        )
    return restored.progress.step, Position(**{**stream, "postponed": tuple(stream["postponed"])})
