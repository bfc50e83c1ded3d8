"""Where a config becomes objects: the only place that knows every room."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from trainer.checkpoint.resume import continue_run, open_store
from trainer.config.run import Backend, RunConfig
from trainer.data.encoder import Encoder
from trainer.data.holdout import hold_out
from trainer.data.metrics import accuracy, matthews
from trainer.data.order import epoch_order
from trainer.data.samples import SampleFile, read_file
from trainer.data.soft_targets import alpha_at
from trainer.data.survey import survey
from trainer.data.tokens import Dataset, make_dataset
from trainer.distill.student.distributed_dataset import TaughtDataset, content_digest, taught_folder
from trainer.distill.student.prefetch import Preparation
from trainer.errors import InputError
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.members import Job
from trainer.exchange.protocol.messages import JoinRequest
from trainer.exchange.protocol.schedule import StepPlan
from trainer.logits.dataset import LogitsFolder
from trainer.logits.targets import has_bare_rest
from trainer.model.architecture import fit_length
from trainer.model.files import model_digest, resolve_model
from trainer.model.initialization import initial_weights
from trainer.model.layout import GradientLayout, build_layout
from trainer.optimizer import AdamW, TrainState
from trainer.process.announcement import announced
from trainer.storage import lease
from trainer.tracking.run_file import write_run_file
from trainer.tracking.run_recorder import RunRecorder

if TYPE_CHECKING:
    from trainer.exchange.base import Exchange
    from trainer.loop import Worker
    from trainer.replica.backend import Choice


@dataclass(frozen=True)
class RunInputs:
    """What every member derives alike from its config, model and data."""

    config: RunConfig
    model_dir: Path
    layout: GradientLayout
    job: Job
    train: Dataset | LogitsFolder
    """Samples, or a teacher's logits."""
    validation: Dataset | None

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        train = self.train
        return train.description.windows if isinstance(train, LogitsFolder) else len(train)


def read_inputs(
    config: RunConfig, run_id: str, tell: Callable[[str], None] | None = None
) -> RunInputs:
    """Find the model and name everything that members must have in common.

    All data is read, before torch is imported: what is wrong with it is said at once.

    Args:
        tell: told what the data holds, and what of the settings it or the model changes.

    Raises:
        InputError: model or data cannot be used.
        RefusedError: a teacher's logits are about another tokenizer than the model's.
    """
    model_dir = resolve_model(config.model.path)
    config, given = fit_length(config, model_dir), config
    layout = build_layout(model_dir, config)
    taught = taught_folder(config, model_dir)
    encoder, length = Encoder(model_dir), config.data.max_seq_len

    def read(path: str | None) -> SampleFile | None:
        return read_file(Path(path), config.task, config.num_classes) if path else None

    def dataset(file: SampleFile | None) -> Dataset | None:
        return make_dataset(file, encoder, config.task, length) if file else None

    train_file = read(None if taught else config.data.train)
    validation_file = read(config.data.validation)
    if train_file and config.data.validation_fraction:
        train_file, validation_file = hold_out(train_file, config.data.validation_fraction)
    train = taught or dataset(train_file)
    assert train is not None
    job = Job(
        run_id=run_id,
        agreement=config.agreement(),
        layout=layout.digest,
        model=model_digest(model_dir),
        data=_data_digest(config, taught),
        version=version("motley"),
    )
    inputs = RunInputs(config, model_dir, layout, job, train, dataset(validation_file))
    if tell is not None:
        for part in (train, inputs.validation):
            if isinstance(part, Dataset):
                part.check()  # once, where the run is led: the workers have the same data
        if config is not given:
            tell(f"data.max_seq_len is lowered to {length}: {model_dir} has no more positions")
        if taught:
            tell(f"data: {taught.description}")
        with announced("measuring the data"):
            lines = survey(train_file, validation_file, encoder, length, config.num_classes)
        for line in lines:
            tell(line)
        plan = _plan(config, inputs.samples)
        if plan.total_steps > plan.steps_per_epoch * plan.epochs:
            epochs = plan.total_steps / plan.steps_per_epoch
            tell(
                f"training.max_steps {plan.total_steps} are {epochs:.1f} epochs, not {plan.epochs}"
            )
    return inputs


