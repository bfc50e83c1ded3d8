"""`--set KEY=VALUE`: any setting of a run config as a flag."""

from __future__ import annotations

from typing import Any

from trainer.errors import InputError


def setting(text: str) -> tuple[str, Any]:
    """Return the dotted path and the value of `KEY=VALUE`, the value read as YAML.

    Raises:
        InputError: it is neither.
    """
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: give KEY=VALUE, such as training.seed=3")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"--set {text}: the value is not valid YAML") from None
