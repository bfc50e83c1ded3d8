"""One step of a fine-tune, from a config file to a checkpoint, on any backend."""

__version__ = "0.1.0"
"""Version of both programs; pyproject.toml reads it, so that a checkout needs no installation."""
