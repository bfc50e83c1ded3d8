"""Create the objects of a run from its config and inputs; `distributed` does it for ranks."""

from __future__ import annotations

import logging
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.resume import continue_run
from trainer.data.metrics import class_scores
from trainer.data.order import permute_epoch
from trainer.data.soft_targets import compute_alpha
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.stream import Position, ShardStream
from trainer.distill.student.distributed_dataset import DistillationDataset
from trainer.distill.student.on_policy import OnPolicy
from trainer.distill.student.prefetch import Preparation
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.coordinator.prompt_generation import PromptSet
from trainer.exchange.protocol.messages import JoinRequest
from trainer.optimizer.adamw import TrainState
from trainer.optimizer.nesterov import Update
from trainer.planning.budget.power import PowerMeter
from trainer.run.composition.record import Guards, open_record
from trainer.run.inputs import RunInputs
from trainer.system.errors import InputError
from trainer.system.regular_file import read_text
from trainer.system.storage.atomic_file import replace_file
from trainer.tracking.run_file import write_run_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.checkpoint.store import Restored
    from trainer.distill.student.loop import Student
    from trainer.exchange.worker.base import Exchange
    from trainer.replica.backend import ReplicaChoice
    from trainer.run.loop import Worker
    from trainer.system.process.stop_signals import StopRequest
    from trainer.system.storage.lease import Lease
    from trainer.tracking.run_recorder import RunRecorder

log = logging.getLogger(__name__)


def make_coordinator(
    inputs: RunInputs, expect_workers: int, now: float, guards: Guards | None = None
) -> tuple[Coordinator, RunRecorder]:
    """Return the coordinator at step 0, or at this run's newest checkpoint.

    Raises:
        InputError: data, model or output folder cannot be used.
        InUseError: another process writes the output folder or the checkpoints.
    """
    config, layout, job, plan = inputs.config, inputs.layout, inputs.job, inputs.plan
    with open_record(inputs, expect_workers, guards or Guards()) as (store, make_recorder):
        restored = continue_run(store, store.restore, job.run_id, config, job)
        if restored:
            state, generation = restored.state, restored.progress.generation + 1
        else:
            state, generation = TrainState.create(inputs.read_weights()), 0
        write_run_file(config, job.run_id)
        recorder = make_recorder(plan)
    recorder.resume(restored)
    coordinator = Coordinator(
        config=config,
        job=job,
        layout=layout,
        plan=plan,
        validation_samples=len(inputs.validation or ()),
        state=state,
        expect_workers=expect_workers,
        score=class_scores,
        now=now,
        generation=generation,
        early=recorder.early,
        questions=_make_prompt_set(inputs),
    )
    return coordinator, recorder


def _make_prompt_set(inputs: RunInputs) -> PromptSet | None:
    prompts, training = inputs.prompts, inputs.config.training
    if prompts is None:
        return None
    return PromptSet(
        prompts=prompts.tokens,
        stop=prompts.stop,
        vocabulary=prompts.vocabulary,
        every=training.sample_every,
        new_tokens=training.sample_tokens,
        make_record=prompts.read,
    )


def make_request(inputs: RunInputs, choice: ReplicaChoice, rank: int | None) -> JoinRequest:
    """Return a worker's request to join."""
    job = inputs.job
    return JoinRequest(
        run_id=job.run_id,
        rank=rank,
        motley_version=job.motley_version,
        config_digest=job.config_digest,
        layout_digest=job.layout_digest,
        model_digest=job.model_digest,
        data_digest=job.data_digest,
        host=socket.gethostname(),
        backend=choice.backend,
        device=" ".join(choice.replica.device.split()),
        backend_reason=" ".join(choice.explanation.split())[:1000],
    )


def make_worker(
    inputs: RunInputs, choice: ReplicaChoice, connect: Callable[[], Exchange]
) -> Worker:
    """Return the loop around a replica and an exchange, with the data it works on.

    The data has been read when `connect` is called: a joined worker is assigned samples at once.
    """
    from trainer.run.inner_steps import InnerSteps
    from trainer.run.loop import Worker, compute_loss_weight

    config, train = inputs.config, inputs.train
    order, alpha = permute_epoch, None
    if isinstance(train, LogitsFolder):
        assert config.distillation is not None
        scheme = train.description.scheme
        prepare = Preparation(scheme, config.distillation, config.data.max_seq_len)
        train = DistillationDataset(train, prepare)
        steps = inputs.plan.total_inner
        order, alpha = (
            train.permute_windows,
            partial(compute_alpha, config.distillation, total_steps=steps),
        )
    return Worker(
        replica=choice.replica,
        exchange=connect(),
        optimizer=Update(config, inputs.layout),
        plan=inputs.plan,
        rounds=partial(InnerSteps, choice.replica, config.optimizer),
        train=train,
        # A script's replica knows what its loss divides by.
        weigh=getattr(
            choice.replica,
            "weigh",
            partial(compute_loss_weight, class_weights=config.training.class_weights),
        ),
        validation=inputs.validation,
        seed=config.training.seed,
        order=order,
        alpha=alpha,
        watts=PowerMeter().recent_watts if config.budget is not None else lambda: None,
    )


