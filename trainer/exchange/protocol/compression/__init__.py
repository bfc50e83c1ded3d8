"""Lossy codecs for slow links, and the error feedback that makes up for what they drop.

`exchange.codec` chooses one; fp32 and bf16 are in `trainer.exchange.protocol.codecs`.
docs/low-bandwidth.md has their formats, bytes and measured losses.
"""
