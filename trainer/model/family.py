"""A family of models: a row of the table in `families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.system.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """Values that a layer of transformers' code saves for backward; defaults: Motley's decoder."""

    norms: int = 2
    """Norms of the residual stream."""
    inner: int = 4
    """Tensors of the MLP's columns; experts that do not train keep one less."""
    queries: int = 2
    """Tensors of all queries' columns."""
    repeated: bool = False
    """Keys and values are repeated for the heads that share them."""
    scores: int = 0
    """Tensors with a number for each head and pair of tokens: attention is not fused."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`."""

    code: Literal["motley", "transformers"] = "transformers"
    """Whose code computes the layers: Motley's decoder and its wgpu kernels, or transformers'
    code."""
    listed: bool = True
    """Its gradients are compared with those of transformers and PEFT; the class of another family
    is checked when it is loaded, by what it computes."""
    refused: str = ""
    """Why none of its models trains; empty if they may."""
    full_refused: str = ""
    """Why they do not train whole, but by adapters alone."""
    renamed: tuple[str, ...] = ()
    """Parts of the names of linears that transformers renames when it loads them."""
    causal: str = ""
    """The class of language models; empty if it is the one that config.json names."""
    classifier: str = ""
    """The class of classifiers; empty if transformers has none."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that the class assumes for keys that config.json lacks."""
    gated: bool = True
    """The MLP has a gate."""
    norms: int = 2
    """Norms of the residual stream in a layer."""
    normalised_heads: bool = False
    """Queries and keys pass an RMSNorm each, head by head."""
    norms_all_heads: bool = False
    """These have a weight for each column of all heads."""
    gated_queries: bool = False
    """Queries bring a gate of as many columns."""
    bare_output: bool = False
    """With `attention_bias` the projection of attention's output has none."""
    biased: tuple[str, ...] = ()
    """Linears that have a bias whatever config.json says."""
    keys: tuple[str, ...] = ()
    """Keys that only some families have, and this one."""
    inside: str = ""
    """The module of the language model in the class that transformers loads, if that has other
    parts, which are not read: names in adapters' files begin with it."""
    backbone: str = "model"
    """The module of embedding, layers and norm."""
    layers: str = "layers"
    """The module list in it."""
    embedding: str = "embed_tokens"
    """The embedding of tokens in it."""
    transposed: bool = False
    """Linears store `[in, out]`."""
    experts: tuple[str, str, str] | None = None
    """Names of an expert's gate, up and down in files that store experts one by one; the class
    stacks them."""
    transposed_experts: bool = False
    """Stacked experts are `[experts, in, out]`."""
    converts_experts: bool = True
    """PEFT takes the names of stored experts' linears for the parameters that stack them."""
    unadapted: tuple[str, ...] = ()
    """Linears that PEFT leaves without an adapter, since the class reads their weights itself."""
    moved: tuple[tuple[str, str], ...] = ()
    """Parts of names in files, and what the class calls them."""
    ignored: str = ""
    """Pattern of tensors in files that the class does not load."""
    logit_divisor: str = ""
    """The key of what logits are divided by."""
    logit_factor: str = ""
    """The key of what logits are multiplied by."""
    logit_width: str = ""
    """The key of a width; logits are divided by how often the hidden size has it."""
    logit_cap: str = ""
    """The key of what bounds logits, by a hyperbolic tangent."""
    packs: bool = True
    """Layers keep the samples of a row apart."""
    recurrent: bool = False
    """Layers pass a state from token to token, also through padding."""
    gguf: str = ""
    """Its name in GGUF files, by llama.cpp's converter; empty if such files are not converted."""
    gguf_interleaved: bool = False
    """It reorders the rows of queries and keys: those that turn together are neighbours."""
    kept: SavedActivations = SavedActivations()
    """Counted in tests/trainer/planning/test_replica_memory.py."""

    def parameter_name(self, stored: str) -> str:
        """Return what the class calls a tensor of a file."""
        for part, own in self.moved:
            stored = stored.replace(part, own)
        return stored

    def check_trained(self, model_type: str, where: str, method: str) -> None:
        """Check what is known of a model without its weights.

        Raises:
            InputError: no model of this type trains, or none by this method; `where` begins it.
        """
        if self.refused:
            raise InputError(f"{where}: {model_type} is not trained here: {self.refused}")
        if method == "full" and self.full_refused:
            raise InputError(
                f"{where}: method full: {self.full_refused}; set method lora, which leaves the rest"
                " as it is"
            )

    @property
    def has_windows(self) -> bool:
        """Whether attention may have a sliding window."""
        return "sliding_window" in self.keys
