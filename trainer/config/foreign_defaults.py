"""Defaults of other trainers for keys that a config lacks, where they change what is learned.

Read in their sources, which `tests/trainer/config/test_foreign_defaults.py` names with commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRANSFORMERS: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
}
"""Defaults of `TrainingArguments`, which both hand on."""
AXOLOTL_DEFAULTS: Mapping[str, Any] = {
    **_TRANSFORMERS,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.03,
    "sequence_len": 512,
}
"""Ranks and learning rates have none there."""
FACTORY_DEFAULTS: Mapping[str, Any] = {
    **_TRANSFORMERS,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_alpha": None,  # twice the rank
    "cutoff_len": 2048,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
}
