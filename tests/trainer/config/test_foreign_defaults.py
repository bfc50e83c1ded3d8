"""Our table of other trainers' defaults against their sources.

What is not installed here is recorded from their repositories: file, commit, and the values there.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainer.config.foreign_config import PROGRAMS, convert_config
from trainer.config.foreign_defaults import AXOLOTL_DEFAULTS, FACTORY_DEFAULTS
from trainer.config.run import load_config

RECORDED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "LLaMA-Factory": {
        "src/llamafactory/hparams/finetuning_args.py": (
            "00577a85775a2a78b14641ff8f68c58c6f46b027",
            {
                "finetuning_type": "lora",
                "lora_rank": 8,
                "lora_alpha": None,  # "default: lora_rank * 2"
            },
        ),
        "src/llamafactory/hparams/data_args.py": (
            "072bfe29d3b10447b0702196028af2f0fb87ad6b",
            {"cutoff_len": 2048},
        ),
    },
    "axolotl": {
        "src/axolotl/utils/schemas/training.py": (
            "002a637c86864c8acf451757ee45040b5ea5e25f",
            {
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "weight_decay": 0.0,
                "num_epochs": 1.0,
                "lr_scheduler": "cosine",
            },
        ),
        "src/axolotl/core/builders/base.py": (
            "00f1318a001367a519154d4ba5818d93f6c62e45",
            {"warmup_ratio": 0.03},
        ),
        "src/axolotl/utils/schemas/config.py": (
            "70be5461ba09e986aecb2eff3eef1246ce4285c4",
            {"sequence_len": 512},
        ),
    },
}
OWN = {"axolotl": AXOLOTL_DEFAULTS, "LLaMA-Factory": FACTORY_DEFAULTS}
HANDED_ON = {
    "axolotl": {"adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed"},
    "LLaMA-Factory": {
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
        *("learning_rate", "lr_scheduler_type"),
    },
}
"""What they leave to transformers' TrainingArguments."""


@pytest.mark.parametrize("program", OWN)
def test_the_table_has_the_defaults_of_their_sources(program: str) -> None:
    theirs = {field.name: field.default for field in fields(transformers.TrainingArguments)}
    wanted = {key: theirs[key] for key in HANDED_ON[program]}
    for _, values in RECORDED[program].values():
        wanted |= values
    if program == "LLaMA-Factory":  # transformers 5 has no ratio: steps, of which there are none
        assert theirs["warmup_steps"] == 0
        wanted["warmup_ratio"] = 0.0
    assert dict(OWN[program]) == wanted


def settings_of(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    (program,) = (program for program in PROGRAMS if program.name == name)
    return convert_config(program, tree, Path()).settings


def test_keys_that_are_absent_or_null_have_their_defaults() -> None:
    tree: dict[str, Any] = {"model_name_or_path": "m", "stage": "sft"}
    config = load_config(None, settings_of("LLaMA-Factory", tree) | {"data.train": "d.jsonl"})
    assert (config.method, config.lora.lora_rank, config.lora.lora_alpha) == ("lora", 8, 16)
    assert (config.training.epochs, config.training.batch_size) == (3, 8)
    optimizer = config.optimizer
    assert (optimizer.weight_decay, optimizer.warmup_ratio, optimizer.learning_rate) == (0, 0, 5e-5)
    assert (optimizer.scheduler, optimizer.final_ratio) == ("linear", 0)
    assert (config.data.max_seq_len, config.training.seed) == (2048, 42)
    given = tree | {"lora_rank": 4, "weight_decay": None, "num_train_epochs": None}
    assert settings_of("LLaMA-Factory", given)["lora.lora_alpha"] == 8
    assert settings_of("LLaMA-Factory", given)["optimizer.weight_decay"] == 0
    assert settings_of("LLaMA-Factory", given | {"lora_alpha": 5})["lora.lora_alpha"] == 5
    full = settings_of("LLaMA-Factory", tree | {"finetuning_type": "full"})
    assert not [key for key in full if key.startswith("lora.")]
    steps = settings_of("LLaMA-Factory", tree | {"max_steps": 40, "warmup_steps": 10})
    assert (steps["training.max_steps"], steps["optimizer.warmup_ratio"]) == (40, 0.25)
    assert "training.epochs" not in steps
    found = settings_of("axolotl", {"base_model": "m", "learning_rate": 1e-4, "adapter": "lora"})
    config = load_config(None, found | {"data.train": "d.jsonl"})
    assert (config.training.epochs, config.training.batch_size, config.data.max_seq_len) == (
        *(1, 1, 512),
    )
    assert (config.optimizer.scheduler, config.optimizer.final_ratio) == ("cosine", 0)
    assert (config.optimizer.warmup_ratio, config.optimizer.weight_decay) == (0.03, 0)
