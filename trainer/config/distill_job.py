"""A distillation as one YAML file: teacher, student, evaluation, and the folder between them.

`launch distill up` turns it into commands of the three; each also runs by hand, without a job.
Torch-free: the launcher reads it. Relative paths are looked up on each host (docs/distillation.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from trainer.config import section as settings
from trainer.config.budget import BudgetConfig
from trainer.config.data import Day, LostText
from trainer.config.distillation import DistillationConfig
from trainer.config.limits import HOTTEST, MOST_DRAWS, MOST_NEW_TOKENS, SHORTEST_WINDOW
from trainer.config.notifications import Trackers
from trainer.config.run import (
    CheckpointConfig,
    LoraSettings,
    Method,
    OptimizerConfig,
    Positive,
    Quantization,
    Resident,
    TrainingConfig,
)
from trainer.config.section import Section, load_settings
from trainer.config.teacher_engines import (
    REFERENCE_ENGINE,
    TeacherEngine,
    explain_backend,
    explain_quantization,
    explain_resident,
)
from trainer.system.backends import Backend
from trainer.system.errors import InputError


class TeacherJob(Section):
    """The teacher: its model, its texts, and how many of its scores are kept.

    Null takes the default of the flag of `trainer distill teacher` with the same name.
    """

    model: str = Field(min_length=1)
    """A local Hugging Face directory on every teacher's host."""
    data: tuple[str, ...] = Field(min_length=1)
    """Files and folders of the corpus, on every teacher's host; or data sets of the hub."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The corpus's names of keys, as `data.columns` of a run config."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """A trimmed tokenizer; null takes the teacher's own. Teacher's and student's host need it."""
    processes: Positive | None = None
    """Teachers that split the corpus; null: one on each teacher's host."""
    backend: Backend = "cpu"
    scheme: Literal["topk", "sampled", "full"] = "topk"
    top_k: Positive | None = None
    tail_samples: int | None = Field(default=None, ge=0, le=MOST_DRAWS)
    samples: int | None = Field(default=None, gt=0, le=MOST_DRAWS)
    temperature: float | None = Field(default=None, gt=0, le=HOTTEST)
    values: Literal["float16", "float32"] | None = None
    max_seq_len: int | None = Field(default=None, ge=SHORTEST_WINDOW)
    lost_text: LostText | None = None
    date: Day | None = None
    shard_bytes: Positive | None = None
    batch_tokens: Positive | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    quantization: Quantization | None = None
    engine: TeacherEngine | None = None
    resident: Resident | None = None
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        engine = self.engine or REFERENCE_ENGINE
        kept = "auto" if self.resident is None else self.resident
        reason = (
            explain_backend(engine, self.backend)
            or explain_resident(engine, kept)
            or explain_quantization(engine, self.quantization or "none")
        )
        if reason:
            raise ValueError(reason)
        return self


class StudentJob(Section):
    """The student: the settings of a run config that concern it."""

    model: str | None = Field(default=None, min_length=1)
    """A Hugging Face directory to start from."""
    config: str | None = Field(default=None, min_length=1)
    """Shape of a new model with the job's tokenizer: `albor-350m`, or a config.json."""
    output: str = Field(default="outputs/distill", min_length=1)
    """Folder for metrics, status, and, without a shared folder, checkpoints."""
    method: Method = "full"
    validation: str | None = None
    """Held-out texts, data of any format."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """Its names of keys, as `data.columns` of a run config."""
    distillation: DistillationConfig = DistillationConfig()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_seq_len: Positive | None = None
    """Tokens; longer windows are cut. Null takes the teacher's."""
    tracking: Trackers = ("tensorboard",)
    """As in a run config."""
    compile: bool = False
    teacher_timeout: float | None = Field(default=None, gt=0)
    """Seconds without a heartbeat after which a teacher counts as dead."""

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if (self.model is None) == (self.config is None):
            raise ValueError("give model, or config for a new one")
        if self.columns and self.validation is None:
            raise ValueError("columns names keys of validation, which is not given")
        return self

    def collect_settings(self) -> dict[str, Any]:
        """Return the run-config settings that were given, by dotted paths."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        found = {key: tree[key] for key in ("method", "tracking") if key in tree}
        for section in ("distillation", "lora", "optimizer", "training", "checkpoint"):
            found |= {f"{section}.{key}": value for key, value in tree.get(section, {}).items()}
        return found


def is_shape_file(shape: str) -> bool:
    """Return whether a student's `config` is a file, not the name of a shipped shape."""
    return "/" in shape or shape.endswith(".json")


