"""Checks of received bytes, before they become values."""

from __future__ import annotations

import numpy as np

from trainer.exchange.protocol.codecs import Bytes
from trainer.system.errors import ProtocolError

_EXPONENT = np.uint16(0x7F80)


def check_length(name: str, encoded: Bytes, expected: int) -> None:
    """Compare a block's bytes with what the layout says.

    Raises:
        ProtocolError: they differ.
    """
    if encoded.size != expected:
        raise ProtocolError(f"{name}: a block of {encoded.size} bytes came, {expected} are due")


def check_finite(name: str, encoded: Bytes) -> None:
    """Check bf16 numbers by their bits: the processor flags a signalling NaN wherever it computes.

    Raises:
        ProtocolError: one is NaN or Inf.
    """
    if ((encoded.view("<u2") & _EXPONENT) == _EXPONENT).any():
        raise ProtocolError(f"{name}: a number is not finite")
