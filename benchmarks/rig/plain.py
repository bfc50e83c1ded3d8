"""The strategies by hand: a Llama in plain PyTorch, wrapped as PyTorch's tutorials do.

The baseline of benchmarks/parallel.py, so nothing of the project is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Tensor], float]


class Plain(nn.Module):
    """A Llama with as many key-value heads as heads; names are those of transformers."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(tree["vocab_size"], tree["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(tree) for _ in range(tree["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(tree["hidden_size"], tree["rms_norm_eps"])
        self.lm_head = nn.Linear(tree["hidden_size"], tree["vocab_size"], bias=False)
        self.head_dim = tree["head_dim"]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits `[B, T, V]`."""
        rotation = rotation_of(ids.shape[1], self.head_dim)
        hidden = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            hidden = layer(hidden, rotation)
        return self.lm_head(self.model.norm(hidden))


class Layer(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = tree["hidden_size"], tree["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(width, tree["num_attention_heads"], tree["head_dim"])
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, tree["intermediate_size"])

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the next hidden states."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, heads * head_dim, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return `[B, T, D]`."""
        queries, keys, values = (
            linear(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            turned(queries, *rotation), turned(keys, *rotation), values, is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotation_of(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[T, head_dim]`."""
    half = head_dim // 2
    turns = 10000.0 ** (-torch.arange(half).float() / half)
    angles = torch.arange(length)[:, None] * turns.repeat(2)
    return angles.cos(), angles.sin()


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads, each half against the other."""
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


def plain_step(model: Plain, strategy: str, mesh: DeviceMesh) -> Step:
    """Return a step: forward and backward of this rank's rows `[B, T]`, gradients reduced.

    Args:
        strategy: ddp, fsdp, tp or tp-sp.
    """
    module: nn.Module = model
    if strategy == "ddp":
        module = DistributedDataParallel(model)
    elif strategy == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        cut(model, mesh, sequence=strategy == "tp-sp")
    return step_of(module, averaged=strategy in ("ddp", "fsdp"))


def step_of(
    module: nn.Module, *, averaged: bool, backward: Callable[[Tensor], object] = Tensor.backward
) -> Step:
    """Return forward and backward of a wrapped model, whose ranks' losses are averaged or equal."""

    def step(ids: Tensor) -> float:
        module.zero_grad(set_to_none=True)
        logits = module(ids)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
        backward(loss)
        total = loss.detach().clone()
        if averaged:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total)

    return step


def cut(model: Plain, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Apply PyTorch's tensor parallelism, as in its tutorial."""
    between = Shard(1) if sequence else Replicate()
    outside: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    inside: dict[str, Any] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        outside["model.norm"] = SequenceParallel()
        inside |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
    parallelize_module(model, mesh, outside)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, inside)
