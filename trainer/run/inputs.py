"""Read a run's model and data, and check that they fit its config and each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from trainer import __version__
from trainer.checkpoint.adapter_folder import find_tokenizer
from trainer.checkpoint.trained_model import starting_weights
from trainer.config.run import RunConfig
from trainer.config.script import Script
from trainer.data.data_file import DataFile
from trainer.data.encoded_rows import read_data
from trainer.data.encoder import Encoder
from trainer.data.labelling import with_names
from trainer.data.prompts import SamplePrompts
from trainer.data.samples import hash_files
from trainer.data.survey import check_conversations, survey
from trainer.data.tokens import Dataset
from trainer.distill.answers.author import Prompts
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.student.distributed_dataset import content_digest, logits_folder
from trainer.distill.student.inputs import check_student
from trainer.distill.student.on_policy import read_own_prompts
from trainer.exchange.protocol.members import Job
from trainer.exchange.protocol.schedule import StepPlan, flush_periods
from trainer.model.architecture import fit_length
from trainer.model.class_names import read_class_names
from trainer.model.config_keys import list_notices
from trainer.model.files import model_digest, resolve_model, weights_digest
from trainer.model.initialization import is_untrained
from trainer.model.layout import GradientLayout, build_layout
from trainer.model.safetensors_headers import read_config
from trainer.replica.script.start import run_for_start
from trainer.system.errors import InputError
from trainer.system.process.imports import speed_up_imports
from trainer.system.process.slow_log import log_if_slow

if TYPE_CHECKING:
    from trainer.replica.script.user_script import UserScript


@dataclass(frozen=True)
class RunInputs:
    """The inputs that every member derives identically from its config, model and data."""

    config: RunConfig
    model_dir: Path
    layout: GradientLayout
    job: Job
    train: Dataset | LogitsFolder
    """Samples, or a teacher's logits; of a script the indices alone."""
    validation: Dataset | None
    read_weights: Callable[[], np.ndarray]
    """Returns the weights of step 0."""
    prompts: SamplePrompts | None = None
    """Those to answer, where they are read: by the coordinator."""
    own_prompts: Prompts | None = None
    """Those of a student that learns from its own answers."""
    reference: np.ndarray | None = None
    """The weights that task `dpo` compares with; None: those of the base."""
    script: UserScript | None = None
    """Has the model, where it computes."""

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        train, training = self.train, self.config.training
        if self.config.on_policy_answers == training.batch_size:  # the answers of all steps
            return training.batch_size * (training.max_steps or 0)
        return train.description.windows if isinstance(train, LogitsFolder) else len(train)

    @property
    def plan(self) -> StepPlan:
        """Which samples each step takes."""
        training, exchange = self.config.training, self.config.exchange
        return StepPlan(
            self.samples,
            training.batch_size - self.config.on_policy_answers or training.batch_size,
            training.epochs,
            training.max_steps,
            flush_every=flush_periods(self.config),
        ).with_outer_steps(exchange.rounds)


def read_inputs(
    config: RunConfig,
    run_id: str,
    tell: Callable[[str], None] | None = None,
    script: Script | None = None,
    *,
    computes: bool = True,
) -> RunInputs:
    """Read what members of a run must have in common, before torch is imported.

    Args:
        tell: receives lines on the data, and on settings that data or model change.
        script: has model and data; it runs in a child unless this process `computes`.

    Raises:
        InputError: model or data, or the script, cannot be used.
        RefusedError: a teacher's logits are about another tokenizer than the model's.
        UnreachableError: the script does not return.
    """
    if script is not None:
        return _read_script_inputs(config, run_id, script, computes=computes)
    model_dir = resolve_model(config.model.path)
    if config.distillation is None:
        config = with_names(config, read_class_names(read_config(model_dir)))
    config, given = fit_length(config, model_dir), config
    layout = build_layout(model_dir, config)
    taught = logits_folder(config, model_dir)
    tokenizer_dir = find_tokenizer(model_dir, config.model.adapter)
    encoder = Encoder(tokenizer_dir, config.data.lost_text, config.data.date, model_dir)
    length = config.data.max_seq_len

    def open_dataset(file: DataFile | None) -> Dataset | None:
        return file.open_dataset(encoder, config.task, length) if file else None

    fraction = config.data.validation_fraction
    train_file = None if taught else read_data(config.data.train, config, encoder, fraction)
    validation_file = read_data(config.data.validation, config, encoder)
    if train_file and validation_file and train_file.labels != validation_file.labels:
        raise InputError(
            f"{validation_file.path}: its labels are {validation_file.labels}s, those of"
            f" {train_file.path} are {train_file.labels}s; give both files the same ones"
        )
    if train_file and fraction:
        train_file, validation_file = train_file.hold_out(fraction)
    train = taught or open_dataset(train_file)
    assert train is not None
    read_weights = partial(starting_weights, layout, model_dir, config)
    reference = read_weights() if config.has_reference else None
    data = _data_digest(config, taught)
    job = _make_job(config, run_id, layout, data, *_digest_model(config, model_dir))
    if reference is not None:  # members and resumed runs with another one are refused
        model = blake3(f"{job.model_digest}\0".encode() + reference.tobytes()).hexdigest()
        job = replace(job, model_digest=model)
    prompts = None if tell is None else _read_prompts(config, encoder, model_dir)
    validation = open_dataset(validation_file)
    inputs = RunInputs(
        *(config, model_dir, layout, job, train, validation, read_weights),
        prompts=prompts,
        reference=reference,
    )
    config.exchange.check_length(inputs.plan.total_inner)
    if tell is not None:
        for line in list_notices(model_dir):
            tell(line)
        if config.method == "lora" and is_untrained(model_dir):
            tell(
                f"{model_dir}: its weights are random, and LoRA changes too few of them to learn "
                "from scratch: give --method full, or a trained model"
            )
        for file in filter(None, (train_file, validation_file)):
            # By the coordinator alone: the workers have the same data.
            for line in check_conversations(file, encoder):
                tell(line)
        if config is not given:
            tell(f"data.max_seq_len is lowered to {length}: {model_dir} has no more positions")
        if taught:
            tell(f"data: {taught.description}")
        with log_if_slow("measuring the data"):
            lines = survey(train_file, validation_file, encoder, length, config.classes)
        for line in (*encoder.unused, *lines):
            tell(line)
        plan, batch = inputs.plan, config.training.batch_size
        if batch > inputs.samples:
            tell(
                f"training.batch_size {batch:,}: a step has all {inputs.samples:,} samples, and"
                " is an epoch"
            )
        if plan.total_inner > plan.batches_per_epoch * plan.epochs:
            epochs = plan.total_inner / plan.batches_per_epoch
            tell(
                f"training.max_steps {plan.total_inner} are {epochs:.1f} epochs, not {plan.epochs}"
            )
    return inputs