def make_coordinator(
    inputs: RunInputs, expect_workers: int, now: float
) -> tuple[Coordinator, RunRecorder]:
    """Return the coordinator at step 0, or where this run's newest checkpoint stands.

    Raises:
        InputError: data, model or output folder cannot be used.
        InUseError: another process writes the output folder or the checkpoints.
    """
    config, layout, job = inputs.config, inputs.layout, inputs.job
    plan = _plan(config, inputs.samples)
    output = Path(config.output)
    with ExitStack() as until_told:
        held = lease.take(output, job.run_id)
        until_told.callback(held.release)
        store = open_store(config, job.run_id, layout, inputs.model_dir)
        until_told.callback(store.release)
        restored = continue_run(store, job.run_id, config, job.data)
        if restored:
            state, generation = restored.state, restored.progress.generation + 1
        else:
            state = TrainState.fresh(initial_weights(layout, inputs.model_dir, config))
            generation = 0
        write_run_file(config, job.run_id)
        journal = RunRecorder(output, store, config, job, plan, expect_workers, held)
        until_told.pop_all()
    journal.go_on(restored)
    coordinator = Coordinator(
        config=config,
        job=job,
        layout=layout,
        plan=plan,
        validation_samples=len(inputs.validation or ()),
        state=state,
        expect_workers=expect_workers,
        score=lambda table: {"accuracy": accuracy(table), "mcc": matthews(table)},
        now=now,
        generation=generation,
    )
    return coordinator, journal


def make_choice(inputs: RunInputs, wanted: Backend, gpu: str, threads: int | None) -> Choice:
    """Open a replica on the first backend that works.

    Raises:
        InputError: the model cannot be used, or does not fit.
    """
    from trainer.replica.backend import choose

    taught = inputs.train
    rest = isinstance(taught, LogitsFolder) and has_bare_rest(taught.description.scheme)
    return choose(wanted, gpu, inputs.model_dir, inputs.config, inputs.layout, threads, rest=rest)


def make_request(inputs: RunInputs, choice: Choice, rank: int | None) -> JoinRequest:
    """Return a worker's request to join."""
    job = inputs.job
    return JoinRequest(
        run_id=job.run_id,
        rank=rank,
        version=job.version,
        agreement=job.agreement,
        layout=job.layout,
        model=job.model,
        data=job.data,
        host=socket.gethostname(),
        backend=choice.backend,
        device=choice.replica.device,
        backend_reason=choice.reason[:1000],
    )


def make_worker(inputs: RunInputs, choice: Choice, connect: Callable[[], Exchange]) -> Worker:
    """Return the loop around a replica and an exchange, with the data it works on.

    The data has been read when `connect` is called: a joined worker is assigned samples at once.
    """
    from trainer.loop import Worker

    config, train = inputs.config, inputs.train
    order, alpha = epoch_order, None
    if isinstance(train, LogitsFolder):
        assert config.distillation is not None
        scheme = train.description.scheme
        prepare = Preparation(scheme, config.distillation, config.data.max_seq_len)
        train = TaughtDataset(train, prepare)
        steps = _plan(config, len(train)).total_steps
        order, alpha = train.order, partial(alpha_at, config.distillation, total_steps=steps)
    return Worker(
        replica=choice.replica,
        exchange=connect(),
        optimizer=AdamW(config.optimizer, inputs.layout),
        train=train,
        validation=inputs.validation,
        seed=config.training.seed,
        order=order,
        alpha=alpha,
    )


def _plan(config: RunConfig, samples: int) -> StepPlan:
    training = config.training
    return StepPlan(samples, training.batch_size, training.epochs, training.max_steps)


def _data_digest(config: RunConfig, taught: LogitsFolder | None) -> str:
    """Return the BLAKE3 hex digest over all data: the bytes of files, a folder's own digest."""
    hasher = blake3()
    if taught is not None:
        hasher.update(f"{content_digest(taught)}\0".encode())
    for path in filter(None, (None if taught else config.data.train, config.data.validation)):
        try:
            with announced(f"hashing {path}"):
                hasher.update_mmap(path)
        except OSError as error:
            # The library's own errors carry a text, not an errno.
            reason = error.strerror or "no such file, or not readable"
            raise InputError(f"{path}: cannot be read: {reason}") from None
        hasher.update(b"\0")
    return hasher.hexdigest()
