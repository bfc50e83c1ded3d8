"""Check a class of transformers that the table of families does not list, by what it computes.

Training takes hidden states from the backbone, multiplies them by the head, and leaves out the
attention mask, so that the class must be causal, and its logits that product. A few tokens show it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.pytorch_utils import Conv1D

from trainer.model.families import Logits, text_config
from trainer.replica.torch.kd_loss import shape_logits
from trainer.replica.torch.linear import LoraLinear
from trainer.replica.torch.objective import last_hidden
from trainer.replica.torch.streaming import StreamedHead, StreamedLinear
from trainer.system.errors import InputError, first_line, is_out_of_memory

log = logging.getLogger(__name__)

_TOKENS = 12
"""Tokens of the probe; the second half is changed."""
_NEAR = {torch.float32: 1e-4}
"""Relative differences that rounding explains."""
_ROUGH = 3e-2
"""The same of 16-bit formats."""


def find_class(tree: Mapping[str, Any], model_dir: Path) -> Any:
    """Return the class of the causal language model that a config.json describes.

    Raises:
        InputError: transformers has none.
    """
    known: Any = transformers.AutoModelForCausalLM._model_mapping
    kinds: Any = transformers.CONFIG_MAPPING
    model_type = text_config(tree).get("model_type")
    if model_type in kinds:
        # Some have their class under the type of the model that has other parts, alone.
        package = kinds[model_type].__module__.split(".")[-2]
        for name in (model_type, tree.get("model_type"), package):
            if name in kinds and (kind := kinds[name]) in known:
                found = known[kind]
                if name == model_type or found.config_class is kinds[model_type]:
                    return found
    own = "; code in a model's folder (auto_map) is never run" if "auto_map" in tree else ""
    raise InputError(
        f"{model_dir}: transformers {transformers.__version__} has no causal language model of"
        f" model_type {model_type}{own}"
    )


def check_class(
    model: Any,
    model_dir: Path,
    modules: Collection[str],
    shape: Logits,
    autocast: torch.autocast,
    *,
    transposed: bool = False,
) -> None:
    """Refuse a loaded model that cannot be trained as a causal language model.

    Dropout of its modules is turned off.

    Args:
        modules: the linears that get an adapter.
        shape: what becomes of the product of hidden states and head.
        transposed: these are `Conv1D`, whose weights are `[in, out]`.

    Raises:
        InputError: names what its class does otherwise.
    """
    name = type(model).__name__
    head = getattr(model, "lm_head", None)
    if not isinstance(head, (nn.Linear, StreamedHead)):
        raise InputError(f"{model_dir}: {name} {_describe_head(model)}, which is not trained here")
    kind = Conv1D if transposed else nn.Linear
    for path in modules:
        _check_linear(model, path, kind, f"{model_dir}: lora.target_modules: {name}")
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    ids, changed = _probe_tokens(model)
    with _refuse_errors(f"{model_dir}: {name}"), torch.no_grad(), autocast:
        hidden, again, other = (last_hidden(model, one) for one in (ids, ids, changed))
        product, logits = head(hidden).float(), model(input_ids=ids, use_cache=False).logits
        shape_logits(product, shape)
    near = _NEAR.get(torch.promote_types(hidden.dtype, head.weight.dtype), _ROUGH)
    near = _ROUGH if autocast._enabled else near
    half = _TOKENS // 2
    for found, wanted, why in (
        (hidden, hidden, "computes no numbers"),
        (again, hidden, "draws random numbers while it trains"),
        (other[:, :half], hidden[:, :half], "is not causal: a token changes those before it"),
        (product, logits.float(), "makes its logits by more than its head"),
    ):
        alike = found.shape == wanted.shape
        if not (alike and (found - wanted).abs().max() <= near * wanted.abs().max()):
            raise InputError(f"{model_dir}: {name} {why}, which is not trained here")


def report_unreached(model: Any, model_dir: Path, autocast: torch.autocast) -> None:
    """Log the adapters that the first tokens do not reach: those of experts, or unused linears.

    Raises:
        InputError: the model cannot be differentiated.
    """
    sides = {
        name: module.lora_B.weight
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    if not sides:
        return
    with _refuse_errors(f"{model_dir}: {type(model).__name__}"):
        with autocast:
            total = last_hidden(model, _probe_tokens(model)[0]).float().square().sum()
        found = torch.autograd.grad(total, list(sides.values()), allow_unused=True)
    modules = ((name, model.get_submodule(name)) for name in sides)
    if past := [name for name, module in modules if getattr(module, "reads_weight", False)]:
        log.warning(
            "%s: merge before use with PEFT, which leaves out the adapters of linears whose weight"
            " the class reads itself: %s",
            model_dir,
            ", ".join(past),
        )
    if unused := [name for name, one in zip(sides, found, strict=True) if one is None]:
        log.warning(
            "%s: %d of %d adapters do not change what a first row computes: %s",
            model_dir,
            len(unused),
            len(sides),
            ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else ""),
        )


def _describe_head(model: Any) -> str:
    """Return how a class without a linear `lm_head` makes its logits."""
    head = model.get_output_embeddings()
    own = (name for name, module in model.named_modules() if module is head and head is not None)
    if (path := next(own, None)) is None:
        return "has no matrix that makes logits of hidden states"
    return f"makes its logits by {path}, not by a linear lm_head on its hidden states"


def _check_linear(model: nn.Module, path: str, kind: type[nn.Module], where: str) -> None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise InputError(
            f"{where} renames {path} of its files when it loads them, so that no adapter has its"
            " name; name other linears"
        ) from None
    if not isinstance(module, (kind, StreamedLinear)):
        found = type(module).__name__
        raise InputError(f"{where} has {path} as {found}, which gets no adapter; name others")


def _probe_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """Return tokens `[1, T]`, and the same with another second half."""
    head = model.lm_head
    size, where = head.out_features, head if isinstance(head, StreamedHead) else head.weight
    ids = torch.arange(3, 3 + 7 * _TOKENS, 7, device=where.device)[None]
    changed = torch.cat([ids[:, : _TOKENS // 2], ids[:, _TOKENS // 2 :] + 1], 1)
    return ids % size, changed % size


@contextmanager
def _refuse_errors(where: str) -> Iterator[None]:
    """Turn what a class raises into one line for people."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError) as error:
        raise InputError(f"{where} cannot compute here: {first_line(error)}") from None
    except (RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{where} cannot compute here: {first_line(error)}") from None
