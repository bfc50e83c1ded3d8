"""The section `lora`: which linears get an adapter, and of which kind."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Annotated

from pydantic import Field, field_validator

from trainer.config.section import Section
from trainer.config.training import Positive
from trainer.system.errors import InputError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a layer that Motley's own decoder computes."""


class LoraSettings(Section):
    """Low-rank adapters (arXiv:2106.09685)."""

    lora_rank: Positive = 16
    """Rank of an adapter's product B A."""
    lora_alpha: int = Field(default=32, gt=0, le=1_000_000)
    """Factor of B A, divided by the rank."""
    target_modules: tuple[Annotated[str, Field(pattern=r"^[\w.]+$")], ...] | None = Field(
        default=None, min_length=1
    )
    """The linears that get an adapter, such as `[q_proj, v_proj]`; null: all, as PEFT's
    `all-linear`.

    `attn.c_proj` if several end alike. All linears of the layers include the experts and router
    that transformers makes of linears."""

    target_parameters: tuple[Annotated[str, Field(pattern=r"^[\w.]+$")], ...] | None = None
    """Parameters of experts and routers that get an adapter, as in PEFT; null: those that
    `target_modules` means."""

    layers_to_transform: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1
    )
    """The layers that get adapters, counted from 0, as PEFT names it; null: all."""

    freeze_a: bool = False
    """Keep A at its seeded start: B alone trains and is exchanged, half of the bytes (FFA-LoRA,
    arXiv:2403.12313).

    The mean of several workers' B A then is that of their B."""

    use_rslora: bool = False
    """Scale B A by alpha / sqrt(r), not by alpha / r (rsLoRA, arXiv:2312.03732)."""

    use_dora: bool = False
    """Train the norm of each row of W + B A too, apart from its direction (DoRA,
    arXiv:2402.09353)."""

    modules_to_save: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()
    """Train `lm_head`, the embedding (`embed_tokens`; `wte` of GPT-2) or both whole, beside the
    adapters.

    Tied ones are trained apart. They are saved in the adapter, as PEFT does."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.compute_scale(self.lora_rank)

    def compute_scale(self, rank: int, stacked: int = 1) -> float:
        """Return the factor of B A of a rank, whose alpha counts for each of `stacked` linears."""
        return stacked * self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def select_layers(self, count: int) -> tuple[int, ...]:
        """Return the layers of `count` that get adapters, in order.

        Raises:
            InputError: the model has no such layer.
        """
        found = range(count) if self.layers_to_transform is None else self.layers_to_transform
        if max(found) >= count:
            raise InputError(
                f"lora.layers_to_transform: the model has layers 0 to {count - 1}, no {max(found)}"
            )
        return tuple(sorted(set(found)))

    @property
    def adapted_layers(self) -> int | None:
        """The number of layers that get adapters; None for all."""
        chosen = self.layers_to_transform
        return None if chosen is None else len(set(chosen))

    @property
    def adapts_experts(self) -> bool | None:
        """Whether experts have adapters too, if the model has any; None: if its family's do."""
        if self.target_modules is None and self.target_parameters is None:
            return None
        stacked = {"w1", "w2", "w3", "gate", "gate_proj", "up_proj", "down_proj"}
        return bool(self.target_parameters or stacked & {*(self.target_modules or ())})

    @property
    def linears(self) -> tuple[str, ...]:
        """Those of a layer that Motley's own decoder computes."""
        return self.target_modules or LINEARS

    @field_validator("target_modules", mode="before")
    @classmethod
    def _check_list(cls, value: object) -> object:
        if isinstance(value, str):
            every = "all linears are the default: leave the setting out"
            close = get_close_matches(value, LINEARS, n=1)
            some = f"a list is needed, such as [{close[0] if close else 'q_proj, v_proj'}]"
            raise ValueError(every if value.startswith("all") else some)
        return value
