"""Memory that a replica will need, planned from headers before anything is loaded (F-HET-002).

Pure: the launcher refuses a placement with it before a process starts, and the replica before it
loads the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.run import LINEARS, RunConfig
from trainer.errors import InputError
from trainer.model.architecture import Architecture
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import TensorHeader

CPU_TOKENS = 1024
"""Most tokens of an automatic micro-batch on a CPU: with larger ones the caches lose (measured)."""
BUSY_TOKENS = 4096
"""A micro-batch of so many tokens keeps a GPU busy."""
LOGIT_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in fp32. All of 8 x 2048 tokens of a Qwen3 would be 10 GB."""

_NF4_BYTES = 0.5 + 4 / 64  # half a byte an element and an fp32 absmax a block of 64
_USABLE = 0.9  # the rest is fragmentation and what libraries take for themselves


@dataclass(frozen=True)
class Room:
    """The memory that one replica may take."""

    memory: int
    """Bytes."""
    accelerator: bool
    """It is a card's own, else the host's."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device."""

    frozen: int
    """Base weights that do not train."""
    trainable: int
    """Trainable weights, fp32."""
    gradients: int
    state: int
    """Weights, moments and averaged gradient of the optimizer, where the device is the host; its
    moments alone where only these are on the device."""
    workspace: int
    """The largest passing buffers: logits, a dequantised linear."""
    per_token: int
    """Activations kept for backward, for each token of a micro-batch."""
    sample_tokens: int
    """Tokens of the longest sample: the least that must fit."""

    @property
    def fixed(self) -> int:
        """Everything but activations."""
        return self.frozen + self.trainable + self.gradients + self.state + self.workspace

    @property
    def least(self) -> int:
        """What one sample at a time needs."""
        return self.fixed + self.per_token * self.sample_tokens


def plan_memory(
    model: Architecture,
    headers: Mapping[str, TensorHeader],
    layout: GradientLayout,
    config: RunConfig,
    *,
    accelerator: bool,
    recompute: bool,
    moments: bool = False,
) -> MemoryPlan:
    """Return the plan of one replica.

    Args:
        accelerator: the device has its own memory and computes in bf16; else it is the host.
        recompute: gradient checkpointing.
        moments: the optimizer works on the accelerator too, so its moments lie there.
    """
    lora = config.method == "lora"
    element = 2 if accelerator or config.model.dtype == "bfloat16" else 4
    stored = 2 if config.model.dtype == "bfloat16" else 4
    trained = 4 * layout.size
    host_state = 4 * trained
    device_state = 2 * trained if moments else 0
    return MemoryPlan(
        frozen=_frozen(headers, config, stored) if lora else 0,
        trainable=trained,
        gradients=trained,
        state=device_state if accelerator else host_state,
        workspace=_workspace(model, config, element, layout.size),
        per_token=_per_token(model, config, element, recompute),
        sample_tokens=config.data.max_seq_len,
    )


def fitting_tokens(plan: MemoryPlan, available: int) -> int:
    """Return how many tokens of activations fit into what loading left over; at least one."""
    spare = available * _USABLE - plan.gradients - plan.state - plan.workspace
    return max(1, int(spare) // plan.per_token)


def must_recompute(plan: MemoryPlan, available: int) -> bool:
    """Return whether activations have to be computed twice to keep a device busy.

    Args:
        plan: of a replica that keeps them, before anything is loaded.
    """
    return not fits(plan, available, max(BUSY_TOKENS, plan.sample_tokens))


def fits(plan: MemoryPlan, available: int, tokens: int) -> bool:
    """Return whether a replica with the activations of so many tokens fits a device."""
    return plan.fixed + tokens * plan.per_token <= available * _USABLE


def check_fits(plan: MemoryPlan, available: int, device: str) -> None:
    """Refuse a plan above the memory of a device.

    Raises:
        InputError: names what is needed and what there is.
    """
    if not fits(plan, available, plan.sample_tokens):
        raise InputError(
            f"{device}: the run needs {_gib(plan.least)} GiB (base {_gib(plan.frozen)}, trainable"
            f" {_gib(plan.trainable + plan.gradients + plan.state)}, one sample"
            f" {_gib(plan.least - plan.fixed + plan.workspace)}), {_gib(available)} are free; use"
            " method lora, model.quantization nf4 or a smaller data.max_seq_len"
        )


def _frozen(headers: Mapping[str, TensorHeader], config: RunConfig, stored: int) -> int:
    total = 0.0
    for name, header in headers.items():
        if name == "lm_head.weight" and config.task == "classify":
            continue
        elements = math.prod(header.shape)
        linear = name.endswith(tuple(f"{linear}.weight" for linear in LINEARS))
        total += elements * (
            _NF4_BYTES if linear and config.model.quantization == "nf4" else stored
        )
    return int(total)


def _workspace(model: Architecture, config: RunConfig, element: int, layout_size: int) -> int:
    logits = 0
    if config.task == "causal-lm":
        # Logits, their softmax and their gradient.
        logits = 3 * 4 * min(LOGIT_ELEMENTS, config.data.max_seq_len * model.vocab_size)
        if config.method == "full":  # that of the head, before it is added to all gradients
            logits += 4 * model.vocab_size * model.hidden_size
    linear = max(math.prod(model.linear_shape(linear)) for linear in LINEARS)
    dequantised = linear * element if config.model.quantization == "nf4" else 0
    # Autocast keeps its bf16 copies of trainable weights until backward has used them.
    copies = element * layout_size if element == 2 else 0
    return logits + dequantised + copies


def _per_token(model: Architecture, config: RunConfig, element: int, recompute: bool) -> int:
    """Return the bytes kept for backward, counted in `tests/trainer/test_memory.py`."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Per layer: inputs and outputs of both norms and of the linears, queries and keys around the
    # rotary embedding, gate, up and what lies between them. RMSNorm works in fp32 in any case.
    layer = element * (6 * hidden + 5 * queries + 4 * keys + 4 * inner)
    if element == 2:
        layer += 4 * (2 * hidden + (queries + keys if model.normalised_heads else 0))
        if config.method == "full":  # the gradient of a norm's weight needs its input again
            layer += 4 * 2 * hidden
    if config.method == "lora":
        layer += 4 * config.lora.lora_rank * len(config.lora.target_modules)
    # Rows of several samples have a mask, of which each attention makes one of numbers.
    mask = config.data.max_seq_len if config.training.pack else 0
    layer += (element + 1) * mask
    head = element * 4 * hidden + mask
    if recompute:
        return model.num_layers * element * hidden + layer + head
    return model.num_layers * layer + head


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
