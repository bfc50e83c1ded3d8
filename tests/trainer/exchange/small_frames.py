"""Tensors cut into many small frames."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.exchange.protocol import blocks, state_transfer


@pytest.fixture(scope="module")
def small_frames() -> Iterator[None]:
    """Cut tensors into frames of 16 bytes, so that the tiny blocks travel in several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK", 16)
        patch.setattr(state_transfer, "CHUNK", 16)
        yield
