"""Frozen and trainable weights on their way to the device."""
