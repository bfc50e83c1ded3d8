"""Lossy codecs for slow links, and the error feedback that makes up for what they drop.

They are not on the wire yet: the exchange moves fp32 and bf16 (`trainer.exchange.protocol.codecs`).
docs/low-bandwidth.md has their formats, bytes and measured losses.
"""
