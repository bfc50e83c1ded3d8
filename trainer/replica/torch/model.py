"""Prepare a loaded model for training: adapters, and trainable weights in one flat tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.config.run import RunConfig
from trainer.model.expert_parameters import AdaptedParameter
from trainer.model.header_layout import PEFT_PREFIX
from trainer.model.initialization import initial_tensor
from trainer.model.layout import GradientLayout, frozen_adapters
from trainer.model.safetensors_headers import read_headers
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.linear import add_adapters
from trainer.replica.torch.streaming import StreamedNF4Linear
from trainer.system.errors import DoesNotFitError, InputError, first_line, is_out_of_memory
from trainer.system.process.slow_log import log_if_slow

NF4_BLOCK = 64
"""Consecutive weights that share a scale."""


@contextmanager
def report_load_errors(
    model_dir: Path, device: torch.device, *, nf4: bool = False
) -> Iterator[None]:
    """Announce that a model is loaded, and turn errors into one line for people."""
    try:
        with log_if_slow(f"{'quantising' if nf4 else 'loading'} {model_dir}"):
            yield
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"{model_dir}: the base model alone does not fit on {device}"
            ) from None
        raise InputError(f"{model_dir}: cannot be loaded: {first_line(error)}") from None


def prepare_for_training(
    model: nn.Module,
    model_dir: Path,
    config: RunConfig,
    device: torch.device,
    modules: Collection[str] | None = None,
    parameters: Iterable[tuple[AdaptedParameter, int]] = (),
) -> None:
    """Make a loaded base, or a part of one, ready to train: frozen weights, adapters, train mode.

    Args:
        modules: that get an adapter; None for those of Motley's own decoder.
        parameters: of experts and routers that get one, with its rank.

    Raises:
        InputError: bitsandbytes computes wrong products of these weights.
    """
    if config.model.quantization == "nf4":
        keep_nf4_order(model, model_dir, device)
    full = config.method == "full"
    model.requires_grad_(full and config.model.quantization == "none")
    if not full:
        lora = config.lora
        linears = lora.linears if modules is None else modules
        add_adapters(model, linears, lora, device, parameters)
        if config.task == "classify" and hasattr(model, "score"):  # of a pipeline the last stage's
            model.get_submodule("score").requires_grad_(True)
    model.train()


def train_whole(model: nn.Module, names: Collection[str]) -> None:
    """Give modules of these names a fp32 weight of their own that trains, tied ones too.

    What an embedding returns keeps the format of the frozen weights.
    """
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] in names:
            frozen: Any = module.weight
            module.weight = nn.Parameter(frozen.detach().float())
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(partial(_in_format, frozen.dtype))


def _in_format(dtype: torch.dtype, _module: nn.Module, _inputs: object, found: Tensor) -> Tensor:
    return found.to(dtype)


def freeze_a(model: nn.Module, model_dir: Path, config: RunConfig) -> None:
    """Give every A of `lora.freeze_a` its seeded start, and keep it there."""
    headers = read_headers(model_dir)
    for slot in frozen_adapters(model_dir, config):
        parameter = model.get_parameter((slot.parameter or slot.name).removeprefix(PEFT_PREFIX))
        values = torch.from_numpy(initial_tensor(headers, config.training.seed, slot))
        parameter.requires_grad_(False).copy_(values.view(slot.shape))


def recompute_activations(model: Any) -> None:
    """Keep only layer inputs in forward and recompute the rest in backward."""
    if isinstance(model, Decoder):
        model.model.recompute = True
    else:
        # The name of transformers 5.23; the one of before is deprecated there.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def compile_layers(model: Any) -> None:
    """Let torch compile each layer at its first run; all are alike, so it compiles once a shape.

    Not the whole model: its loops and caches would be recompiled repeatedly.
    """
    for layer in list_layers(model):
        layer.compile()


def list_layers(model: Any) -> Iterable[Any]:
    """Return the layers of a decoder, ours or transformers'."""
    inner = find_backbone(model)
    found = getattr(inner, "layers", None) or getattr(inner, "h", None)
    return found or next(part for part in inner.modules() if isinstance(part, nn.ModuleList))