class EvaluationJob(Section):
    """The evaluation of each checkpoint."""

    tasks: tuple[str, ...] = Field(default=("loss",), min_length=1)
    """As for `trainer evaluate --watch`; the first one decides which is best."""
    data: tuple[str, ...] = ()
    """Held-out samples, data of any format, on the host that evaluates; so are prompts and
    problems."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The names of keys in data and prompts, as `data.columns` of a run config."""
    prompts: str | None = Field(default=None, min_length=1)
    problems: str | None = Field(default=None, min_length=1)
    run_code: bool = False
    """Allow the task `code`, which runs code written by the model in new namespaces; only `--set`
    allows it, no file. The recipe's units forbid these: start such a runner by hand there."""
    samples: Positive | None = None
    max_new_tokens: int | None = Field(default=None, gt=0, le=MOST_NEW_TOKENS)
    temperature: float | None = Field(default=None, ge=0)
    every: float | None = Field(default=None, gt=0)
    """Seconds between two checks for new checkpoints."""
    processes: Positive = 1
    """Runners that divide the checkpoints, on one host: on its first devices of the backend."""
    backend: Literal["cpu", "cuda", "wgpu"] = "cpu"

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns and not (self.data or self.prompts):
            raise ValueError("columns names keys of data and prompts, which are not given")
        return self


class DistillJob(Section):
    """One distillation."""

    name: str = Field(default="distill", pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    logits: str = Field(default="distill", min_length=1)
    """The folder between teachers and student: in `logits` of the shared one, or absolute."""
    teacher: TeacherJob
    student: StudentJob
    evaluation: EvaluationJob | None = None
    """Null: no evaluation."""
    budget: BudgetConfig | None = None
    """Its budget, on all its hosts; null: the environment's, if there is one."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds for every process to start: reading a big teacher takes long."""

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        if self.student.config is not None and self.teacher.tokenizer is None:
            raise ValueError("a student.config needs a teacher.tokenizer, which becomes its own")
        if self.student.distillation.on_policy and self.teacher.scheme == "sampled":
            raise ValueError(
                "student.distillation.on_policy needs teacher.scheme topk or full: of `sampled` no"
                " probabilities are kept"
            )
        return self

    def to_yaml(self) -> str:
        """Return the job as YAML that `load_job` reads back equal; unset stays unset."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        return yaml.safe_dump(tree, sort_keys=False)


def list_presets() -> dict[str, Path]:
    """Return the shipped jobs by name."""
    folder = Path(str(resources.files("trainer.presets"))) / "distill"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def setting_keys() -> list[str]:
    """Return the dotted paths of every setting."""
    return settings.setting_keys(DistillJob)


def load_job(source: str | Path | None, overrides: Mapping[str, Any] | None = None) -> DistillJob:
    """Read a job from a YAML file or a preset's name and apply dotted overrides.

    `overrides` maps paths such as `teacher.top_k` to values; None is null.

    Raises:
        InputError: the file cannot be read, or a key or value is wrong (names its path), or it lets
            code run, which only the operator's own words do.
    """
    given = overrides or {}
    job = load_settings(DistillJob, source, list_presets(), given)
    allowed = not {"evaluation.run_code", "evaluation"}.isdisjoint(given)
    if job.evaluation is not None and job.evaluation.run_code and not allowed:
        raise InputError(
            "evaluation.run_code: is not taken from a file, which people share, since code that a"
            " model wrote is executed then; give your own: --set evaluation.run_code=true"
        )
    return job
