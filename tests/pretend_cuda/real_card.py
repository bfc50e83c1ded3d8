"""A real CUDA device whose waits are counted: `with attached() as card:`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.pretend_cuda.waits import Waits


class RealCard:
    """The device of this process."""

    def __init__(self) -> None:
        self.waits = Waits()


@contextmanager
def attached() -> Iterator[RealCard]:
    """Count waits where torch warns of them, and those for events, of which it does not.

    For how many events the host waits one after the other is a matter of speed, so those of a
    function count once.
    """
    card = RealCard()
    whole, show = torch.cuda.Event.synchronize, warnings.showwarning

    def synchronize(event: torch.cuda.Event) -> None:
        if not event.query():
            card.waits.note(once=True)
        whole(event)

    def count(message: Any, *given: Any, **settings: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            card.waits.note()
        else:
            show(message, *given, **settings)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", count)
        patch.setattr(torch.cuda.Event, "synchronize", synchronize)
        try:
            yield card
        finally:
            torch.cuda.set_sync_debug_mode("default")
