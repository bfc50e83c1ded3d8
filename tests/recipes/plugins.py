"""Loads Ansible's plugins of this project the way Ansible does: each file alone."""

import importlib.util
from types import ModuleType

from tests import ROOT

PLAYBOOKS = ROOT / "playbooks"


def load(path: str) -> ModuleType:
    """Return the module of a file below playbooks/."""
    file = PLAYBOOKS / path
    spec = importlib.util.spec_from_file_location(f"plugin_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
