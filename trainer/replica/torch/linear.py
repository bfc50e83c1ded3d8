"""Products with stored weights: plain, in NF4, and with a low-rank adapter beside them.

Adapters (Hu et al., arXiv 2106.09685) compute what PEFT's compute, operation by operation, and
checkpoints carry PEFT's names, so `PeftModel.from_pretrained` opens what is trained here. The
import of PEFT costs four times that of torch (docs/decisions.md, 2026-11-22).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from trainer.config.lora import LoraSettings
from trainer.model.expert_parameters import AdaptedParameter
from trainer.planning.vulkan_buffers import NF4_BLOCK

_NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""torch's switch: with 1, `torch.compile` returns the function as it is."""


def local_weight(weight: Any) -> Any:
    """Return this rank's values of a weight that tensor-parallel ranks share; else the weight."""
    to_local = getattr(weight, "to_local", None)  # a DTensor's, whose import takes a second
    return weight if to_local is None else to_local()


class Linear(nn.Module):
    """A product with a weight `[out, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`."""
        return F.linear(x, local_weight(self.weight), local_weight(self.bias))


class LoraLinear(nn.Module):
    """A frozen linear plus `scale * B A`, whose A `[r, in]` and B `[out, r]` train in fp32.

    Args:
        base: has `in_features` and `out_features`, or is GPT-2's `Conv1D`; may be quantised.
        device: where A and B are made, both zero.
    """

    def __init__(
        self, base: Any, rank: int, scale: float, device: torch.device, *, dora: bool = False
    ) -> None:
        super().__init__()
        self.base_layer: nn.Module = base
        columns = base.in_features if hasattr(base, "in_features") else base.nx
        rows = base.out_features if hasattr(base, "out_features") else base.nf
        self.lora_A = Linear(torch.zeros(rank, columns, device=device))
        self.lora_B = Linear(torch.zeros(rows, rank, device=device))
        self._scale = scale
        if dora:
            self.lora_magnitude_vector = nn.Parameter(torch.zeros(rows, device=device))
        self._dora = dora
        self.enabled = True
        """Whether the adapter counts; else the product is the base's."""
        self.reads_weight = False
        """Whether the model has used `weight` past the product: PEFT leaves out the adapter."""

    @property
    def weight(self) -> Tensor:
        """W + scale B A, for classes that hand a linear's weight to a kernel of their own."""
        base: Any = self.base_layer
        self.reads_weight = True
        if self._dora or base.weight.shape != (base.out_features, base.in_features):
            raise TypeError("a linear in NF4, or with DoRA, is used as a weight alone")
        if not self.enabled:
            return base.weight
        a, b = local_weight(self.lora_A.weight), local_weight(self.lora_B.weight)
        return torch.addmm(base.weight.to(a.dtype), b, a, alpha=self._scale).to(base.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The frozen linear's."""
        return getattr(self.base_layer, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]` in the dtype of the base's product."""
        if not self.enabled:
            return self.base_layer(x)
        if self._dora:
            return self._scaled_rows(x)
        frozen = self.base_layer(x)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.lora_A.weight.dtype)
            if frozen.dtype == x.dtype:  # one pass over the output instead of three
                flat = frozen.flatten(0, -2)
                low = self.lora_A(x).flatten(0, -2)
                b = local_weight(self.lora_B.weight)
                return flat.addmm(low, b.t(), alpha=self._scale).view_as(frozen)
        return frozen + (self.lora_B(self.lora_A(x)) * self._scale).to(frozen.dtype)

    def _scaled_rows(self, x: Tensor) -> Tensor:
        """Return the product with W + scale B A, each of whose rows has its own norm (DoRA).

        The norm that it is divided by counts as a constant, as in section 4.3 of arXiv:2402.09353.
        """
        base: Any = self.base_layer
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            sides = self.lora_B.weight, self.lora_A.weight
            norms = torch.addmm(base.weight.float(), *sides, alpha=self._scale).norm(dim=1)
        factor = self.lora_magnitude_vector / norms
        frozen = F.linear(x, base.weight)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.lora_A.weight.dtype)
        product = factor * (frozen + self._scale * self.lora_B(self.lora_A(x)))
        return (product if base.bias is None else product + base.bias).to(frozen.dtype)


class LoraParameter(nn.Module):
    """A module one of whose parameters has `scale * B A` added, as PEFT's `ParamWrapper` does.

    Args:
        base: has the parameter, `[E, out, in]`, `[E, in, out]` or `[out, in]`, or is another
            `LoraParameter` around the module that has it.
        name: of the parameter.
        target: says how the factors of its experts lie.
    """

    def __init__(
        self,
        base: nn.Module,
        name: str,
        target: AdaptedParameter,
        rank: int,
        scale: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.base_layer = base
        a, b = target.factor_shapes(rank)
        self.lora_A = Linear(torch.zeros(a, device=device))
        self.lora_B = Linear(torch.zeros(b, device=device))
        depth = 0
        while isinstance(base, LoraParameter):
            base, depth = base.base_layer, depth + 1
        self._path = "base_layer." * depth + name
        self._experts, self._scale = target.experts, scale
        self._transposed = target.transposed
        # A matrix that is fetched for a product has no sum with its adapter: products are summed.
        stored: Any = getattr(base, "stored", {}).get(name)
        if stored is not None:
            stored.adapter = self
        self._is_stored = stored is not None
        self.enabled = True
        """Whether the adapter counts; else the module computes what it does without."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does with the changed parameter."""
        if self._is_stored or not self.enabled:
            return self.base_layer(*args, **kwargs)
        changed = {self._path: self._add_adapter(self.base_layer.get_parameter(self._path))}
        return functional_call(self.base_layer, changed, args, kwargs, tie_weights=False)

    def expert_factors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return A `[r, in]` and scale B `[out, r]` of each expert."""
        down, up = self._split_factors()
        return down.unbind(), (up * self._scale).unbind()

    def _split_factors(self) -> tuple[Tensor, Tensor]:
        """Return A `[experts, r, in]` and B `[experts, out, r]`."""
        a, b = local_weight(self.lora_A.weight), local_weight(self.lora_B.weight)
        down = a.view(self._experts, -1, a.shape[1])
        return down, b.view(b.shape[0], -1, self._experts).permute(2, 0, 1)

    def _add_adapter(self, frozen: Tensor) -> Tensor:
        """Return the parameter with its adapter, in its own format."""
        with torch.autocast(frozen.device.type, enabled=False):
            if frozen.dim() == 2:
                a, b = local_weight(self.lora_A.weight), local_weight(self.lora_B.weight)
                return frozen + (b @ a * self._scale).to(frozen.dtype)
            down, up = (side.to(frozen.dtype) for side in self._split_factors())
            if self._transposed:
                up, down = down.transpose(1, 2), up.transpose(1, 2)
            return torch.baddbmm(frozen, up, down, alpha=self._scale)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base does."""
    kinds = LoraLinear, LoraParameter
    found = [module for module in model.modules() if isinstance(module, kinds)]
    for module in found:
        module.enabled = False
    try:
        yield
    finally:
        for module in found:
            module.enabled = True


def add_adapters(
    model: nn.Module,
    linears: Collection[str],
    lora: LoraSettings,
    device: torch.device,
    parameters: Iterable[tuple[AdaptedParameter, int]] = (),
) -> None:
    """Put an adapter around every linear of these names: the last, such as `q_proj`, or all.

    Args:
        parameters: of experts and routers that get one too, with its rank; the innermost of a
            module first.
    """
    wanted = frozenset(linears)
    found = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if name in wanted or f"{path}.{name}" in wanted
    ]
    for parent, name, child in found:
        made = LoraLinear(child, lora.lora_rank, lora.scale, device, dora=lora.use_dora)
        setattr(parent, name, made)
    for target, rank in parameters:
        path, _, last = target.parameter.rpartition(".")
        above, _, name = path.rpartition(".")
        parent = model.get_submodule(above)
        scale = lora.compute_scale(rank, rank // lora.lora_rank)
        setattr(
            parent, name, LoraParameter(getattr(parent, name), last, target, rank, scale, device)
        )


def nf4_linear(weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> nn.Module:
    """Return bitsandbytes' NF4 linear of a weight `[out, in]`, quantised on the weight's device."""
    linear, settings = _empty_nf4_linear(weight.shape, bias, compute)
    made: Any = import_bitsandbytes().nn.Params4bit(weight, **settings)
    linear.weight = made.to(weight.device)
    return linear


def packed_nf4_linear(
    codes: Tensor,
    absmax: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: Tensor | None,
    compute: torch.dtype,
) -> nn.Module:
    """Return the same of a weight that is quantised already.

    Args:
        codes: u8, on the device of the linear, as is `absmax`.
        dtype: of the weight that was quantised.
    """
    linear, settings = _empty_nf4_linear(shape, bias, compute)
    library = import_bitsandbytes()
    linear.quant_state = library.functional.QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        code=library.functional.get_4bit_type("nf4", device=codes.device),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    linear.weight = library.nn.Params4bit(
        codes.view(-1, 1), quant_state=linear.quant_state, bnb_quantized=True, **settings
    )
    return linear


def _empty_nf4_linear(
    shape: Sequence[int], bias: Tensor | None, compute: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Return bitsandbytes' linear without a weight, and the settings of the weight."""
    rows, columns = shape
    linear: Any = import_bitsandbytes().nn.Linear4bit(
        columns,
        rows,
        bias=bias is not None,
        compute_dtype=compute,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    settings = {"requires_grad": False, "compress_statistics": False, "quant_type": "nf4"}
    return linear, settings | {"module": linear}


def import_bitsandbytes() -> Any:
    """Return bitsandbytes, imported without torch's Inductor.

    It has functions compiled that neither NF4 on CPU or CUDA nor anything else here calls, and that
    import takes a second.
    """
    # It reports on stderr that an optional kernel package is not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # torch reads its switch at each call of torch.compile: what is compiled later is compiled.
    before = os.environ.get(_NO_COMPILER, "")
    os.environ[_NO_COMPILER] = "1"
    try:
        import bitsandbytes
    finally:
        os.environ[_NO_COMPILER] = before
    return bitsandbytes
