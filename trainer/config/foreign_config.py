"""Configs of other trainers: which of their keys become settings of a run, and which do not.

Each program has one table (F-IN-001). A used key becomes settings, a harmless one changes nothing
that is learned here, a refused one would and has no counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from trainer.config.dataset_info import NoSettingError, make_list_rule, resolve_data_set
from trainer.config.foreign_defaults import AXOLOTL_DEFAULTS, FACTORY_DEFAULTS
from trainer.config.notifications import Tracker
from trainer.system.key_table import KeyTable

Settings = dict[str, Any]
Tree = Mapping[str, Any]
_TABLES = ("lm_head", "embed_tokens", "wte", "score")
"""Modules that are no linears of a layer."""

Rule = Callable[[Any, Tree], Settings]
"""Returns the settings of a key's value; the tree has the other keys.

Raises:
    NoSettingError: there are none.
"""


@dataclass
class ConvertedConfig:
    """A config of another trainer, converted to settings."""

    settings: Settings = field(default_factory=dict[str, Any])
    """By their dotted paths."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Keys that were not converted, with the reason and what to do."""
    assumed: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys that the config lacks, with the program's own defaults, which were taken."""


@dataclass(frozen=True)
class Program:
    """A trainer whose configs are read."""

    name: str
    signatures: tuple[frozenset[str], ...]
    """Groups of keys that identify its configs: all of one group are present."""
    rules: Mapping[str, Rule]
    keys: KeyTable
    defaults: Mapping[str, Any]
    """The program's defaults of keys that a config lacks, where they change what is learned."""
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys whose value is a name in dataset_info.json, and the setting of each."""


def detect_program(tree: Tree) -> Program | None:
    """Return the program that a config of other keys than ours is written for."""
    return next((one for one in PROGRAMS if any(s <= tree.keys() for s in one.signatures)), None)


def convert_config(program: Program, tree: Tree, folder: Path) -> ConvertedConfig:
    """Return the settings that a config of a program stands for, and the keys that are left.

    Args:
        folder: the config's.
    """
    taken = ConvertedConfig({"task": "causal-lm"})
    tree = {key: tree[key] for key in tree if tree[key] is not None or key not in program.defaults}
    assumed = {key: value for key, value in program.defaults.items() if key not in tree}
    if "lora_alpha" in assumed and assumed["lora_alpha"] is None:  # LLaMA-Factory: twice the rank
        rank = tree.get("lora_rank", assumed.get("lora_rank"))
        assumed["lora_alpha"] = 2 * rank if type(rank) is int else None
    if tree.get("max_steps", 0) not in (-1, 0):
        assumed.pop("num_train_epochs", None)  # steps end the run there
    if "warmup_steps" in tree:
        assumed.pop("warmup_ratio", None)
    whole: Tree = {**assumed, **tree}
    for key, value in whole.items():
        try:
            if (refusal := program.keys.explain_refusal([key])) is not None and value not in _OFF:
                taken.skipped[key] = refusal.removeprefix(f"'{key}' ")
            elif program.keys.find_unknown([key]):
                taken.skipped[key] = "is not known"
            elif key in program.rules and value is not None:
                taken.settings |= program.rules[key](value, whole)
            elif key in program.named and value is not None:
                found = resolve_data_set(value, program.named[key], tree, folder)
                columns = found["data.columns"]
                if taken.settings.get("data.columns", columns) != columns:
                    raise NoSettingError(f"{value!r} has other columns; write both files alike")
                taken.settings |= found
        except NoSettingError as why:
            if key in tree:  # a default fails with the key given that its rule combines it with
                taken.skipped[key] = str(why)
    full, given = taken.settings.setdefault("method", "full") == "full", taken.settings.items()
    unused = ("lora.",) * full + ("dpo.",) * (taken.settings["task"] != "dpo")
    if not {"data.validation", "data.validation_fraction"} & taken.settings.keys():
        unused += ("training.evaluate_every",)
    taken.settings = {key: value for key, value in given if not key.startswith(unused)}
    assumed = {key: each for key, each in assumed.items() if not (full and key.startswith("lora_"))}
    if taken.settings["task"] == "dpo":
        for key, (setting, why) in _REFERENCE.items():
            if key in program.rules and taken.settings.pop(setting, None) is not None:
                taken.skipped[key] = why
    taken.assumed = {key: assumed[key] for key in assumed if assumed[key] is not None}
    return taken


_REFERENCE = {
    **dict.fromkeys(
        ("lora_modules_to_save", "additional_target"),
        ("lora.modules_to_save", "trains a table whole; the reference of DPO has the base's"),
    ),
    **dict.fromkeys(
        ("lora_model_dir", "adapter_name_or_path"),
        (
            "model.adapter",
            "there the reference may be the base alone, here it has the adapter too: set"
            " model.adapter if that is meant",
        ),
    ),
}
"""Keys that would change the reference of DPO: their settings, and why."""
_OFF = (None, False, 0, "", [], {}, "none", "no")


def _copy_to(setting: str) -> Rule:
    return lambda value, _: {setting: value}


def _accept_only(*accepted: Any, instead: str) -> Rule:
    """Return the rule of a key whose other values would change the computation."""

    def convert(value: Any, _: Tree) -> Settings:
        if value not in accepted:
            raise NoSettingError(f"{value!r}: {instead}")
        return {}

    return convert


def _convert_stage(value: Any, _: Tree) -> Settings:
    if value == "dpo":
        return {"task": "dpo"}
    if value not in ("sft", "pt"):
        raise NoSettingError(
            f"{value!r}: Motley fine-tunes (sft), pre-trains (pt) and compares (dpo)"
        )
    return {}


def _make_batch_size_rule(per_device: str) -> Rule:
    def convert(_: Any, tree: Tree) -> Settings:
        counts = (tree.get(per_device, 1), tree.get("gradient_accumulation_steps", 1))
        if not all(isinstance(count, int) for count in counts):
            raise NoSettingError("is not a number; set training.batch_size")
        return {"training.batch_size": counts[0] * counts[1]}

    return convert


def _convert_adapter(value: Any, _: Tree) -> Settings:
    known: dict[Any, Settings] = {
        "lora": {"method": "lora"},
        "qlora": {"method": "lora", "model.quantization": "nf4"},
        "full": {"method": "full"},
        "": {"method": "full"},
    }
    if value not in known:
        raise NoSettingError(f"{value!r}: Motley trains lora, qlora or full; set method")
    return known[value]


def _convert_bits(value: Any, _: Tree) -> Settings:
    if value is False:
        return {}
    if value not in (4, True):
        raise NoSettingError(f"{value!r}: a frozen base is stored in 4 bits (nf4) or 16")
    return {"model.quantization": "nf4"}


def _convert_targets(value: Any, _: Tree) -> Settings:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names in ("all", "all-linear", ["all"], ["all-linear"]):
        return {}  # the default, PEFT's `all-linear`
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise NoSettingError(f"{value!r}: name the linears, such as [q_proj, v_proj]")
    other = [name for name in names if name in _TABLES or not re.fullmatch(r"[\w.]+", name)]
    if other:
        raise NoSettingError(
            f"{', '.join(other)}: is not a linear of a layer; set lora.target_modules"
        )
    return {"lora.target_modules": names}


def _convert_axolotl_targets(value: Any, tree: Tree) -> Settings:
    return {} if tree.get("lora_target_linear") else _convert_targets(value, tree)


def _convert_parameters(value: Any, _: Tree) -> Settings:
    return {"lora.target_parameters": [value] if isinstance(value, str) else list(value)}


def _convert_epochs(value: Any, _: Tree) -> Settings:
    if not isinstance(value, int | float) or value != int(value) or value < 1:
        raise NoSettingError(f"{value!r} is not a whole number of epochs; set training.max_steps")
    return {"training.epochs": int(value)}


def _convert_saved_modules(value: Any, _: Tree) -> Settings:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return {"lora.modules_to_save": list(names)}


def _make_precision_rule(name: str) -> Rule:
    def convert(value: Any, _: Tree) -> Settings:
        if value in ("auto", False):
            return {}
        if value is not True:
            raise NoSettingError(f"{value!r}: set training.precision")
        return {"training.precision": name}

    return convert


def _convert_checkpointing(value: Any, _: Tree) -> Settings:
    return {"training.gradient_checkpointing": "on" if value else "off"}


def _convert_warmup_steps(value: Any, tree: Tree) -> Settings:
    steps = tree.get("max_steps")
    if not isinstance(value, int | float) or (value >= 1 and not isinstance(steps, int)):
        raise NoSettingError("is a number of steps; set the fraction optimizer.warmup_ratio")
    return {"optimizer.warmup_ratio": value if value < 1 else value / max(steps or 1, 1)}


_SCHEDULERS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "warmup_stable_decay": "wsd",
}


def _convert_scheduler(value: Any, tree: Tree) -> Settings:
    if value not in _SCHEDULERS:
        raise NoSettingError(f"{value!r}: set optimizer.scheduler ({', '.join(_SCHEDULERS)})")
    final = tree.get("cosine_min_lr_ratio") or 0  # of transformers' schedulers, if none is given
    falls = {} if (name := _SCHEDULERS[value]) == "constant" else {"optimizer.final_ratio": final}
    return {"optimizer.scheduler": name, **falls}


def _convert_fraction(value: Any, _: Tree) -> Settings:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise NoSettingError("is a number of samples; set the fraction data.validation_fraction")
    return {"data.validation_fraction": value} if value else {}


def _make_steps_rule(setting: str) -> Rule:
    def convert(value: Any, _: Tree) -> Settings:
        if not isinstance(value, int) or value < 1:
            raise NoSettingError(f"{value!r} is not a number of steps; set {setting}")
        return {setting: value}

    return convert


def _convert_trackers(value: Any, _: Tree) -> Settings:
    if value in ("all", ["all"]):  # of those that are installed, which is a matter of the machine
        return {}
    names = [] if value in ("none", ["none"]) else value if isinstance(value, list) else [value]
    known = get_args(Tracker)
    if not all(name in known for name in names):
        raise NoSettingError(f"{value!r}: trackers are {', '.join(known)}; set tracking")
    return {"tracking": names}


_SHARED: dict[str, Rule] = {
    "lora_alpha": _copy_to("lora.lora_alpha"),
    "lora_dropout": _accept_only(0, 0.0, instead="adapters have no dropout; leave it out"),
    "learning_rate": _copy_to("optimizer.learning_rate"),
    "weight_decay": _copy_to("optimizer.weight_decay"),
    "adam_beta1": _copy_to("optimizer.beta1"),
    "adam_beta2": _copy_to("optimizer.beta2"),
    "adam_epsilon": _copy_to("optimizer.epsilon"),
    "max_grad_norm": _copy_to("optimizer.max_grad_norm"),
    "warmup_ratio": _copy_to("optimizer.warmup_ratio"),
    "warmup_steps": _convert_warmup_steps,
    "max_steps": _make_steps_rule("training.max_steps"),
    "eval_steps": _make_steps_rule("training.evaluate_every"),
    "save_steps": _make_steps_rule("checkpoint.every"),
    "save_total_limit": _make_steps_rule("checkpoint.keep_last"),
    "seed": _copy_to("training.seed"),
    "output_dir": _copy_to("output"),
    "report_to": _convert_trackers,
    "bf16": _make_precision_rule("bf16"),
    "fp16": _make_precision_rule("fp16"),
    "gradient_checkpointing": _convert_checkpointing,
    "gradient_accumulation_steps": _make_batch_size_rule("micro_batch_size"),
    "train_on_inputs": _accept_only(False, instead="only answers are learned"),
}
_ADAMW = _accept_only(
    *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit"),
    *("paged_adamw_8bit", "paged_adamw_32bit"),
    instead="the optimizer is AdamW; leave it out",
)
_LOGGING = frozenset(
    (
        *("logging_steps", "wandb_project", "wandb_entity", "wandb_name"),
        *("wandb_watch", "wandb_run_id", "wandb_log_model", "mlflow_tracking_uri", "plot_loss"),
        *("hub_model_id", "push_to_hub", "hub_strategy", "run_name", "use_tensorboard"),
        *("tf32", "dataloader_num_workers", "dataloader_pin_memory", "ddp_timeout", "seed_data"),
        *("group_by_length", "overwrite_output_dir", "save_only_model", "save_safetensors"),
        *("gradient_checkpointing_kwargs", "trust_remote_code", "logging_dir", "debug"),
    )
)
"""Speed, logs and uploads."""
_ROPE = "changes the positions; Motley takes them from config.json"
_PARALLEL = "splits the model; set the section parallel (docs/strategies.md)"
_SHARED_REFUSED = {
    "deepspeed": _PARALLEL,
    "fsdp": _PARALLEL,
    "fsdp_config": _PARALLEL,
    "neftune_noise_alpha": "adds noise to inputs, which Motley does not",
}
_AXOLOTL: dict[str, Rule] = {
    **_SHARED,
    "base_model": _copy_to("model.path"),
    "lora_model_dir": _copy_to("model.adapter"),
    "datasets": make_list_rule("data.train"),
    "test_datasets": make_list_rule("data.validation"),
    "val_set_size": _convert_fraction,
    "adapter": _convert_adapter,
    "rl": _convert_stage,
    "rl_beta": _copy_to("dpo.beta"),
    "dpo_beta": _copy_to("dpo.beta"),
    "load_in_4bit": _convert_bits,
    "lora_r": _copy_to("lora.lora_rank"),
    "lora_modules_to_save": _convert_saved_modules,
    "peft_use_dora": _copy_to("lora.use_dora"),
    "peft_use_rslora": _copy_to("lora.use_rslora"),
    "lora_target_modules": _convert_axolotl_targets,
    "lora_target_parameters": _convert_parameters,
    "early_stopping_patience": _make_steps_rule("training.early_stopping_patience"),
    "sequence_len": _copy_to("data.max_seq_len"),
    "sample_packing": _copy_to("training.pack"),
    "micro_batch_size": _make_batch_size_rule("micro_batch_size"),
    "num_epochs": _convert_epochs,
    "lr_scheduler": _convert_scheduler,
    "optimizer": _ADAMW,
    "cosine_min_lr_ratio": _copy_to("optimizer.final_ratio"),
}
_FACTORY: dict[str, Rule] = {
    **_SHARED,
    "model_name_or_path": _copy_to("model.path"),
    "adapter_name_or_path": _copy_to("model.adapter"),
    "stage": _convert_stage,
    "pref_beta": _copy_to("dpo.beta"),
    "pref_loss": _accept_only("sigmoid", instead="the loss is DPO's own; leave it out"),
    "finetuning_type": _convert_adapter,
    "quantization_bit": _convert_bits,
    "lora_rank": _copy_to("lora.lora_rank"),
    "additional_target": _convert_saved_modules,
    "use_dora": _copy_to("lora.use_dora"),
    "use_rslora": _copy_to("lora.use_rslora"),
    "lora_target": _convert_targets,
    "val_size": _convert_fraction,
    "cutoff_len": _copy_to("data.max_seq_len"),
    "packing": _copy_to("training.pack"),
    "per_device_train_batch_size": _make_batch_size_rule("per_device_train_batch_size"),
    "gradient_accumulation_steps": _make_batch_size_rule("per_device_train_batch_size"),
    "num_train_epochs": _convert_epochs,
    "lr_scheduler_type": _convert_scheduler,
    "optim": _ADAMW,
}
_NAMED = {"dataset": "data.train", "eval_dataset": "data.validation"}
PROGRAMS = (
    Program(
        "axolotl",
        (frozenset(("base_model",)),),
        _AXOLOTL,
        KeyTable(
            "an axolotl config",
            frozenset(_AXOLOTL),
            harmless=_LOGGING
            | {
                *("lora_target_linear", "flash_attention", "xformers_attention", "sdp_attention"),
                *("dataset_prepared_path", "dataset_processes", "pad_to_sequence_len", "strict"),
                *("eval_sample_packing", "shuffle_merged_datasets", "low_cpu_mem_usage"),
                *("model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived"),
                *("evals_per_epoch", "saves_per_epoch", "eval_table_size", "eval_batch_size"),
                *("eval_max_new_tokens", "auto_resume_from_checkpoints", "local_rank"),
                *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "output_prefix"),
                *("resume_from_checkpoint", "lora_fan_in_fan_out", "flash_attn_cross_entropy"),
            },
            refused=_SHARED_REFUSED
            | {
                "chat_template": "is ignored: the model's own template is used",
                "load_in_8bit": "stores the base in 8 bits; set model.quantization to nf4 or none",
                "plugins": "change the training; leave them out",
                "reward_model": "trains a reward model, which Motley does not",
                "rope_scaling": _ROPE,
                "special_tokens": "change the vocabulary; save the tokenizer with them",
                "tokenizer_config": "is another tokenizer; put its files into the model's folder",
                "tokens": "change the vocabulary; save the tokenizer and the model with them",
                "unfrozen_parameters": "train a part of the model; use method lora or full",
            },
        ),
        AXOLOTL_DEFAULTS,
    ),
    Program(
        "LLaMA-Factory",
        tuple(
            frozenset(("model_name_or_path", sign))
            for sign in ("stage", "finetuning_type", "template", "dataset")
        ),
        _FACTORY,
        KeyTable(
            "a LLaMA-Factory config",
            frozenset((*_FACTORY, *_NAMED, "dataset_dir")),
            harmless=_LOGGING
            | {
                *("do_train", "do_eval", "overwrite_cache", "flash_attn"),
                *("preprocessing_num_workers", "per_device_eval_batch_size", "eval_strategy"),
                *("evaluation_strategy", "save_strategy", "cache_dir", "use_fast_tokenizer"),
                *("quantization_method", "ray_run_name", "include_num_input_tokens_seen"),
                *("resume_from_checkpoint", "enable_liger_kernel", "use_unsloth"),
                *("double_quantization", "lora_target_linear"),
            },
            refused=_SHARED_REFUSED
            | {
                "freeze_trainable_layers": "trains a part of the model; use method lora or full",
                "mask_history": "learns the last answer alone; split the conversations",
                "max_samples": "takes a part of the data; make a shorter file",
                "pure_bf16": "keeps trained weights in 16 bits; they are fp32 here",
                "rope_scaling": _ROPE,
                "streaming": "reads data while it trains; give a file",
                "template": "is ignored: the model's own chat template is used",
                "use_galore": "is another optimizer than AdamW",
            },
        ),
        FACTORY_DEFAULTS,
        _NAMED,
    ),
)
