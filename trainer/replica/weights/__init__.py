"""Frozen weights in their files: as they are stored, quantised once, and read during a pass."""
