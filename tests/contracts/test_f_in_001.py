"""F-IN-001: what a person brings is used, or refused by its name; the rest is said once.

Every reader has a `KeyTable`. Here each of them is given a key that is in no part of its table,
through the code that reads real files, and each refused key is refused by its name.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import launcher
import trainer
from trainer.system.key_table import KeyTable


def key_tables() -> dict[str, KeyTable]:
    """Return the tables of all modules, by `module.NAME`."""
    found: dict[str, KeyTable] = {}
    for package in (trainer, launcher):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, KeyTable) and value not in found.values():
                    found[f"{module.name}.{name}"] = value
    return found


TABLES = key_tables()


@pytest.mark.parametrize("name", TABLES)
def test_every_refusal_says_what_to_do(name: str) -> None:
    table = TABLES[name]
    for key in table.refused:
        refusal = table.refusal([key])
        assert refusal is not None
        assert refusal.startswith(f"'{key}' ")
        assert "\n" not in refusal
