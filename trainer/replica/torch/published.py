"""A model of transformers, for cases that `decoder.py` does not support.

These are the harness, and rarer rotations and activations.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from trainer.config.run import RunConfig
from trainer.replica.torch.model import prepare, reading
from trainer.replica.torch.precision import compute_dtype

_HEADS = ("score", "lm_head")


def load_published(model_dir: Path, config: RunConfig, device: torch.device) -> nn.Module:
    """Return the same as `load_model`, computed by transformers' own code.

    Raises:
        InputError: the weights cannot be loaded.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # It reports on stderr that an optional kernel package is missing.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    auto = {
        "classify": transformers.AutoModelForSequenceClassification,
        "causal-lm": transformers.AutoModelForCausalLM,
    }[config.task]
    settings: dict[str, Any] = {"attention_dropout": 0.0}
    if config.num_classes is not None:
        settings["num_labels"] = config.num_classes
    if config.model.quantization == "nf4":
        settings["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute_dtype(config, device),
            bnb_4bit_use_double_quant=False,
            llm_int8_skip_modules=list(_HEADS),
        )
    full = config.method == "full"
    with reading(model_dir, device, nf4=config.model.quantization == "nf4"):
        model: nn.Module = auto.from_pretrained(
            model_dir,
            dtype=torch.float32 if full else getattr(torch, config.model.dtype),
            device_map={"": device},
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            **settings,
        )
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a padding token that texts contain is trained too
    prepare(model, model_dir, config, device)
    return model
