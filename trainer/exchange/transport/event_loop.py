"""Calls to an event loop of another thread, which may end at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def call_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts
) -> None:
    """Have a loop call a function soon; nothing happens if the loop has ended.

    To ask first whether it has ended would not do: it can end in between.
    """
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
