"""The run config: every setting of a training run, as strict YAML.

A preset is a file, a flag is an override. Torch-free: the launcher and the coordinator read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import Field, model_validator

from trainer.config import section as settings
from trainer.config.budget import BudgetConfig
from trainer.config.capabilities import explain_refusal, explain_unused
from trainer.config.data import DataConfig
from trainer.config.distillation import DistillationConfig
from trainer.config.exchange import ExchangeConfig, RoundSettings
from trainer.config.lora import LoraSettings
from trainer.config.notifications import Trackers
from trainer.config.optimizer import OptimizerConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.section import Section, load_settings
from trainer.config.training import DpoConfig, Positive, Precision, TrainingConfig

Task = Literal["classify", "causal-lm", "dpo", "script"]
Classes = int | tuple[str, ...]
"""The number of classes, or their names in order."""
MOST_CLASSES = 100
"""Their confusion matrix must fit a control message."""
Method = Literal["lora", "full"]
ClassName = Annotated[str, Field(min_length=1, pattern=r"\S")]

SCRIPT = "script"
"""In place of a model's and data's path of task `script`: the script, which no file names."""

DATA_ON_HUB = "hf://"
"""Begins the name of a data set of the Hugging Face hub, which is no path of a machine."""

MEMBERS_MAY_DIFFER = (
    "name",
    "output",
    "model.path",
    "model.adapter",
    "model.resident",
    "data.train",
    "data.validation",
    "training.micro_batch_size",
    "training.pack",
    "training.gradient_checkpointing",
    "training.evaluate_every",
    "training.early_stopping_patience",
    "training.sample_prompts",
    "training.sample_every",
    "training.sample_tokens",
    "exchange.split",
    "exchange.hash_every",
    "exchange.heartbeat",
    "exchange.lost_after",
    "exchange.step_deadline",
    "exchange.join_deadline",
    "exchange.alarm_factor",
    "exchange.outliers",
    "exchange.shared_memory",
    "exchange.topology",
    "checkpoint",
    "parallel",
    "budget",
    "tracking",
)
"""Settings and sections that members need not agree on: paths, timers, what only one of them reads,
and how a gradient is computed, not which. All others, also later ones, must be equal."""
RESUME_MAY_CHANGE = ("training.epochs", "training.max_steps")
"""Settings that members agree on and a resumed run may change: its length."""


Resident = Literal["auto", "all"] | Annotated[int, Field(ge=0)]
"""Layers that stay in memory; `auto`: those that fit."""
Quantization = Literal["none", "nf4"]
"""Format of frozen linears and experts."""


class ModelConfig(Section):
    """The base model."""

    SHORTHAND_KEY = "path"
    path: str = Field(min_length=1)
    """A local Hugging Face folder, a GGUF file, or a hub name."""
    adapter: str | None = Field(default=None, min_length=1)
    """Folder of a LoRA adapter of this model from whose factors the run begins; null: from new
    ones.

    The coordinator alone needs it; for task `dpo`, or with a tokenizer of its own, every member."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the frozen base weights; trainable weights are always fp32 masters."""
    quantization: Quantization = "none"
    """`nf4` stores frozen linears and experts in 4 bits, in blocks of 64 (arXiv:2305.14314)."""
    resident: Resident = "auto"
    """Layers that stay in a worker's memory; the others are read at each use. `auto`: what fits.

    Only method `lora` reads layers: weights that train are in memory. What only uses a model has
    `--resident`."""


class CheckpointConfig(Section):
    """When to save, and what to keep."""

    every: Positive = 50
    """Steps between checkpoints; one more is written at the end."""
    keep_last: Positive = 3
    """Newest checkpoints that are kept, besides the best one."""
    folder: str | None = Field(default=None, min_length=1)
    """Their folder, such as a shared folder; null: `output`/checkpoints.

    Metrics and status stay in `output`: one that hangs delays a checkpoint, not the run."""
    sharded: bool = False
    """Every rank of `--distributed` writes its part in the background; the whole files are written
    at the end."""


