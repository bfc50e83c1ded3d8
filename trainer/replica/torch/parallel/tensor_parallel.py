"""Tensor parallelism: the ranks of a group share each layer, its heads and its inner columns.

The linears that a block begins with are cut by their outputs, the one that it ends with by its
inputs, so a block needs one sum forward and one backward (Megatron-LM, arXiv:1909.08053). With
sequence parallelism (arXiv:2205.05198) the ranks share the tokens between blocks too, and each sum
becomes a reduce-scatter and a gather of the same volume.

An adapter is cut with its linear: B by outputs or A by inputs. The other half is whole on each
rank and computes with a part of the data, so its gradient is a part as well. Such parameters are
summed once a step (`summed`), which costs less than a sum of activations in each layer.

A trainable part is a DTensor, which checkpoints can be cut differently again from; computing with
it takes the rank's own values (`linear.own`). Frozen parts are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.replica.torch.decoder import MLP, Attention, Decoder, Layer
from trainer.replica.torch.linear import Linear, LoraLinear, local_weight
from trainer.replica.torch.parallel import collectives
from trainer.replica.torch.parallel.vocabulary import SharedEmbedding, shared_token_losses

_OUTPUTS, _INPUTS = 0, 1
"""Dimensions of a weight."""


class TensorParallel:
    """Cuts a decoder for the ranks of a mesh.

    Args:
        mesh: one dimension.
        sequence: the ranks share the tokens between blocks too.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._mesh, self._group = mesh, mesh.get_group()
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self._summed: list[nn.Parameter] = []
        self.summed: set[str] = set()
        """Names of the parameters whose gradient is the sum over the ranks."""
        self._enter, self._leave = (
            partial(function, group=self._group)
            for function in (
                (collectives.gather_tokens, collectives.scatter_tokens)
                if sequence
                else (collectives.copy_to_ranks, collectives.add_up)
            )
        )
        self._sequence = sequence
        self._first = 0
        """The first token of this rank's part of the vocabulary."""
        self._widest = 0
        """The tokens of its largest part."""

    def cut_layer(self, number: int, layer: Layer) -> None:
        """Cut a layer in place."""
        self._cut_block(layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj")
        self._cut_block(layer.mlp, ("gate_proj", "up_proj"), "down_proj")
        self._finish_embedding(layer.self_attn.q_norm, layer.self_attn.k_norm)
        if self._sequence:
            self._finish_embedding(layer.input_layernorm, layer.post_attention_layernorm)
        self._name_summed(layer, f"model.layers.{number}.")

    def cut_ends(self, model: Decoder) -> None:
        """Cut what is before and after the layers, in place."""
        backbone: Any = model.model
        classifies = hasattr(model, "score")
        head = None if classifies else model.lm_head
        tied = head is not None and head.weight is backbone.embed_tokens.weight
        self._widest = -(-len(backbone.embed_tokens.weight) // self._ranks)
        table, self._first = self._cut_parameter(backbone.embed_tokens.weight, _OUTPUTS)
        backbone.embed_tokens = SharedEmbedding(table, self._first, self._leave)
        if head is not None:
            head.weight = table if tied else self._cut_parameter(head.weight, _OUTPUTS)[0]
        if self._sequence:
            self._finish_embedding(backbone.norm)
            self._name_summed(model, "")
        self._prepare_head(backbone.norm, classifies)

    def token_losses(self, hidden: Tensor, head: Tensor, wanted: Tensor, *_: None) -> Any:
        """Return the losses of tokens by a head that is cut; see `kd_loss.token_losses`."""
        return shared_token_losses(
            hidden,
            local_weight(head),
            wanted,
            first=self._first,
            widest=self._widest,
            group=self._group,
        )

    def _cut_block(self, block: Attention | MLP, begin: tuple[str, ...], end: str) -> None:
        block.register_forward_pre_hook(partial(_first_argument, self._enter))
        for name in begin:
            setattr(block, name, self._cut_linear(getattr(block, name), _OUTPUTS))
        last = self._cut_linear(getattr(block, end), _INPUTS)
        setattr(block, end, last)
        last.register_forward_hook(partial(_change_result, self._leave))

    def _cut_linear(self, linear: Any, dim: int) -> nn.Module:
        """Return this rank's part of a linear, by its outputs or its inputs."""
        if isinstance(linear, LoraLinear):
            linear.base_layer = self._cut_linear(linear.base_layer, dim)
            cut, whole = linear.lora_B, linear.lora_A
            if dim == _INPUTS:
                cut, whole = whole, cut
            cut.weight = self._cut_parameter(cut.weight, dim)[0]
            self._finish_embedding(whole)
            return linear
        if isinstance(linear, Linear):
            linear.weight = self._cut_parameter(linear.weight, dim)[0]
        else:
            _cut_nf4(linear, dim, self._rank, self._ranks)
        if linear.bias is None:
            return linear
        if dim == _OUTPUTS:
            linear.bias = self._cut_parameter(linear.bias, _OUTPUTS)[0]
            return linear
        # Every rank adds its part of the bias, since the results are added up.
        if linear.bias.requires_grad:
            self._sum_parameter(linear.bias)
            return _DividedBias(linear, self._ranks)
        linear.bias = nn.Parameter(linear.bias / self._ranks, requires_grad=False)
        return linear

    def _cut_parameter(self, whole: Any, dim: int) -> tuple[nn.Parameter, int]:
        """Return this rank's part of a parameter and where it begins."""
        parts = whole.detach().chunk(self._ranks, dim)
        part = parts[self._rank].clone(memory_format=torch.contiguous_format)
        first = sum(other.shape[dim] for other in parts[: self._rank])
        if not whole.requires_grad:
            return nn.Parameter(part, requires_grad=False), first
        stride = torch.empty(whole.shape, device="meta").stride()
        shared = DTensor.from_local(
            part, self._mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=stride
        )
        return nn.Parameter(shared), first

    def _finish_embedding(self, *modules: Any) -> None:
        for module in modules:
            for parameter in module.parameters():
                self._sum_parameter(parameter)

    def _sum_parameter(self, parameter: nn.Parameter) -> None:
        self._summed.append(parameter)

    def _name_summed(self, module: nn.Module, prefix: str) -> None:
        """Keep names alone: FSDP replaces the parameters."""
        summed = {id(parameter) for parameter in self._summed if parameter.requires_grad}
        found = (name for name, parameter in module.named_parameters() if id(parameter) in summed)
        self.summed.update(prefix + name for name in found)
        self._summed.clear()

    def _prepare_head(self, norm: nn.Module, classifies: bool) -> None:
        """Give the head what it needs: all tokens, and for a shared vocabulary a sum backward."""
        after: Callable[[Tensor], Tensor] = self._enter
        if classifies:  # every rank computes the same with the whole head
            if not self._sequence:
                return
            after = partial(collectives.join_tokens, group=self._group)
        norm.register_forward_hook(partial(_change_result, after))


class _DividedBias(nn.Module):
    """A `Linear` that adds one of several equal parts of its trainable bias."""

    def __init__(self, linear: Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`."""
        assert self.bias is not None
        return nn.functional.linear(x, local_weight(self.weight), self.bias / self._parts)


def _first_argument(
    change: Callable[[Tensor], Tensor], _module: nn.Module, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    return change(arguments[0]), *arguments[1:]


def _change_result(
    change: Callable[[Tensor], Tensor], _module: nn.Module, _arguments: object, result: Tensor
) -> Tensor:
    return change(result)


def sum_gradients(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace gradients of one dtype by their sums over a group, in one collective."""
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=group)
    for gradient, total in zip(
        gradients, together.split([part.numel() for part in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))


def _cut_nf4(linear: Any, dim: int, rank: int, ranks: int) -> None:
    """Keep a part of bitsandbytes' NF4 linear, by its outputs (0) or its inputs (1), in place.

    Codes and scales are the same, so the cut changes no weight.

    A byte has two neighbours of a row, and a scale is for 64 of them: the parts of a row must be
    whole blocks. `trainer.model.shards` refuses others before a model is loaded.
    """
    weight, state = linear.weight, linear.weight.quant_state
    rows, columns = state.shape
    assert columns % (state.blocksize * (ranks if dim else 1)) == 0, f"{columns} columns"
    assert not state.nested, "the scales are quantised too"

    def part(values: torch.Tensor) -> torch.Tensor:
        return values.view(rows, -1).chunk(ranks, dim)[rank].contiguous()

    shape = torch.Size((rows // ranks, columns) if dim == 0 else (rows, columns // ranks))
    mine = type(state)(
        absmax=part(state.absmax).view(-1),
        shape=shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    linear.weight = type(weight)(
        part(weight.data).view(-1, 1),
        requires_grad=False,
        quant_state=mine,
        blocksize=state.blocksize,
        compress_statistics=False,
        quant_type=state.quant_type,
        quant_storage=weight.quant_storage,
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = mine
    linear.out_features, linear.in_features = shape
