"""A transformers model ready to train: loaded, adapted, what trains in one flat tensor."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.errors import InputError
from trainer.layout import GradientLayout

HEADS = ("score", "lm_head")
NF4_BLOCK = 64
"""Consecutive weights that share a scale."""


def load_model(model_dir: Path, config: RunConfig, device: torch.device) -> nn.Module:
    """Return the model in train mode on `device`, with trainable parameters as the method says.

    Dropout is off: gradients must not depend on who computes them. The frozen base has
    `config.model.dtype` or NF4; what trains is fp32.

    Raises:
        InputError: the weights cannot be loaded.
    """
    _quieten()
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
            llm_int8_skip_modules=list(HEADS),
        )
    full = config.method == "full"
    try:
        model: nn.Module = auto.from_pretrained(
            model_dir,
            dtype=torch.float32 if full else getattr(torch, config.model.dtype),
            device_map={"": device},
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            **settings,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(
                f"{model_dir}: the base model alone does not fit on {device}"
            ) from None
        raise InputError(f"{model_dir}: cannot be loaded: {_first_line(error)}") from None
    if config.model.quantization == "nf4" and device.type == "cpu":
        _check_nf4_widths(model, model_dir)
    model.requires_grad_(full)
    if not full:
        _add_lora(model, config)
    for module in model.modules():
        # On CPUs with AVX512-BF16 an eval-mode forward of bitsandbytes repacks NF4 weights in
        # place, and every later gradient is wrong while the loss looks right.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # a plain flag
    return model.train()


def recompute_activations(model: Any) -> None:
    """Keep only layer inputs in forward and compute the rest again in backward."""
    model.activation_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: Any) -> None:
    """Let torch compile each layer when it first runs; all are alike, so it compiles once a shape.

    Not the model as a whole: its loops and caches would be compiled again and again.
    """
    for layer in model.model.layers:
        layer.compile()


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls: bf16 on CUDA, else that of the stored base."""
    if device.type == "cuda" or config.model.dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trainable parameters by their layout names: PEFT's saved ones under LoRA."""
    adapted = any(".lora_A." in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if adapted:  # adapters were injected in place, so the outer wrapper's prefix is ours
                name = name.replace(".modules_to_save.default", "").replace(".default", "")
                name = f"base_model.model.{name}"
            yield name, parameter


def flatten(model: nn.Module, layout: GradientLayout, device: torch.device) -> Tensor:
    """Move the trainable parameters into one fp32 tensor `[layout.size]` and return it.

    Afterwards each parameter is a view of its slot, so that writing weights is one copy.
    """
    parameters = dict(trainable_parameters(model))
    expected = {slot.name: slot.shape for slot in layout.tensors()}
    found = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert found == expected, f"layout and model differ: {found.items() ^ expected.items()}"
    flat = torch.empty(layout.size, dtype=torch.float32, device=device)
    for slot in layout.tensors():
        view = flat[slot.start : slot.stop].view(slot.shape)
        view.copy_(parameters[slot.name].detach())
        parameters[slot.name].data = view
    return flat


def _check_nf4_widths(model: nn.Module, model_dir: Path) -> None:
    """Refuse what bitsandbytes 0.50 misreads on CPUs: rows that do not end with a block.

    It packs them right and unpacks other weights, off by more than the largest of a block.
    """
    for name, module in model.named_modules():
        width = getattr(module, "in_features", 0)
        if hasattr(module, "support_avx512bf16_for_cpu") and width % NF4_BLOCK:
            raise InputError(
                f"{model_dir}: {name} is {width} wide; nf4 on the CPU needs a multiple"
                f" of {NF4_BLOCK}: set model.quantization none, or take a GPU"
            )


def _add_lora(model: nn.Module, config: RunConfig) -> None:
    import peft

    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if config.task == "classify" else "CAUSAL_LM",
        r=config.lora.lora_rank,
        lora_alpha=config.lora.lora_alpha,
        target_modules=list(config.lora.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by a deprecated name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        peft.get_peft_model(model, settings)  # injects in place; the wrapper is not needed


def _quieten() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # It reports on stderr that an optional kernel package is not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