def make_student(
    inputs: RunInputs,
    open_replica: Callable[[], ReplicaChoice],
    *,
    lease: Lease,
    stop: StopRequest,
    teacher_timeout: float,
    compiled: bool,
    guards: Guards,
) -> Student:
    """Return a student at step 0, or at this run's newest checkpoint.

    The checkpoints are read before `open_replica` is called, and with it torch imported. Nothing
    keeps the restored state, which is three times the weights.

    Args:
        lease: of the output folder.
        teacher_timeout: seconds without a sign of a living teacher after which waiting for a shard
            is an error.
        compiled: by torch.compile.

    Raises:
        InputError: the checkpoints are another run's, or the model cannot be used.
        InUseError: another process writes the checkpoints.
    """
    config, layout, plan, folder = inputs.config, inputs.layout, inputs.plan, inputs.train
    job = inputs.job
    assert isinstance(folder, LogitsFolder)
    assert config.distillation is not None
    with open_record(inputs, 1, guards, lease) as (store, make_recorder):
        restored = continue_run(store, store.restore, job.run_id, config, job)
        choice = open_replica()
        from trainer.distill.student.loop import Student
        from trainer.distill.student.optimizer import StudentOptimizer
        from trainer.distill.student.prefetch import Batch, BatchPrefetcher, iterate_batches
        from trainer.replica.torch.replica import TorchReplica

        replica = choice.replica
        assert isinstance(replica, TorchReplica)
        if compiled:
            log.info("compiling the layers during the first steps ...")
            replica.compile_layers()
        if not restored:
            replica.write_trainable(inputs.read_weights())
        optimizer = StudentOptimizer(config.optimizer, layout, replica.weights, replica.gradient)
        step, position, rounds = 0, Position(), ""
        if restored:
            step = restored.progress.step
            position, rounds = _read_stream_position(restored)
            optimizer.restore(restored.state)
        recorder = make_recorder(plan)
    recorder.resume(restored)
    recorder.emit(
        {
            "event": "joined",
            "rank": 0,
            "host": socket.gethostname(),
            "device": replica.device,
            "backend": choice.backend,
            "backend_reason": choice.explanation,
        }
    )
    prepare = Preparation(folder.description.scheme, config.distillation, config.data.max_seq_len)
    own = None
    if inputs.own_prompts is not None:
        own = OnPolicy(
            config,
            folder,
            inputs.model_dir,
            inputs.own_prompts,
            replica.generate,
            run=rounds or _name_rounds(Path(config.output), job.run_id),
            steps=plan.total_steps,
            timeout=teacher_timeout,
            stop=stop,
        )

    def open_batches(feed: BatchPrefetcher) -> Iterator[Batch]:
        if config.on_policy_answers == config.training.batch_size:
            return (Batch([], [], position) for _ in range(step, plan.total_steps))
        stream = ShardStream(
            folder,
            seed=config.training.seed,
            order=permute_epoch,
            timeout=teacher_timeout,
            on_wait=feed.on_wait,
            on_damage=feed.record_damage,
        )
        return iterate_batches(stream, plan, step, position, prepare)

    return Student(
        config=config,
        plan=plan,
        replica=replica,
        optimizer=optimizer,
        feed=BatchPrefetcher(open_batches, stop),
        own=own,
        recorder=recorder,
        validation=inputs.validation,
        questions=_make_prompt_set(inputs),
        stop=stop,
        step=step,
        position=position,
        generation=restored.progress.generation + 1 if restored else 0,
    )


def _name_rounds(output: Path, run_id: str) -> str:
    """Return the name of a run's rounds of answers, which it has before its first checkpoint."""
    path = output / "rounds"
    with suppress(OSError, UnicodeDecodeError):
        known = read_text(path).strip()
        if re.fullmatch(rf"{re.escape(run_id)}-[0-9a-f]{{8}}", known):
            return known
    name = f"{run_id}-{secrets.token_hex(4)}"
    replace_file(path, f"{name}\n")
    return name


def _read_stream_position(restored: Restored) -> tuple[Position, str]:
    """Return a checkpoint's position in its stream, and the name of its rounds of answers."""
    stream = restored.progress.logits_position
    if stream is None:
        raise InputError(
            f"{restored.path}: was not written by a student on its own; give another -o"
        )
    stream = {**stream, "postponed": tuple(stream["postponed"])}
    rounds = stream.pop("iterations", "")
    return Position(**stream), rounds
