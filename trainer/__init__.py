"""One step of a fine-tune, from a config file to a checkpoint, on any backend."""

__version__ = "0.1.0"
"""Of both programs; pyproject.toml takes it from here, so that a checkout needs no installation."""
