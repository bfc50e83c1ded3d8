"""What a student needs before its device is opened: read, and checked to fit together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from trainer.checkpoint.resume import continue_run, open_store
from trainer.checkpoint.store import CheckpointStore, Restored
from trainer.config.run import RunConfig
from trainer.data.encoder import Encoder
from trainer.data.samples import SampleFile, read_file
from trainer.data.survey import survey
from trainer.data.tokens import Dataset, make_dataset
from trainer.distill.stopping import Stop
from trainer.distill.student.from_scratch import fresh_config, fresh_model
from trainer.distill.tokenizer.vocabulary import tokenizer_digest
from trainer.errors import InputError, RefusedError, UnreachableError
from trainer.exchange.protocol.members import Job
from trainer.exchange.protocol.schedule import StepPlan
from trainer.logits import targets
from trainer.logits.dataset import DATASET, LogitsFolder
from trainer.logits.description import Description
from trainer.logits.heartbeat import TeacherWatch
from trainer.model.architecture import read_architecture, read_positions
from trainer.model.files import model_digest, resolve_model
from trainer.model.layout import GradientLayout, build_layout
from trainer.model.safetensors_headers import read_config

log = logging.getLogger(__name__)

_LOOK = 0.5
_TELL = 30.0


@dataclass(frozen=True, kw_only=True)
class StudentInputs:
    """What was read and checked before the device is opened."""

    config: RunConfig
    job: Job
    folder: LogitsFolder
    model_dir: Path
    layout: GradientLayout
    plan: StepPlan
    validation: Dataset | None
    store: CheckpointStore
    restored: Restored | None


@dataclass(frozen=True, kw_only=True)
class FreshStudent:
    """A student from nothing, which a run makes when it begins."""

    shape: str
    """A config.json, or a name of `trainer.distill.student.from_scratch`."""
    tokenizer_dir: Path

    def make(self, config: RunConfig, description: Description) -> None:
        """Write the model folder that a config names, unless an earlier start did.

        Raises:
            RefusedError: the tokenizer is not the one of the logits.
            InputError: shape or tokenizer cannot be used, or another model is there.
        """
        check_tokenizer(self.tokenizer_dir, description, config.data.train)
        model_dir = Path(config.model.path)
        if not model_dir.exists():
            fresh_model(self.shape, self.tokenizer_dir, model_dir, config.training.seed)
            return
        same_shape = read_config(model_dir) == fresh_config(self.shape, self.tokenizer_dir)
        if not same_shape or tokenizer_digest(model_dir) != tokenizer_digest(self.tokenizer_dir):
            raise InputError(
                f"{model_dir}: is another model than {self.shape} with the tokenizer of "
                f"{self.tokenizer_dir}; give another -o, or remove it"
            )


def check_ahead(config: RunConfig, fresh: FreshStudent | None) -> SampleFile | None:
    """Return the validation data, checked with what a student needs no teacher for.

    What the data holds is logged.

    Raises:
        InputError, DataError: the model, its tokenizer or the data cannot be used.
    """
    tokenizer_dir = fresh.tokenizer_dir if fresh else resolve_model(config.model.path)
    if fresh is None:
        config = _fit(config, tokenizer_dir)
    if not config.data.validation:
        return None
    encoder, length = Encoder(tokenizer_dir), config.data.max_seq_len
    file = read_file(Path(config.data.validation), "causal-lm")
    make_dataset(file, encoder, "causal-lm", length).check()
    for line in survey(None, file, encoder, length, None):
        log.info("%s", line)
    return file


def await_description(
    folder: LogitsFolder, timeout: float, stop: Stop, on_wait: Callable[[str], None]
) -> bool:
    """Wait until a teacher has said what it will write; return whether it has.

    Args:
        timeout: seconds without a sign of a living teacher after which waiting is an error.
        on_wait: told now and then what is waited for.

    Raises:
        UnreachableError: none came in time.
    """
    watch = TeacherWatch(folder)
    began, due = time.monotonic(), 0.0
    while not folder.is_described:
        waited = time.monotonic() - began
        if stop:
            return False
        if waited >= due:
            on_wait(f"for {folder.path / DATASET}, {waited:.0f} s so far")
            due = waited + _TELL
        if watch.quiet() >= timeout:
            raise UnreachableError(
                f"{folder.path}: no teacher has begun here within {timeout:g} s; start `trainer "
                f"distill teacher ... --out {folder.path}`"
            )
        time.sleep(_LOOK)
    return True


def read_inputs(
    config: RunConfig, run_id: str, folder: LogitsFolder, validation_file: SampleFile | None
) -> StudentInputs:
    """Read everything that a student needs but its weights.

    Raises:
        InputError, RefusedError: see `run_student`.
    """
    description = folder.description
    log.info("data: %s", description)
    model_dir = resolve_model(config.model.path)
    config, given = _fit(config, model_dir), config
    if config is not given:
        length = config.data.max_seq_len
        log.info("data.max_seq_len is lowered to %d: %s has no more positions", length, model_dir)
    check_student(config, description, model_dir)
    layout = build_layout(model_dir, config)
    plan = StepPlan(
        description.windows,
        config.training.batch_size,
        config.training.epochs,
        config.training.max_steps,
    )
    validation = None
    if validation_file is not None:
        encoder, length = Encoder(model_dir), config.data.max_seq_len
        validation = make_dataset(validation_file, encoder, "causal-lm", length)
    job = Job(
        run_id=run_id,
        agreement=config.agreement(),
        layout=layout.digest,
        model=model_digest(model_dir),
        data=folder.digest,
        version=version("motley"),
    )
    store = open_store(config, run_id, layout, model_dir)
    try:
        restored = continue_run(store, run_id, config, job.data)
    except BaseException:
        store.release()
        raise
    return StudentInputs(
        config=config,
        job=job,
        folder=folder,
        model_dir=model_dir,
        layout=layout,
        plan=plan,
        validation=validation,
        store=store,
        restored=restored,
    )


def _fit(config: RunConfig, model_dir: Path) -> RunConfig:
    """Return the config with a `data.max_seq_len` that a model knows.

    One that is too long is lowered, not refused: it cuts windows whose length is the teacher's.
    """
    limit = read_positions(model_dir)
    if limit is None or config.data.max_seq_len <= limit:
        return config
    data = config.data.model_copy(update={"max_seq_len": limit})
    return config.model_copy(update={"data": data})


def check_student(config: RunConfig, description: Description, model_dir: Path) -> None:
    """See that a model can learn from a folder's logits under a config.

    Raises:
        RefusedError: the model's tokenizer is not the one of the logits, or makes tokens that the
            model does not know.
        InputError: the logits hold too little for the temperature or the divergence.
    """
    folder = config.data.train
    check_tokenizer(model_dir, description, folder)
    known, size = read_architecture(model_dir).vocab_size, description.tokenizer.size
    if known < size:
        raise RefusedError(
            f"{model_dir}: the model knows {known} tokens, the tokenizer of the logits in {folder} "
            f"makes {size}"
        )
    objective = config.distillation
    if objective is None:
        raise InputError("a student's run config needs a section `distillation`")
    targets.check(description.scheme, objective.temperature, objective.divergence)
    if not description.windows:
        raise InputError(f"{folder}: its corpus is empty, there is nothing to learn from")
    if config.data.max_seq_len < description.max_seq_len:
        log.info(
            "windows of up to %d tokens are cut at data.max_seq_len %d",
            description.max_seq_len,
            config.data.max_seq_len,
        )


def check_tokenizer(tokenizer_dir: Path, description: Description, folder: str) -> None:
    """See that a tokenizer makes the ids that a folder of logits is about.

    Raises:
        RefusedError: it is another one; names both digests.
    """
    digest = tokenizer_digest(tokenizer_dir)
    if digest != description.tokenizer.digest:
        raise RefusedError(
            f"{tokenizer_dir}: its tokenizer ({digest[:16]}) is not the one of the logits in "
            f"{folder} ({description.tokenizer.digest[:16]})"
        )
