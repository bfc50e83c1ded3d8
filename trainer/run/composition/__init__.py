"""Composes a run: the only place where its inputs become objects."""
