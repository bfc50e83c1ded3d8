"""The checks of a student's model, tokenizer and logits before its device is opened."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.run import RunConfig
from trainer.data.data_file import DataFile
from trainer.data.encoded_rows import read_data
from trainer.data.encoder import Encoder
from trainer.data.survey import check_conversations, survey
from trainer.distill.logits import targets
from trainer.distill.logits.dataset import DATASET, LogitsFolder
from trainer.distill.logits.description import Description
from trainer.distill.logits.heartbeat import TeacherWatch
from trainer.distill.student.from_scratch import fresh_config, fresh_model
from trainer.distill.tokenizer.vocabulary import tokenizer_digest
from trainer.model.architecture import fit_length, read_vocabulary
from trainer.model.files import resolve_model
from trainer.model.safetensors_headers import read_config
from trainer.system.errors import InputError, RefusedError, UnreachableError
from trainer.system.process.stop_signals import StopRequest

log = logging.getLogger(__name__)

_LOOK = 0.5
_TELL = 30.0


@dataclass(frozen=True, kw_only=True)
class FreshStudent:
    """A new student, which a run creates when it begins."""

    shape: str
    """A config.json, or a name of `trainer.distill.student.from_scratch`."""
    tokenizer_dir: Path

    def write_model_folder(self, config: RunConfig, description: Description) -> None:
        """Write the model folder that a config names, unless an earlier start did.

        Raises:
            RefusedError: the tokenizer is not the one of the logits.
            InputError: shape or tokenizer cannot be used, or the folder has another model.
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


def check_ahead(config: RunConfig, fresh: FreshStudent | None) -> DataFile | None:
    """Return the validation data; check everything that needs no teacher.

    A summary of the data is logged.

    Raises:
        InputError, DataError: the model, its tokenizer or the data cannot be used.
    """
    tokenizer_dir = fresh.tokenizer_dir if fresh else resolve_model(config.model.path)
    if fresh is None:
        config = fit_length(config, tokenizer_dir, lowers=True)
    if not config.data.validation:
        return None
    encoder = Encoder(tokenizer_dir, config.data.lost_text, config.data.date)
    length = config.data.max_seq_len
    file = read_data(config.data.validation, config, encoder)
    assert file is not None
    file.open_dataset(encoder, config.task, length)
    lost = check_conversations(file, encoder)
    for line in (*lost, *survey(None, file, encoder, length, None)):
        log.info("%s", line)
    return file


def await_description(
    folder: LogitsFolder, timeout: float, stop: StopRequest, on_wait: Callable[[str], None]
) -> bool:
    """Wait for a teacher's description; return whether there is one.

    Args:
        timeout: seconds without a sign of a living teacher after which waiting is an error.
        on_wait: called now and then with what is awaited.

    Raises:
        UnreachableError: no teacher began in time.
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
        if watch.seconds_of_silence() >= timeout:
            if lost := watch.describe_lost():
                raise UnreachableError(
                    f"{folder.path}: no teacher has described its logits here ({lost}); fix that "
                    "and start it again"
                )
            raise UnreachableError(
                f"{folder.path}: no teacher has started here within {timeout:g} s; start `trainer "
                f"distill teacher ... --out {folder.path}`"
            )
        time.sleep(_LOOK)
    return True


def check_student(config: RunConfig, description: Description, model_dir: Path) -> None:
    """Check that a model can learn from a folder's logits under a config.

    Raises:
        RefusedError: the model's tokenizer is not the one of the logits, or makes tokens that the
            model lacks.
        InputError: the logits lack what the temperature or the divergence needs.
    """
    folder = config.data.train
    check_tokenizer(model_dir, description, folder)
    known, size = read_vocabulary(model_dir), description.tokenizer.size
    if known < size:
        raise RefusedError(
            f"{model_dir}: the model has {known} tokens, the tokenizer of the logits in {folder} "
            f"makes {size}"
        )
    objective = config.distillation
    if objective is None:
        raise InputError("a student's run config needs a section `distillation`")
    targets.check_targets(description.scheme, objective.temperature, objective.divergence)
    if not description.windows and config.on_policy_answers < config.training.batch_size:
        raise InputError(f"{folder}: its corpus is empty, there is nothing to learn from")
    if config.data.max_seq_len < description.max_seq_len:
        log.info(
            "windows of up to %d tokens are cut at data.max_seq_len %d",
            description.max_seq_len,
            config.data.max_seq_len,
        )


def check_tokenizer(tokenizer_dir: Path, description: Description, folder: str) -> None:
    """Check that a tokenizer is the one of a folder of logits.

    Raises:
        RefusedError: it differs; names both digests.
    """
    digest = tokenizer_digest(tokenizer_dir)
    if digest != description.tokenizer.digest:
        raise RefusedError(
            f"{tokenizer_dir}: its tokenizer ({digest[:16]}) is not the one of the logits in "
            f"{folder} ({description.tokenizer.digest[:16]})"
        )