class RunConfig(Section):
    """One training run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Prefix of the run id."""
    task: Task = "classify"
    """Learns classes, texts and conversations, preferences, or the loss of a script (--script)."""
    method: Method = "lora"
    """`lora` trains adapters (and a classifier's head), `full` trains all weights."""
    num_classes: Annotated[int, Field(ge=2, le=MOST_CLASSES)] | None = None
    """Number of classes of a `classify` task."""
    class_names: Annotated[tuple[ClassName, ...], Field(min_length=2)] | None = None
    """Names of the classes, in order; null: the words that are labels."""
    output: str = Field(default="runs/output", min_length=1)
    """Folder for checkpoints, metrics and status."""
    model: ModelConfig
    data: DataConfig
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    distillation: DistillationConfig | None = None
    """Learning from a teacher's logits; null: from data."""
    dpo: DpoConfig = DpoConfig()
    budget: BudgetConfig | None = None
    """The budget of the run; null: no limit."""
    tracking: Trackers = ("tensorboard",)
    """Trackers of the metrics, besides `metrics.jsonl`; all but `tensorboard` need an extra."""

    @model_validator(mode="before")
    @classmethod
    def _count_class_names(cls, tree: Any) -> Any:
        """Derive `num_classes` from the names, so that one setting is enough."""
        settings = cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}
        names = settings.get("class_names")
        if settings.get("task") == SCRIPT:
            settings = {"method": "full", **settings}
            for section, key in (("model", "path"), ("data", "train")):
                part = settings.get(section, {})
                if isinstance(part, dict):
                    settings[section] = {key: SCRIPT, **cast("dict[str, Any]", part)}
            return settings
        if isinstance(names, list | tuple) and settings.get("num_classes") is None:
            return {**settings, "num_classes": len(cast("list[Any]", names))}
        return cast("object", tree)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for_script = explain_refusal(self, "script") if self.task == SCRIPT else None
        for_ring = explain_refusal(self, "ring") if self.exchange.is_ring else None
        for_parts = None if self.parallel.is_ddp_only else explain_refusal(self, "parallel")
        if refused := for_script or for_ring or for_parts or explain_unused(self):
            raise ValueError(refused)
        if self.model.adapter is not None and (self.method == "full" or self.lora.freeze_a):
            raise ValueError("model.adapter needs method lora, without lora.freeze_a")
        if self.task == "classify" and self.num_classes is None:
            raise ValueError("num_classes is required when task is classify")
        if self.task != "classify" and self.num_classes is not None:
            raise ValueError("num_classes and class_names are only allowed when task is classify")
        loss = self.training
        if loss.class_weights is not None and len(loss.class_weights) != self.num_classes:
            raise ValueError(f"training.class_weights must be {self.num_classes} whole numbers")
        if self.class_names is not None and len(set(self.class_names)) != self.num_classes:
            raise ValueError(
                f"class_names must be {self.num_classes} different names, as num_classes says"
            )
        if self.method == "lora" and self.lora.use_dora and self.model.quantization != "none":
            raise ValueError("lora.use_dora needs model.quantization none: NF4 has no rows")
        if isinstance(self.model.resident, int):
            self._check_streaming(self.model.resident)
        if self.method == "full" and self.model.quantization != "none":
            raise ValueError("method full needs model.quantization none: NF4 weights are frozen")
        if self.distillation is not None and self.task != "causal-lm":
            raise ValueError("distillation needs task causal-lm")
        if self.on_policy_answers == self.training.batch_size and not self.training.max_steps:
            raise ValueError(
                "training.max_steps is required where all samples of a step are answers"
                " (distillation.on_policy.fraction): no corpus says how long the run is"
            )
        if self.distillation is not None and self.data.validation_fraction:
            raise ValueError(
                "data.validation_fraction must be 0 with distillation: a teacher's logits"
                " cannot be held out; give data.validation"
            )
        if self.training.early_stopping_patience and not (
            self.may_validate and self.training.evaluate_every
        ):
            raise ValueError(
                "training.early_stopping_patience counts validations: set training.evaluate_every,"
                " and data.validation or data.validation_fraction"
            )
        if self.training.sample_prompts is not None and self.task == "classify":
            raise ValueError("training.sample_prompts needs another task: a class is not an answer")
        if self.training.pack and self.task != "causal-lm":
            raise ValueError("training.pack needs task causal-lm: a row has one class or answer")
        if self.task == "dpo":
            self._check_reference()
        if self.training.precision == "fp32" and self.model.dtype != "float32":
            raise ValueError(
                "training.precision fp32 needs model.dtype float32: products take the stored format"
            )
        return self

    def _check_streaming(self, resident: int) -> None:
        """Check that layers that are not resident can be read at each use."""
        why = None
        if self.method == "full":
            why = "method lora: weights that train are in memory"
        elif self.lora.use_dora:
            why = "lora.use_dora false: its norms are those of weights in memory"
        if why is not None:
            raise ValueError(f"model.resident {resident} needs {why}")

    def _check_reference(self) -> None:
        """Check that the reference can be computed by the same model."""
        if self.method == "full":
            raise ValueError("task dpo needs method lora: its reference is the base, which stays")
        if self.lora.modules_to_save:
            raise ValueError(
                "task dpo does not support lora.modules_to_save: its reference has the base's; "
                "merge"
                " what was trained into a model, and begin from that"
            )

    @property
    def may_validate(self) -> bool:
        """Whether data is held out; a script's data tells that later."""
        held_out = self.data.validation is not None or self.data.validation_fraction > 0
        return held_out or self.task == SCRIPT

    @property
    def has_reference(self) -> bool:
        """Whether task `dpo` compares with an adapter, not with the base alone."""
        return self.task == "dpo" and self.model.adapter is not None

    @property
    def on_policy_answers(self) -> int:
        """Samples of a step that the student generates itself."""
        own = self.distillation.on_policy if self.distillation else None
        return own.count_answers(self.training.batch_size) if own else 0

    @property
    def rows_per_sample(self) -> int:
        """Rows of a sample: its two answers for task `dpo`."""
        return 2 if self.task == "dpo" else 1

    @property
    def freezes_a(self) -> bool:
        """Whether adapters train, and only their B."""
        return self.method == "lora" and self.lora.freeze_a

    def freezes_full(self, resident: int | None) -> bool:
        """Return whether a full model is used, not trained: it is in NF4, or its layers are read.

        Args:
            resident: layers that stay in memory; None: all.
        """
        is_stored = resident is not None or self.model.quantization != "none"
        return self.method == "full" and is_stored

    @property
    def classes(self) -> Classes | None:
        """The classes of a `classify` task: their names, or how many there are."""
        return self.class_names or self.num_classes

    @property
    def rate_unit(self) -> str:
        """The unit of a run's speed: a script's samples have no tokens."""
        return "samples" if self.task == SCRIPT else "tokens"

    def resolve_precision(self, *, accelerator: bool) -> Precision:
        """Return the precision of matrix products by torch on a device."""
        if self.training.precision != "auto":
            return self.training.precision
        if self.task == SCRIPT:
            return "fp32"
        return "bf16" if accelerator or self.model.dtype == "bfloat16" else "fp32"

    @property
    def save_intervals(self) -> tuple[int, int]:
        """The intervals at whose ends a run is saved, in steps; 0 for none."""
        return self.checkpoint.every, self.training.evaluate_every

    def list_changes(self, other: RunConfig) -> list[str]:
        """Return the settings that differ and fix a run on resume, as `key: this -> that`."""
        mine, theirs = self._shared_settings(), other._shared_settings()
        return [
            f"{key}: {mine.get(key)} -> {theirs.get(key)}"
            for key in sorted({*mine, *theirs})
            if mine.get(key) != theirs.get(key) and key not in RESUME_MAY_CHANGE
        ]

    def agreement_digest(self) -> str:
        """Return the BLAKE2b hex digest of every setting that all members must share.

        That is every setting but `MEMBERS_MAY_DIFFER`; model and data contents have digests of
        their own.
        """
        text = json.dumps(self._shared_settings(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def flatten_settings(self) -> dict[str, Any]:
        """Return every setting by its dotted path, as JSON has it."""
        return _flatten(self.model_dump(mode="json"))

    def _shared_settings(self) -> dict[str, Any]:
        """Return the settings that members share, by their dotted paths."""
        tree = self.model_dump(mode="json")
        if self.training.max_steps is not None:
            del tree["training"]["epochs"]  # the steps decide
        for name in RoundSettings.model_fields:
            del tree["exchange"][name]  # what remains of them is in `shared_settings`
        tree["exchange"]["rounds"] = self.exchange.shared_settings(*self.save_intervals)
        return {
            key: value
            for key, value in _flatten(tree).items()
            if not any(f"{key}.".startswith(f"{path}.") for path in MEMBERS_MAY_DIFFER)
        }

    def with_settings(self, changes: Mapping[str, Any]) -> RunConfig:
        """Return the config with other values, by their dotted paths.

        Raises:
            InputError: a key or value is wrong (names its path).
        """
        return settings.build_settings(
            RunConfig, self.model_dump(exclude_unset=True), changes, "settings"
        )

    def anchor_paths(self, folder: Path, *, model_on_hub: bool) -> RunConfig:
        """Return the config with absolute paths; relative ones are taken from `folder`.

        `SCRIPT` is none.

        Args:
            model_on_hub: `model.path` is a hub name, and is kept.
        """
        none = (None, SCRIPT if self.task == SCRIPT else None)

        def anchor_section(part: Section, *names: str) -> Any:
            given = {name: path for name in names if (path := getattr(part, name)) not in none}
            paths = {name: anchor_path(path, folder) for name, path in given.items()}
            return part.model_copy(update=paths)

        return anchor_section(self, "output").model_copy(
            update={
                "model": anchor_section(
                    self.model, *(() if model_on_hub else ("path",)), "adapter"
                ),
                "data": anchor_section(self.data, "train", "validation"),
                "training": anchor_section(self.training, "sample_prompts"),
                "checkpoint": anchor_section(self.checkpoint, "folder"),
            }
        )

    def to_yaml(self, *, exclude_unset: bool = False) -> str:
        """Return the config as YAML that `load_config` reads back equal."""
        tree = self.model_dump(mode="json", exclude_unset=exclude_unset)
        return yaml.safe_dump(tree, sort_keys=False)


def anchor_path(path: str, folder: Path) -> str:
    """Return an absolute path, a relative one taken from `folder`; names on the hub are kept."""
    if path.startswith(DATA_ON_HUB):
        return path
    return str((folder / Path(path).expanduser()).absolute())


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of sections under their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flatten(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def list_presets() -> dict[str, Path]:
    """Return the shipped presets by name."""
    folder = Path(str(resources.files("trainer.presets")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def setting_keys() -> list[str]:
    """Return the dotted paths of every setting."""
    return settings.setting_keys(RunConfig)


def is_preset(source: str | Path | None) -> bool:
    """Return whether a source is the name of a preset, and no file."""
    return str(source) in list_presets() and not Path(str(source)).exists()


def load_config(source: str | Path | None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a run config from a YAML file or a preset's name and apply dotted overrides.

    `overrides` maps paths such as `training.epochs` to values; None is null.

    Raises:
        InputError: the file cannot be read, or a key or value is wrong (names its path).
    """
    given = dict(overrides or {})
    if not {"data.train", "data"}.isdisjoint(given) and is_preset(source):
        if isinstance(given.get("data"), Mapping):  # the whole section
            data: Mapping[str, Any] = given["data"]
            given |= {f"data.{key}": value for key, value in data.items()} | given
        given.setdefault("data.validation", None)  # a preset's is of its own data
        if not given["data.validation"] and not given.get("data.validation_fraction"):
            given.setdefault("training.evaluate_every", 0)
    return load_settings(RunConfig, source, list_presets(), given)
