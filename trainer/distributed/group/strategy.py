"""The strategies of a replica group, by name; imports nothing heavy."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["ddp", "fsdp", "tensor"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
