"""Suggest the nearest setting or option for a typo or another trainer's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

FAMILIAR = {
    "c": "config",
    "n": "tail",
    "f": "config",
    "alpha": "lora_alpha",
    "base_model": "path",
    "batch": "batch_size",
    "bs": "batch_size",
    "classes": "num_classes",
    "cutoff_len": "max_seq_len",
    "dataset": "train",
    "device": "gpu_backend",
    "eval_steps": "evaluate_every",
    "follow": "watch",
    "grad_clip": "max_grad_norm",
    "gradient_accumulation_steps": "batch_size",
    "label_smoothing_factor": "label_smoothing",
    "load_in_4bit": "quantization",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "lr": "learning_rate",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
    "max_iters": "max_steps",
    "max_length": "max_seq_len",
    "max_seq_length": "max_seq_len",
    "model_name_or_path": "path",
    "num_epochs": "epochs",
    "num_labels": "num_classes",
    "num_train_epochs": "epochs",
    "o": "output",
    "out": "output",
    "output_dir": "output",
    "per_device_train_batch_size": "batch_size",
    "preset": "config",
    "r": "lora_rank",
    "rank": "lora_rank",
    "seq_len": "max_seq_len",
    "steps": "max_steps",
    "train_file": "train",
    "val": "validation",
    "validation_file": "validation",
    "warmup": "warmup_ratio",
    "workers": "expect_workers",
}
"""Names in other trainers (PEFT, Transformers, axolotl) and short ones, with ours."""
EXPLAINED = {
    "gradient_accumulation_steps": "a batch is that of a whole step over all devices: per-device"
    " batch size x {value} x devices; each computes its part in as many micro-batches of"
    " training.micro_batch_size as it needs",
    "lora_dropout": "adapters have no dropout: which numbers it drops would depend on the device"
    " that computes a sample, and so on the assignment",
    "neftune_noise_alpha": "embeddings get no noise: which numbers it adds would depend on the"
    " device that computes a sample, and so on the assignment",
    "removed_tokens": "the probability of removed tokens always counts as tail: leave it out",
    "sum_on_host": "workers of one host no longer send one gradient: leave it out, and start equal"
    " cards of a host as one worker with --strategy ddp",
}
"""Settings of other trainers and of earlier versions without a counterpart, and why."""
OPERATOR_SETTINGS = {
    "notify": "is not taken from a config, which people share, since it is executed; give your own"
    " command as --notify COMMAND, or in ~/.config/motley/notify.yaml (docs/notifications.md)",
}
"""Former settings that are the operator's alone, by their paths."""
_FLAGS = {"train": "data", "path": "model", "output": "out", "f": "watch", "watch": "wait"}
"""Names whose option has another name in some commands."""
_FOLDERS = {"out": "into", "directory": "into", "to_dir": "into"}
"""Names of the folder that a command writes, where `--output` is something else."""


def find_nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the dotted key that is closest to `name`."""
    leaf = _normalize_name(name.rpartition(".")[2])
    leaf = FAMILIAR.get(leaf, leaf)
    return _same_leaf(leaf, keys) or _find_closest(
        leaf, {key.rpartition(".")[2]: key for key in keys}
    )


def find_nearest_option(name: str, options: Iterable[str], keys: Sequence[str]) -> str | None:
    """Return the option that is closest to `name`.

    `keys` are those that the command takes with `--set`; `--set KEY=VALUE` is an answer too.
    """
    by_name = {_normalize_name(option): option for option in options if option.startswith("--")}
    typed = _normalize_name(name)
    wanted = FAMILIAR.get(typed, typed)
    for known in (_FOLDERS.get(typed), wanted, _FLAGS.get(wanted), _FLAGS.get(typed)):
        if known in by_name:
            return by_name[known]
    key = _same_leaf(wanted, keys)
    return f"--set {key}=VALUE" if key else _find_closest(wanted, by_name)


def explain_setting(name: str, value: object) -> str:
    """Return why another trainer's setting has no counterpart, as the end of a message."""
    text = EXPLAINED.get(_normalize_name(name.rpartition(".")[2]), "")
    return f"; {text.format(value=value)}" if text else ""


def format_hint(found: str | None) -> str:
    """Return the end of a message that suggests a name; empty for none."""
    return f"; did you mean: {found}" if found else ""


def _normalize_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _same_leaf(leaf: str, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if key.rpartition(".")[2] == leaf), None)


def _find_closest(name: str, names: Mapping[str, str]) -> str | None:
    found = get_close_matches(name, names, n=1, cutoff=0.7)
    return names[found[0]] if found else None
