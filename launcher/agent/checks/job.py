"""Checks of a run's inputs on a host: the model, the data, the output folder.

Configs, plans and paths arrive as JSON; `validate_call` converts them back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import validate_call

from launcher.agent.checks.digests import HASH_DEADLINE, hash_paths
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host import check_folder
from launcher.agent.checks.logits_folder import check_logits
from launcher.agent.operation import check, operation
from launcher.errors import ConfigError
from launcher.inventory.facts.devices import available_memory
from launcher.plan.configuration import DEFAULT_PRESET
from launcher.plan.hub import cache_folder, cached_snapshot, is_offline
from trainer.config.run import RunConfig, load_config
from trainer.data.formats import read_records
from trainer.data.records import Problems
from trainer.data.shards import has_logits
from trainer.data.sources import HUB, refuse_pipe, restore_scheme
from trainer.model import layout as trainer_layout
from trainer.model.files import digested_files, local_model
from trainer.model.output_folder import check_output as check_folder_of_run
from trainer.planning.defaults import Derived, check_task, derive_settings, run_work
from trainer.planning.distillation import Scoring
from trainer.planning.model_config import read_shape
from trainer.planning.shapes import ModelShape
from trainer.planning.teachers import Measured
from trainer.planning.workers import Room
from trainer.system.errors import InputError
from trainer.system.regular_file import open_file, read_file

DATA_DEADLINE = 300.0
"""Seconds: gigabytes of data are read for their labels."""

_MIB = 1 << 20
_GIB = 1 << 30
METRICS_FILE = "metrics.jsonl"
_MODEL_FILES = ("config.json", "tokenizer.json")
_LEAST_OUTPUT_SPACE = 256 * _MIB
_BRING = "copy it there with launch sync inputs, or name another in the job"


def model_folder(config: RunConfig) -> Path | None:
    """Return the base model's folder, or its folder in the hub cache if that is complete.

    None for a model that this machine does not have.

    Raises:
        InputError: it is a GGUF file that cannot be converted.
    """
    path = Path(config.model.path)
    if path.is_absolute():
        return local_model(path)
    snapshot = cached_snapshot(config.model.path)
    if snapshot is None or not (snapshot / "config.json").is_file():
        return None
    try:
        trainer_layout.read_headers(snapshot)
    except InputError:
        return None  # an interrupted download
    return snapshot


@check("model")
@validate_call
def check_model(config: RunConfig) -> Finding:
    """Whether the base model is complete and of a supported architecture.

    A model that is only on the hub is not checked: the trainer downloads it.
    """
    try:
        folder = model_folder(config)
        if folder is None:
            return _absent_model(config.model.path)
        layout = trainer_layout.build_layout(folder, config)
    except InputError as error:
        return Finding("fail", str(error))
    return Finding(
        "ok", f"{folder}, {layout.size:,} trainable values in {len(layout.blocks)} blocks"
    )


@operation("model_content", deadline=HASH_DEADLINE)
@validate_call
def model_content(config: RunConfig, state_folder: Path) -> dict[str, str]:
    """Return the digests of what makes a model: config, weights and tokenizer, by file name.

    Empty when this machine does not have the model, or not all of it.
    """
    try:
        folder = model_folder(config)
        if folder is None:
            return {}
        weights = {header.file for header in trainer_layout.read_headers(folder).values()}
    except InputError:
        return {}
    # The tokenizer is included: a different one turns the same data into different samples.
    return hash_paths(sorted({*weights, *digested_files(folder)}), state_folder, folder)


def _absent_model(path: str) -> Finding:
    own = "give --model DIR: a Hugging Face folder, or make a small one: trainer init-model"
    if Path(path).is_absolute():
        if path.endswith(f"/{load_config(DEFAULT_PRESET).model.path}"):
            own = f"it belongs to the quickstart: make demo makes it; for another, {own}"
        return Finding("fail", f"no model folder {path}", own)
    owner = path.partition("/")[0]
    if Path(owner).is_dir():
        here = f"no model folder {path}; not treated as a hub name: a folder {owner} exists"
        return Finding("fail", f"{here} here", own)
    if is_offline():
        missing = f"no model folder {path}; no complete copy of that hub name is in the cache"
        detail = f"{missing} {cache_folder()}, and downloads are disabled on this machine"
        return Finding("fail", detail, f"unset HF_HUB_OFFLINE to fetch it, or {own}")
    return Finding(
        "warn",
        f"no model folder {path}, so it is treated as a hub name and not checked",
        "the trainer will download it, which can take a long time",
    )


@check("training_data", deadline=HASH_DEADLINE)
@validate_call
def check_training_data(config: RunConfig) -> Finding:
    """Whether a run's data is there and of its task: a teacher's logits if it has one."""
    path = Path(config.data.train)
    if config.distillation is not None:
        return check_logits(path)
    if has_logits(path):
        detail = f"{path}: contains a teacher's logits, but the job has no section `distillation`"
        return Finding("fail", detail, "add it: --set distillation.alpha=0.7")
    finding = check_data(path, "--data FILE", config.data.columns)
    if finding.status == "ok":
        try:
            check_task(config)
        except InputError as error:
            return Finding("fail", str(error).splitlines()[0])
    return finding


@check("data")
@validate_call
def check_data(path: Path, remedy: str, columns: dict[str, str] | None = None) -> Finding:
    """Whether data is there and its first record can be read; the trainer reads all of it.

    Args:
        columns: `data.columns`.
    """
    if HUB.fullmatch(str(path)) and not is_offline():
        return Finding(
            "warn", f"{restore_scheme(path)} is not checked", "the trainer will download it"
        )
    problems = Problems()
    try:
        refuse_pipe(path)
        first = next(read_records(path, problems, columns), None)
        problems.raise_if_any()
    except InputError as error:
        return Finding("fail", str(error).splitlines()[0], f"give {remedy}")
    if first is None:
        return Finding("fail", f"{path}: empty", "it must contain one sample per line")
    if not isinstance(first.tree, dict):
        return Finding(
            "fail", f"{first.location}: not a JSON object", "it must contain one per line"
        )
    return Finding("ok", str(path))


@check("model_folder")
@validate_call
def check_model_folder(path: Path) -> Finding:
    """Whether a folder holds a complete model and a tokenizer; the trainer checks the rest."""
    try:
        folder = local_model(path)
        if folder is None:
            return Finding("fail", f"no model folder {path}", _BRING)
        headers = trainer_layout.read_headers(folder)
    except InputError as error:
        return Finding("fail", str(error))
    if lacking := [name for name in _MODEL_FILES if not (folder / name).is_file()]:
        return Finding("fail", f"{path} lacks {' and '.join(lacking)}", _BRING)
    size = sum(file.stat().st_size for file in {header.file for header in headers.values()})
    available = available_memory()
    detail = f"{path}, {size / _GIB:.1f} GiB"
    if available is not None and size > available:
        there = f"{available / _GIB:.1f} GiB of memory are free"
        return Finding(
            "warn", f"{detail}, and {there}", "weights that do not fit are read from disk again"
        )
    return Finding("ok", detail)


@check("text")
@validate_call
def check_text(path: Path) -> Finding:
    """Whether a file or folder of texts is there and can be read."""
    if HUB.fullmatch(str(path)):
        return check_data(path, _BRING)
    if not path.exists():
        return Finding("fail", f"{path}: no such file or folder", _BRING)
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return Finding("fail", f"{path}: cannot be read", "make it readable for the run user")
    return Finding("ok", str(path))


@check("output")
@validate_call
def check_output(path: Path, run_id: str, checkpoints: Path | None = None) -> Finding:
    """Whether the output folder can be written, and holds no model, no other run, and no record
    of checkpoints that are gone: its run would be refused at each attempt.

    Args:
        checkpoints: the folder of the run's checkpoints; None: of a run that has none of its own.
    """
    try:
        check_folder_of_run(path)
    except InputError as error:
        return Finding("fail", str(error), "give another --output")
    try:
        owner = json.loads(read_file(path / "status.json")).get("run_id")
        kept = any((path / "checkpoints").iterdir())
    except (OSError, ValueError, AttributeError, RecursionError):
        owner, kept = None, False
    if kept and owner != run_id:
        return Finding(
            "fail",
            f"{path} contains the checkpoints of run {owner}",
            f"give another --output, or resume that run: --resume {owner}",
        )
    if checkpoints is not None and (saved := _lost_checkpoint(path / METRICS_FILE, checkpoints)):
        what = "contains no complete checkpoint" if checkpoints.is_dir() else "is missing"
        return Finding(
            "fail",
            f"{checkpoints}: {what}, though {path / METRICS_FILE} records one of step {saved}",
            "mount or restore that folder, or give another --output to begin at step 0",
        )
    return check_folder(path, _LEAST_OUTPUT_SPACE)


def _lost_checkpoint(record: Path, folder: Path) -> int | None:
    """Return the step of the last recorded checkpoint if the folder holds none; else None."""
    if any(folder.glob("*/manifest.json")) or any(folder.glob("*/*/manifest.json")):
        return None
    step: int | None = None
    try:
        with open_file(record) as file:
            for line in file:
                if b'"checkpoint"' in line:
                    event = json.loads(line)
                    step = event["step"] if event.get("event") == "checkpoint" else step
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return step
    return step


@operation("own_settings", deadline=DATA_DEADLINE)
@validate_call
def own_settings(
    settings: dict[str, Any], given: Sequence[str], rooms: Sequence[Room]
) -> list[Derived]:
    """Return the settings that follow from the run's model and data, but for those `given`.

    Args:
        settings: those of its config that are not left to their defaults.

    Raises:
        ConfigError: the data is no task, such as labels on some lines only.
    """
    try:
        config = RunConfig.model_validate(settings)
        refuse_pipe(Path(config.data.train))
        return derive_settings(config, given, model_folder(config), rooms)
    except InputError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class Workload:
    """The computation of a run."""

    shape: ModelShape
    samples: float
    """Samples of all its steps."""
    tokens: float


@operation("workload", deadline=DATA_DEADLINE)
@validate_call
def read_workload(settings: dict[str, Any]) -> Workload | None:
    """Return the workload of a run; None if the model or the data cannot be read here.

    Args:
        settings: those of its config that are not left to their defaults.
    """
    try:
        config = RunConfig.model_validate(settings)
        folder = model_folder(config)
        if folder is None:
            return None
        if config.distillation is None:
            refuse_pipe(Path(config.data.train))
            return Workload(read_shape(folder), *run_work(config, folder))
        from trainer.distill.workload import taught_work  # with tokenizers

        return Workload(read_shape(folder), *taught_work(config))
    except (InputError, OSError, ModuleNotFoundError):
        return None


@operation("scoring", deadline=DATA_DEADLINE)
@validate_call
def read_scoring_workload(
    model: Path,
    data: list[Path],
    tokenizer: Path | None,
    logits: Path,
    max_seq_len: int | None,
    shard_bytes: int | None,
    columns: dict[str, str] | None,
) -> Scoring | None:
    """Return the teachers' workload of a distillation; None if it cannot be read here."""
    try:
        from trainer.distill.workload import read_scoring

        folder = local_model(model) or model
        return read_scoring(
            folder, data, tokenizer or folder, logits, max_seq_len, shard_bytes, columns
        )
    except (InputError, OSError, ModuleNotFoundError):
        return None


@operation("measured", deadline=DATA_DEADLINE, least=0)
@validate_call
def read_measured_speeds(logits: Path) -> list[Measured]:
    """Return what the teachers of a folder of logits measured; nothing if it is not here."""
    try:
        from trainer.distill.workload import read_measured

        return read_measured(logits)
    except (InputError, OSError, ModuleNotFoundError):
        return []


@operation("student", deadline=DATA_DEADLINE)
@validate_call
def read_student_shape(
    model: Path | None, config: str | None, tokenizer: Path | None
) -> ModelShape | None:
    """Return the shape of a distillation's student; None if it cannot be read here."""
    try:
        from trainer.distill.workload import student_shape

        return student_shape(model and (local_model(model) or model), config, tokenizer)
    except (InputError, OSError, ModuleNotFoundError):
        return None