def _read_script_inputs(
    config: RunConfig, run_id: str, script: Script, *, computes: bool
) -> RunInputs:
    terms, made = (script, config.training.seed, config.exchange.join_deadline), None
    if computes:
        with speed_up_imports("torch"):
            from trainer.replica.script.user_script import UserScript
        made = UserScript(*terms)
        facts, layout, read_weights = made.facts, made.layout, made.read_weights
    else:
        facts, layout, weights = run_for_start(*terms)
        read_weights = partial(np.asarray, weights)  # the same array, not a copy
    model = blake3(f"{script.digest}\0{facts.frozen}".encode()).hexdigest()
    job = _make_job(config, run_id, layout, facts.data, model)
    train: Any = range(facts.samples)
    validation: Any = range(facts.validation) if facts.validation else None
    inputs = RunInputs(
        *(config, script.path.parent, layout, job, train, validation, read_weights), script=made
    )
    config.exchange.check_length(inputs.plan.total_inner)
    if config.training.evaluate_every and not facts.validation:
        raise InputError(
            f"training.evaluate_every: {script.path} has no dataset('validation'); leave it out"
        )
    return inputs


def read_student_inputs(
    config: RunConfig,
    run_id: str,
    folder: LogitsFolder,
    validation_file: DataFile | None,
    tell: Callable[[str], None],
) -> RunInputs:
    """Read what a student needs except its weights; `folder` may still be growing.

    Raises:
        InputError: model, folder and settings do not fit together.
        RefusedError: the logits are about another tokenizer than the model's.
    """
    tell(f"data: {folder.description}")
    model_dir = resolve_model(config.model.path)
    config, given = fit_length(config, model_dir, lowers=True), config
    length = config.data.max_seq_len
    if config is not given:
        tell(f"data.max_seq_len is lowered to {length}: {model_dir} has no more positions")
    check_student(config, folder.description, model_dir)
    layout = build_layout(model_dir, config)
    tokenizer_dir = find_tokenizer(model_dir, config.model.adapter)
    encoder = Encoder(tokenizer_dir, config.data.lost_text, config.data.date, model_dir)
    for line in (*list_notices(model_dir), *encoder.unused):
        tell(line)
    validation = None
    if validation_file is not None:
        validation = validation_file.open_dataset(encoder, config.task, length)
    job = _make_job(config, run_id, layout, folder.digest, *_digest_model(config, model_dir))
    prompts = _read_prompts(config, encoder, model_dir)
    own = read_own_prompts(config, folder.description, model_dir)
    read_weights = partial(starting_weights, layout, model_dir, config)
    return RunInputs(config, model_dir, layout, job, folder, validation, read_weights, prompts, own)


def _read_prompts(config: RunConfig, encoder: Encoder, model_dir: Path) -> SamplePrompts | None:
    training, data = config.training, config.data
    if training.sample_prompts is None:
        return None
    path, new_tokens = Path(training.sample_prompts), training.sample_tokens
    return SamplePrompts(path, data.columns, encoder, model_dir, new_tokens, data.max_seq_len)


def _digest_model(config: RunConfig, model_dir: Path) -> tuple[str, str]:
    """Return the digests of a model's files, and of its tensors alone."""
    files = model_digest(model_dir, find_tokenizer(model_dir, config.model.adapter))
    return files, weights_digest(model_dir)


def _make_job(
    config: RunConfig,
    run_id: str,
    layout: GradientLayout,
    data: str,
    model: str,
    base: str | None = None,
) -> Job:
    digest = config.agreement_digest()
    return Job(run_id, digest, layout.digest, model, data, __version__, base)


def _data_digest(config: RunConfig, taught: LogitsFolder | None) -> str:
    """Return the BLAKE3 hex digest over all data: the bytes of files, a folder's own digest."""
    hasher = blake3()
    if taught is not None:
        hasher.update(f"{content_digest(taught)}\0".encode())
    files = (None if taught else config.data.train, config.data.validation)
    return hash_files(filter(None, files), hasher).hexdigest()
