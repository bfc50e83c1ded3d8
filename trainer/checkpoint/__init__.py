"""Checkpoints: written, read, resumed from, merged."""
