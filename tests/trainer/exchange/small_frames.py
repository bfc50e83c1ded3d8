"""Tensors cut into many small frames."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.exchange import gradients, transfer


@pytest.fixture(scope="module")
def small_frames() -> Iterator[None]:
    """Cut tensors into frames of 16 bytes, so that the tiny blocks travel in several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "CHUNK", 16)
        patch.setattr(transfer, "CHUNK", 16)
        yield
