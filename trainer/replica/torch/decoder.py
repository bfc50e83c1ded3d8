"""The decoder of Qwen3, Qwen2 and Llama in torch.

The operations are those of transformers' models and come in their order, parameters have the same
names, and the backbone is called the same way. What is left out is what a training step never uses.
The reason is the start of a worker: the import of transformers' model code costs twice as much as
that of torch (docs/decisions.md, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.model.architecture import Architecture
from trainer.replica import rope
from trainer.replica.torch.linear import Linear

_ACTIVATIONS = ("silu", "swish")  # two names of one function
_FUSED_WIDTH = 256
"""The widest head whose keys and values torch's fused kernels share between heads."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[B, T, head_dim]` each."""


class Stored(Protocol):
    """A model's weights by name, on their device and in their dtype."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        ...

    def linear(self, name: str, *, biased: bool) -> nn.Module:
        """Return the product with `name.weight`, quantised or not, plus `name.bias`."""
        ...


class Hidden(NamedTuple):
    """What the backbone returns."""

    last_hidden_state: Tensor
    """`[B, T, D]`"""


def is_computed_here(tree: Mapping[str, Any]) -> bool:
    """Return whether the decoder computes the model of a config.json of a supported family."""
    return tree.get("hidden_act", "silu") in _ACTIVATIONS and rope.is_computed_here(tree)


class Decoder(nn.Module):
    """The model: a backbone and `lm_head`, or `score` of a classifier.

    Args:
        tree: the model's config.json.
        where: names it in errors.
        num_classes: of a classifier, whose head is made of zeros; None for a language model.
    """

    def __init__(
        self,
        architecture: Architecture,
        tree: Mapping[str, Any],
        where: str,
        stored: Stored,
        num_classes: int | None,
    ) -> None:
        super().__init__()
        self.model = Backbone(architecture, tree, where, stored)
        table = self.model.embed_tokens.weight.detach()
        if num_classes is not None:
            self.score = Linear(table.new_zeros(num_classes, architecture.hidden_size))
        elif architecture.tied:
            self.lm_head = Linear(table)
            self.lm_head.weight = self.model.embed_tokens.weight  # pyright: ignore[reportAttributeAccessIssue]  # a parameter
        else:
            self.lm_head = Linear(stored.tensor("lm_head.weight"))


class Backbone(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self, architecture: Architecture, tree: Mapping[str, Any], where: str, stored: Stored
    ) -> None:
        super().__init__()
        eps = float(tree.get("rms_norm_eps", 1e-6))
        self.recompute = False
        table = stored.tensor("model.embed_tokens.weight")
        # No padding index: where a model pads with a token that texts contain, it is trained too.
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(
            Layer(architecture, eps, f"model.layers.{number}", stored)
            for number in range(architecture.num_layers)
        )
        self.norm = RMSNorm(stored.tensor("model.norm.weight"), eps)
        turns = torch.from_numpy(rope.frequencies(tree, architecture.head_dim, where))
        self._turns = torch.cat((turns, turns)).to(table.device)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> Hidden:
        """Return the hidden states of token ids `[B, T]`.

        Args:
            position_ids: `[B, T]`, each token's place in its sample, where rows hold several;
                these do not see each other. None where a row is one sample.
            use_cache: must be False.
        """
        assert not use_cache, "the decoder keeps no keys and values"
        hidden = self.embed_tokens(input_ids)
        places = position_ids
        if places is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = None if position_ids is None else _within_samples(position_ids)
        angles = places[..., None].float() * self._turns
        rotation = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rotation, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, rotation, mask)
        return Hidden(self.norm(hidden))


class Layer(nn.Module):
    """Attention, then a gated MLP, each behind a norm and beside a shortcut."""

    def __init__(self, architecture: Architecture, eps: float, name: str, stored: Stored) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(stored.tensor(f"{name}.input_layernorm.weight"), eps)
        self.self_attn = Attention(architecture, eps, f"{name}.self_attn", stored)
        self.post_attention_layernorm = RMSNorm(
            stored.tensor(f"{name}.post_attention_layernorm.weight"), eps
        )
        self.mlp = MLP(architecture, f"{name}.mlp", stored)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Return the next hidden states."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with grouped keys and values; Qwen3 normalises queries and keys."""

    def __init__(self, architecture: Architecture, eps: float, name: str, stored: Stored) -> None:
        super().__init__()
        self._head_dim = architecture.head_dim
        self._group = architecture.num_heads // architecture.num_kv_heads

        def linear(part: str) -> nn.Module:
            return stored.linear(f"{name}.{part}", biased=part in architecture.biased)

        def norm(part: str) -> nn.Module:
            if not architecture.normalised_heads:
                return nn.Identity()
            return RMSNorm(stored.tensor(f"{name}.{part}.weight"), eps)

        self.q_proj, self.k_proj = linear("q_proj"), linear("k_proj")
        self.v_proj, self.o_proj = linear("v_proj"), linear("o_proj")
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Return `[B, T, D]`; without a mask every token sees those before it."""
        heads = (*x.shape[:-1], -1, self._head_dim)
        queries = _turned(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), rotation)
        keys = _turned(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), rotation)
        values = self.v_proj(x).view(heads).transpose(1, 2)
        fused = mask is None and self._head_dim <= _FUSED_WIDTH
        if not fused:
            keys, values = (part.repeat_interleave(self._group, 1) for part in (keys, values))
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=fused and self._group > 1,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, architecture: Architecture, name: str, stored: Stored) -> None:
        super().__init__()

        def linear(part: str) -> nn.Module:
            return stored.linear(f"{name}.{part}", biased=part in architecture.biased)

        self.gate_proj, self.up_proj = linear("gate_proj"), linear("up_proj")
        self.down_proj = linear("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Root mean square normalisation in fp32 (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads `[B, H, T, head_dim]`, each half against the other."""
    cosines, sines = (part[:, None] for part in rotation)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


def _within_samples(positions: Tensor) -> Tensor:
    """Return bool `[B, 1, T, T]`: which tokens each one sees, those before it in its sample."""
    sample = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    same = sample[:, :, None] == sample[:, None, :]
    return (same & torch.ones_like(same[0]).tril())[:, None]
