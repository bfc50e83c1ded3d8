"""The decoder of Llama, Mistral, Qwen2, Qwen3 and SmolLM3 in torch.

The operations and their order are those of transformers' models, parameters have the same names,
and the backbone is called the same way. What a training step never uses is left out. The reason is
the start of a worker: importing transformers' model code costs twice as much as importing torch
(docs/decisions.md, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.model.architecture import Architecture
from trainer.replica import rope
from trainer.replica.torch.cache import KVCache
from trainer.replica.torch.linear import Linear
from trainer.replica.torch.streaming import StreamedHead

TABLE = "model.embed_tokens.weight"
_FUSED_WIDTH = 256
"""The widest head for which torch's fused kernels share keys and values between heads."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[B, T, head_dim]` each."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""`Cache.attend` of a layer."""
Finish = Callable[[int, "Layer"], None]


class WeightSource(Protocol):
    """A model's weights by name, on their device and in their dtype."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        ...

    def embedding(self, name: str) -> nn.Module:
        """Return what looks up rows of a tensor; a tied head needs its `weight`."""
        ...

    def linear(self, name: str, *, biased: bool) -> nn.Module:
        """Return the product with `name.weight`, quantised or not, plus `name.bias`."""
        ...


class Hidden(NamedTuple):
    """The output of the backbone."""

    last_hidden_state: Tensor
    """`[B, T, D]`"""


class Decoder(nn.Module):
    """The model: a backbone and `lm_head`, or `score` of a classifier.

    A stage of a pipeline has some of the layers, under their names in the whole model; the first
    stage has the embedding, and the last one the norm and the head.

    Args:
        tree: the model's config.json.
        where: names it in errors.
        num_classes: of a classifier, whose head is zero until written; None for a language model.
        layers: of a stage; None for all.
        finish: takes each layer and its number before the next one is read.
        head: of a language model; None: it stays in memory.
    """

    def __init__(
        self,
        architecture: Architecture,
        tree: Mapping[str, Any],
        where: str,
        stored: WeightSource,
        num_classes: int | None,
        layers: range | None = None,
        finish: Finish | None = None,
        head: StreamedHead | None = None,
    ) -> None:
        super().__init__()
        layers = range(architecture.num_layers) if layers is None else layers
        self.model = Backbone(architecture, tree, where, stored, layers, finish)
        embedding, norm = self.model.embed_tokens, self.model.norm
        if norm is None:
            return
        if num_classes is not None:
            rows = torch.zeros(num_classes, architecture.hidden_size, device=norm.weight.device)
            self.score = Linear(rows)
        elif head is not None:
            self.lm_head = head
        elif architecture.tied and embedding is not None:
            table: Any = embedding.weight
            self.lm_head = Linear(table.detach())
            self.lm_head.weight = table
        else:
            self.lm_head = Linear(stored.tensor(TABLE if architecture.tied else "lm_head.weight"))


class Backbone(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self,
        architecture: Architecture,
        tree: Mapping[str, Any],
        where: str,
        stored: WeightSource,
        layers: range,
        finish: Finish | None,
    ) -> None:
        super().__init__()
        eps = float(tree.get("rms_norm_eps", 1e-6))
        self.recompute = False
        self.embed_tokens = self.norm = None
        if layers.start == 0:
            self.embed_tokens = stored.embedding(TABLE)
        self.layers = nn.ModuleList()
        for number in layers:
            layer = Layer(architecture, eps, number, stored)
            if finish is not None:
                finish(number, layer)
            self.layers.add_module(str(number), layer)
        if layers.stop == architecture.num_layers:
            self.norm = RMSNorm(stored.tensor("model.norm.weight"), eps)
        turns = torch.from_numpy(rope.compute_rope_frequencies(tree, architecture.head_dim, where))
        self._turns = torch.cat((turns, turns)).to(next(self.parameters()).device)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        cache: KVCache | None = None,
    ) -> Hidden:
        """Return the hidden states of token ids `[B, T]`.

        Args:
            input_ids: of a stage without the embedding: the hidden states `[B, T, D]` before it.
            position_ids: `[B, T]`, each token's place in its sample, if rows hold several, which
                do not see each other. None if a row is one sample.
            use_cache: must be False.
            cache: of the rows' tokens so far; `position_ids` are then places of a row.
        """
        assert not use_cache, "keys and values are kept in `cache`"
        hidden = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        mask = None
        if cache is not None:
            cache.advance(position_ids, input_ids.shape[1])
        elif position_ids is not None:
            mask = within_samples(position_ids)
        rotation = self.compute_rotation(input_ids, position_ids, hidden.dtype)
        for number, layer in enumerate(self.layers):
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rotation, mask, use_reentrant=False)
            else:
                attend = None if cache is None else partial(cache.attend, number)
                hidden = layer(hidden, rotation, mask, attend)
        return Hidden(hidden if self.norm is None else self.norm(hidden))

    def compute_rotation(
        self, ids: Tensor, positions: Tensor | None, dtype: torch.dtype
    ) -> Rotation:
        """Return the rotation of tokens `[B, T]`, all of which a part of their states needs, too.

        Args:
            positions: as for `forward`.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        angles = positions[..., None].float() * self._turns
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Layer(nn.Module):
    """Attention, then a gated MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, architecture: Architecture, eps: float, number: int, stored: WeightSource
    ) -> None:
        super().__init__()
        name, self._rotates = f"model.layers.{number}", number not in architecture.unrotated
        self.input_layernorm = RMSNorm(stored.tensor(f"{name}.input_layernorm.weight"), eps)
        self.self_attn = Attention(architecture, eps, f"{name}.self_attn", stored)
        self.post_attention_layernorm = RMSNorm(
            stored.tensor(f"{name}.post_attention_layernorm.weight"), eps
        )
        self.mlp = MLP(architecture, f"{name}.mlp", stored)

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, attend: Attend | None = None
    ) -> Tensor:
        """Return the next hidden states."""
        turns = rotation if self._rotates else None
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turns, mask, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with grouped keys and values; Qwen3 normalises queries and keys."""

    def __init__(
        self, architecture: Architecture, eps: float, name: str, stored: WeightSource
    ) -> None:
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

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Return `[B, T, D]`; without a mask every token sees those before it."""
        heads = (*x.shape[:-1], -1, self._head_dim)
        queries = _apply_rotation(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), rotation)
        keys = _apply_rotation(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), rotation)
        values = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = None if attend is None else attend(queries, keys, values)
        if mixed is not None:
            return self.o_proj(mixed.reshape(*x.shape[:-1], -1))
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

    def __init__(self, architecture: Architecture, name: str, stored: WeightSource) -> None:
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


def _apply_rotation(heads: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate heads `[B, H, T, head_dim]`, each half against the other, if the layer does that."""
    if rotation is None:
        return heads
    cosines, sines = (part[:, None] for part in rotation)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


def within_samples(positions: Tensor) -> Tensor:
    """Return bool `[B, 1, T, T]`: each token sees itself and those before it in its sample."""
    sample = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    same = sample[:, :, None] == sample[:, None, :]
    return (same & torch.ones_like(same[0]).tril())[:, None]
