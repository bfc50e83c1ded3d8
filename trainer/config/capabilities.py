"""The settings and backends that an engine refuses, each with a sentence; it follows all others.

This is the only place that says so. A setting that is in no row fails a test; docs/config.md shows
the table, and that of the settings that are used only with a value of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from trainer.config.exchange import MIN_RING_SIZE
from trainer.config.lora import LoraSettings
from trainer.system.backends import BACKENDS, TORCH_BACKENDS, Backend, RequestedBackend
from trainer.system.errors import InputError

Engine = Literal[
    "exchange", "ring", "ranks", "parallel", "ddp", "fsdp", "tensor", "student", "wgpu", "script"
]
ENGINE_TITLES: Mapping[Engine, str] = {
    "exchange": "a coordinator and workers, or one process",
    "ring": "`exchange.topology` ring",
    "ranks": "`--distributed`",
    "parallel": "processes that share a model, by the section `parallel`",
    "ddp": "`--strategy ddp`",
    "fsdp": "`--strategy fsdp`",
    "tensor": "`--strategy tensor`",
    "student": "`trainer distill student`",
    "wgpu": "devices through Vulkan",
    "script": "a script of your own, `--script`",
}


@dataclass(frozen=True)
class Refusal:
    """A setting that engines do not follow."""

    name: str
    """The setting's dotted path, or a section's; with the value where only one is refused:
    `task dpo`."""
    engines: tuple[Engine, ...]
    sentence: str
    """The fault and the remedy; `{name}` and `{value}` are filled in."""
    refused: Callable[[Any], bool] | None = None
    """Whether a value is refused; None: all but the default."""

    @property
    def setting(self) -> str:
        """The dotted path."""
        return self.name.partition(" ")[0]

    def explain(self, config: BaseModel) -> str | None:
        """Return the sentence if a config has a refused value."""
        value, default = _read_setting(config, self.setting)
        if only := self.name.partition(" ")[2]:
            refused = value == only
        else:
            refused = self.refused(value) if self.refused else value != default
        return self.sentence.format(name=self.name, value=value) if refused else None


@dataclass(frozen=True)
class Condition:
    """Settings that are used only with some values of others."""

    settings: tuple[str, ...]
    """Dotted paths."""
    needs: str
    """The other setting with its values."""
    is_met: Callable[[Any], bool]
    """Whether a run config has them."""


_WHOLE_MODEL = (
    "lora.freeze_a",
    "lora.layers_to_transform",
    "lora.use_dora",
    "lora.modules_to_save",
    "model.adapter",
    "training.label_smoothing",
    "training.class_weights",
    "training.sample_prompts",
    "task dpo",
)
_OF_LANGUAGE_MODELS = (
    *_WHOLE_MODEL,
    *("method lora", "num_classes", "class_names", "dpo.beta", "distillation"),
    *("model.dtype", "model.quantization", "model.resident", "training.sample_every"),
    *("data.validation", "data.validation_fraction", "data.max_seq_len", "data.lost_text"),
    *("data.date", "data.columns", "training.pack", "training.gradient_checkpointing"),
    *("lora.lora_rank", "lora.lora_alpha", "lora.target_modules", "lora.target_parameters"),
    *("lora.use_rslora", "training.sample_tokens"),
)
"""Settings of which a script has its own, or no use."""
_PATHS = ("model.path", "data.train")
"""Paths that are `trainer.config.run.SCRIPT` if a script has the model and data."""
_OWN = "{name}: a script has its own model, data and loss; leave it out"
_ABLE = " or ".join(TORCH_BACKENDS)
_TORCH = f"--gpu-backend {_ABLE}"
_ROUNDS = (
    "exchange.schedule: {engine} has no rounds, which need a coordinator and workers; leave it out"
)
_ONE_PROCESS: tuple[Engine, ...] = ("exchange", "student")
_CHOSEN_BY_SETTINGS: tuple[Engine, ...] = ("ring", "parallel")
_STARTED_TOGETHER: tuple[Engine, ...] = ("ranks", "ddp", "fsdp", "tensor")
_PARALLEL = ("parallel.data", "parallel.tensor", "parallel.pipeline.stages")
_COORDINATOR_SETTINGS = (
    "exchange.codec",
    "exchange.split",
    "exchange.heartbeat",
    "exchange.lost_after",
    "exchange.step_deadline",
    "exchange.alarm_factor",
    "exchange.outliers",
    "exchange.shared_memory",
)
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "exchange.topology",
        _ONE_PROCESS,
        "exchange.topology ring: it has no coordinator, no worker that joins later, and at least"
        f" {MIN_RING_SIZE} ranks; start them all with `launch cluster up`, or with `torchrun"
        f" --nproc-per-node {MIN_RING_SIZE} -m trainer finetune --distributed`",
    ),
    Refusal(
        "exchange.codec",
        ("ring",),
        "exchange.codec must be fp32 with topology ring, which sums without a coordinator, and"
        " nothing decodes on the way",
    ),
    Refusal(
        "exchange.schedule",
        ("ring",),
        "exchange.schedule must be steps with topology ring, which has no coordinator, which"
        " rounds need",
    ),
    Refusal(
        "exchange.split",
        ("ring",),
        "exchange.split must not be a list with topology ring: its workers are equal",
        lambda split: not isinstance(split, str),
    ),
    *(
        Refusal(
            setting,
            ("ring",),
            "exchange.topology ring needs a whole model on each worker: leave parallel out, or"
            " start its processes with torchrun and without the topology",
        )
        for setting in _PARALLEL
    ),
    *(
        Refusal(
            setting,
            _ONE_PROCESS,
            "parallel: only --distributed shares a model; leave the section out",
        )
        for setting in _PARALLEL
    ),
    Refusal(
        "checkpoint.sharded",
        _ONE_PROCESS,
        "checkpoint.sharded: only the ranks of --distributed have parts to save; leave it out, or"
        " start with --distributed",
    ),
    Refusal("exchange.schedule", ("ranks",), _ROUNDS.format(engine="--distributed")),
    Refusal("exchange.schedule", ("student",), _ROUNDS.format(engine="a student on its own")),
    *(
        Refusal(
            setting,
            ("ranks",),
            "{name} {value}: needs a coordinator, which --distributed does not have; leave it out",
        )
        for setting in _COORDINATOR_SETTINGS
    ),
    *(
        Refusal(
            setting,
            ("student",),
            "{name} {value}: needs a run of several, which a student on its own is not; leave it"
            " out",
        )
        for setting in (*_COORDINATOR_SETTINGS, "exchange.hash_every", "exchange.join_deadline")
    ),
    Refusal(
        "distillation",
        ("ring",),
        "exchange.topology ring trains on samples, not on a teacher's logits: leave it at star",
    ),
    Refusal(
        "distillation",
        ("ranks",),
        "distillation: --distributed trains on samples, not on a teacher's logits; leave it out,"
        " or use a replica group with --strategy ddp",
    ),
    *(
        Refusal(
            "distillation",
            (strategy,),
            f"--strategy {strategy} does not compute a teacher's soft targets; use ddp",
        )
        for strategy in ("fsdp", "tensor")
    ),
    *(Refusal(name, ("script",), _OWN, lambda path: path != "script") for name in _PATHS),
    *(Refusal(name, ("script",), _OWN) for name in _OF_LANGUAGE_MODELS),
    Refusal(
        "training.precision fp16",
        ("script",),
        "training.precision fp16: a script's loss is not scaled; use bf16 or fp32",
    ),
    Refusal(
        "task script",
        (*_CHOSEN_BY_SETTINGS, *_STARTED_TOGETHER),
        "task script: only whole models in one process, or with a coordinator, train a script",
    ),
    Refusal(
        "distillation.on_policy",
        ("exchange",),
        "distillation.on_policy: a run of several workers does not write answers of its own; leave"
        " it out, or train with `trainer distill student`",
    ),
    *(
        Refusal(name, engines, sentence)
        for name in _WHOLE_MODEL
        for engines, sentence in (
            (
                _CHOSEN_BY_SETTINGS,
                "{name} needs a whole model in each worker and a coordinator: leave parallel out"
                " and exchange.topology at star",
            ),
            (
                _STARTED_TOGETHER,
                "{name}: processes that share a model, or are ranks of --distributed, do not "
                "support it; leave it out, or train with a coordinator and whole models",
            ),
        )
    ),
    Refusal(
        "model.resident",
        (*_CHOSEN_BY_SETTINGS, *_STARTED_TOGETHER),
        "model.resident {value}: only a worker of a coordinator reads layers at each use; use "
        "all or auto",
        lambda resident: isinstance(resident, int),
    ),
    Refusal(
        "distillation.divergence",
        ("wgpu",),
        "distillation.divergence {value} is not computed by the wgpu engine, only forward is: use"
        f" {_TORCH}",
    ),
    Refusal(
        "lora.use_dora",
        ("wgpu",),
        f"lora.use_dora: wgpu does not scale the rows of a product; leave it out, or use {_TORCH}",
    ),
    Refusal(
        "lora.modules_to_save",
        ("wgpu",),
        "lora.modules_to_save: wgpu does not train tables besides adapters; leave it out, or use"
        f" {_TORCH}",
    ),
    Refusal(
        "task dpo",
        ("wgpu",),
        f"task dpo: wgpu does not compare answers; use {_TORCH}, or another task",
    ),
    Refusal(
        "training.label_smoothing",
        ("wgpu",),
        "training.label_smoothing: wgpu computes the loss of one class a sample; leave it out, or"
        f" take {_TORCH}",
    ),
    Refusal(
        "training.precision",
        ("wgpu",),
        f"training.precision {{value}}: wgpu computes in fp32; leave it at auto, or use {_TORCH}",
        lambda precision: precision in ("bf16", "fp16"),
    ),
)
"""In the order in which they are reported."""

CONDITIONS: tuple[Condition, ...] = (
    Condition(
        (
            "exchange.inner_steps",
            "exchange.rounds_after",
            "exchange.outer_learning_rate",
            "exchange.outer_momentum",
            "exchange.flush_every",
        ),
        "exchange.schedule rounds",
        lambda config: config.exchange.has_rounds,
    ),
    Condition(
        tuple(f"lora.{name}" for name in LoraSettings.model_fields),
        "method lora",
        lambda config: config.method == "lora",
    ),
    Condition(("dpo.beta",), "task dpo", lambda config: config.task == "dpo"),
    Condition(
        ("training.label_smoothing", "training.class_weights"),
        "task classify",
        lambda config: config.task == "classify",
    ),
    Condition(
        ("training.sample_every", "training.sample_tokens"),
        "training.sample_prompts",
        lambda config: config.training.sample_prompts is not None,
    ),
    Condition(
        ("training.evaluate_every",),
        "data.validation or data.validation_fraction",
        lambda config: config.may_validate,
    ),
    Condition(
        ("optimizer.final_ratio",),
        "optimizer.scheduler linear, cosine or wsd",
        lambda config: config.optimizer.scheduler != "constant",
    ),
    Condition(
        ("parallel.pipeline.schedule", "parallel.pipeline.microbatches"),
        "parallel.pipeline.stages 2 or more",
        lambda config: config.parallel.pipeline.stages > 1,
    ),
    Condition(
        ("distillation.temperature", "distillation.divergence"),
        "distillation.alpha, alpha_final or on_policy",
        lambda config: config.distillation is None or config.distillation.has_divergence,
    ),
    Condition(
        ("distillation.on_policy.beta",),
        "distillation.on_policy.divergence jsd",
        lambda config: config.distillation.on_policy.divergence == "jsd",
    ),
)
"""In the order in which they are reported."""

NEEDS_TORCH: tuple[Engine, ...] = ("ring", "ranks", "parallel", "ddp", "fsdp", "tensor")
"""Engines of torch.distributed: they refuse a backend on which torch does not compute."""

_SUPPORTED = """
name output tracking
optimizer.learning_rate optimizer.scheduler optimizer.warmup_ratio optimizer.decay_ratio
optimizer.final_ratio optimizer.weight_decay optimizer.beta1 optimizer.beta2 optimizer.epsilon
optimizer.max_grad_norm
training.epochs training.max_steps training.batch_size training.micro_batch_size
training.seed training.evaluate_every training.early_stopping_patience
exchange.inner_steps exchange.rounds_after exchange.outer_learning_rate exchange.outer_momentum
exchange.flush_every
checkpoint.every checkpoint.keep_last checkpoint.folder
parallel.sequence parallel.pipeline.schedule parallel.pipeline.microbatches parallel.timeout
distillation.alpha distillation.alpha_final distillation.temperature
distillation.on_policy.prompts distillation.on_policy.fraction
distillation.on_policy.max_new_tokens distillation.on_policy.temperature
distillation.on_policy.staleness distillation.on_policy.divergence distillation.on_policy.beta
budget.ceiling budget.currency budget.idle_stop budget.hosts budget.ledger
"""
SUPPORTED_BY_ALL = frozenset(_SUPPORTED.split())
"""Settings that no engine refuses, if it has what they are about (`parallel.timeout`: several
processes). A setting of a section that is refused as a whole is here too."""


def explain_refusal(config: BaseModel, *engines: Engine) -> str | None:
    """Return the first sentence by which engines refuse a config; None if they follow it."""
    rows = (row for row in REFUSALS if not {*engines}.isdisjoint(row.engines))
    return next((sentence for row in rows if (sentence := row.explain(config))), None)


def explain_unused(config: BaseModel) -> str | None:
    """Return a sentence on the first setting that a run config would not use; None: there is none.

    A default is not one: a file may list all settings.
    """
    for row in CONDITIONS:
        for setting in row.settings:
            value, default = _read_setting(config, setting)
            if value != default and not row.is_met(config):
                return f"{setting} {value}: used only with {row.needs}; leave it out, or set that"
    return None


def check_capability(config: BaseModel, *engines: Engine) -> None:
    """Check that engines follow every setting that a config has.

    Raises:
        InputError: one refuses a setting.
    """
    if sentence := explain_refusal(config, *engines):
        raise InputError(sentence)


def check_backend(backend: RequestedBackend, engine: Engine) -> None:
    """Check that an engine computes on a requested backend; `auto` becomes one of its own.

    Raises:
        InputError: it does not.
    """
    if backend != "auto" and (sentence := explain_backend(backend, engine)):
        raise InputError(f"--gpu-backend {backend}: {sentence}")


def explain_backend(backend: Backend, engine: Engine) -> str | None:
    """Return the sentence by which an engine refuses a backend; None if it computes there."""
    if engine not in NEEDS_TORCH or BACKENDS[backend].has_torch:
        return None
    title = ENGINE_TITLES[engine].replace("`", "")
    return f"{title} runs on {_ABLE}"


def _read_setting(config: BaseModel, path: str) -> tuple[Any, Any]:
    """Return a setting's value and its default; twice None where its section is absent."""
    *sections, name = path.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part)
        if section is None:
            return None, None
    field = type(section).model_fields[name]
    return getattr(section, name), field.get_default(call_default_factory=True)
