"""A teacher of transformers, for models that `replica.torch.decoder` does not compute."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config.run import Quantization
from trainer.distill.teacher.model_parts import ModelParts
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica.torch.model import keep_nf4_order
from trainer.replica.torch.published_model import load_base
from trainer.system.errors import InputError

log = logging.getLogger(__name__)


def load_published(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    resident: int | None = None,
    quantization: Quantization = "none",
) -> ModelParts:
    """Return a causal language model of transformers.

    Args:
        resident: layers that stay in memory; None: all.

    Raises:
        InputError: it cannot be loaded, or its head's size differs from its config.
    """
    # Sizes that no plan knows are asked for only where layers are read.
    reads_rows = resident is not None and (
        resident == HEAD_STREAMED or not read_shape(model_dir).tied
    )
    nf4 = dtype if quantization == "nf4" else None
    model: Any = load_base(model_dir, dtype, device, resident, nf4=nf4, reads_rows=reads_rows)
    if nf4 is not None:
        keep_nf4_order(model, model_dir, device)
    model.requires_grad_(False).eval()

    def hidden_states(ids: Tensor) -> Tensor:
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        return hidden.to(dtype)  # Mamba's are fp32

    def compute_logits(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False).logits

    vocab_size: int = model.config.vocab_size
    if _is_head_alone(model, dtype, device):
        return ModelParts(model, hidden_states, model.get_output_embeddings(), vocab_size)
    log.info("the logits of %s are more than a product with its head", model_dir)
    return ModelParts(model, compute_logits, lambda rows: rows, vocab_size)


@torch.no_grad()
def _is_head_alone(model: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the head on the last hidden states gives the model's logits.

    Some models scale or cap their head's output. The forward is short, since its weights may have
    to be read from a disk.
    """
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(
        lambda *call: seen.append(call[-1].last_hidden_state)
    )
    vocab_size = model.config.vocab_size
    probe = torch.arange(8, device=device)[None] % vocab_size
    logits = model(probe, use_cache=False).logits
    hook.remove()
    if logits.shape[-1] != vocab_size:
        raise InputError(
            f"{model.name_or_path}: gives {logits.shape[-1]} logits, its config.json"
            f" says vocab_size {vocab_size}"
        )
    head = model.get_output_embeddings()
    return head is not None and torch.equal(head(seen[0].to(dtype)).to(logits.dtype), logits)
