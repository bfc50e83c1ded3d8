"""The names of a classifier's classes, as `id2label` of config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def read_class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names by class; none if config.json has none, or only those that number them."""
    tree: Any = config.get("id2label")
    if not isinstance(tree, dict):
        return ()
    names = cast("dict[str, Any]", tree)
    found = [names.get(str(number)) for number in range(len(names))]
    named = [name for name in found if isinstance(name, str) and name.strip()]
    if len(set(named)) < len(names) or named == _number_classes(len(names)):
        return ()
    return tuple(named)


def make_id2label(names: tuple[str, ...], count: int) -> dict[str, str]:
    """Return what config.json has: each class's name, or the one that transformers gives it."""
    return {str(number): name for number, name in enumerate(names or _number_classes(count))}


def _number_classes(count: int) -> list[str]:
    return [f"LABEL_{number}" for number in range(count)]