def find_backbone(model: Any) -> Any:
    """Return the module that makes hidden states of a decoder, ours or transformers'."""
    found = getattr(model, "base_model", None)
    return model.model if found is None or found is model else found


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trainable parameters by their layout names: PEFT's saved ones under LoRA."""
    adapted = any(".lora_A." in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"base_model.model.{name}" if adapted else name, parameter


def parameters_by_slot(model: nn.Module, layout: GradientLayout) -> dict[str, nn.Parameter]:
    """Return trainable parameters by the names of the layout's tensors."""
    names = {slot.parameter: slot.name for slot in layout.iter_tensors() if slot.parameter}
    return {names.get(name, name): parameter for name, parameter in trainable_parameters(model)}


def flatten_parameters(
    model: nn.Module,
    layout: GradientLayout,
    device: torch.device,
    weights: np.ndarray | None = None,
) -> Tensor:
    """Move the trainable parameters into one fp32 tensor `[layout.size]` and return it.

    Afterwards each parameter is a view of its slot, so that writing weights is one copy.

    Args:
        weights: fp32 `[layout.size]` for them; None leaves the model's.
    """
    parameters = dict(trainable_parameters(model))
    spans = {
        name: (start, stop) for block in layout.blocks for name, start, stop in block.parameters
    }
    expected = {name: stop - start for name, (start, stop) in spans.items()}
    found = {name: parameter.numel() for name, parameter in parameters.items()}
    if found != expected:
        name = min(name for name, _ in found.items() ^ expected.items())
        raise InputError(
            f"{name}: the model has {found.get(name, 0)} elements of it to train, its files have"
            f" {expected.get(name, 0)}"
            + (
                ""
                if name.startswith(PEFT_PREFIX)
                else "; set method lora, which leaves it as it is"
            )
        )
    flat = torch.empty(layout.size, dtype=torch.float32, device=device)
    for name, (start, stop) in spans.items():
        view = flat[start:stop].view(parameters[name].shape)
        view.copy_(parameters[name].detach())
        parameters[name].data = view
    if weights is not None:
        flat.copy_(torch.from_numpy(weights))
    return flat


def write_weights(
    model: nn.Module, layout: GradientLayout, present: Tensor, flat: np.ndarray
) -> Tensor:
    """Give the trainable parameters values, fp32 `[layout.size]`; return their tensor.

    On the CPU they become views of an array that can be written.

    Args:
        present: what `flatten_parameters` or this function returned last.
    """
    if present.is_cuda or not (flat.flags.writeable and flat.flags.c_contiguous):
        with torch.no_grad():
            return present.copy_(torch.tensor(flat), non_blocking=True)
    if present.data_ptr() == flat.ctypes.data:
        return present
    weights, parameters = torch.from_numpy(flat), dict(trainable_parameters(model))
    for block in layout.blocks:
        for name, start, stop in block.parameters:
            parameters[name].data = weights[start:stop].view(parameters[name].shape)
    return weights


def keep_nf4_order(model: nn.Module, model_dir: Path, device: torch.device) -> None:
    """Let bitsandbytes' linears keep their codes in the order of a file.

    On CPUs with AVX512-BF16 its eval-mode forward repacks them in place: every later gradient is
    wrong while the loss looks right, and layers that are read have other bits.

    Raises:
        InputError: bitsandbytes computes wrong products of these weights.
    """
    if device.type == "cpu":
        _check_nf4_widths(model, model_dir)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # a plain flag


def _check_nf4_widths(model: nn.Module, model_dir: Path) -> None:
    """Refuse rows that do not end with a block, which bitsandbytes 0.50 misreads on CPUs.

    It packs them correctly but unpacks other weights, off by more than the largest of a block.
    """
    for name, module in model.named_modules():
        width = getattr(module, "in_features", 0)
        is_nf4 = isinstance(module, StreamedNF4Linear)
        is_nf4 = is_nf4 or hasattr(module, "support_avx512bf16_for_cpu")
        if is_nf4 and width % NF4_BLOCK:
            raise InputError(
                f"{model_dir}: {name} is {width} wide; nf4 on the CPU needs a multiple"
                f" of {NF4_BLOCK}: set quantization none, or use a GPU"
            )
