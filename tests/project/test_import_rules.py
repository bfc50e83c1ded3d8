"""The import rules of docs/architecture.md hold, and each of them bites when it is broken."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in a folder: the named contracts, or all."""
    return subprocess.run(
        [LINT, "--no-cache", *(f"--contract={name}" for name in contracts)],
        cwd=folder,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("launcher/errors.py", "import launcher.commands", "launcher-layers"),
        ("launcher/brand_new.py", "", "launcher-layers"),
        ("trainer/errors.py", "import trainer.config.run", "trainer-layers"),
        ("trainer/brand_new.py", "", "trainer-layers"),
        ("trainer/data/order.py", "import trainer.replica", "trainer-layers"),
        ("launcher/commands/__init__.py", "import trainer.exchange", "launcher-of-trainer"),
        ("trainer/exchange/__init__.py", "import launcher", "trainer-of-launcher"),
        ("launcher/commands/__init__.py", "import torch", "light-launcher"),
        ("trainer/config/run.py", "import torch", "light-launcher"),
        ("trainer/config/run.py", "import torch", "light-coordinator"),
        ("trainer/exchange/__init__.py", "import wgpu", "light-coordinator"),
        ("trainer/model/layout.py", "import torch", "light-coordinator"),
        ("trainer/optimizer.py", "import transformers", "light-coordinator"),
        ("trainer/checkpoint/store.py", "import peft", "light-coordinator"),
        ("trainer/exchange/coordinator/membership.py", "import socket", "sans-io"),
        ("trainer/exchange/coordinator/ledger.py", "import time", "sans-io"),
        ("trainer/replica/torch/replica.py", "import wgpu", "torch-beside-wgpu"),
        (
            "trainer/exchange/protocol/wire.py",
            "import trainer.exchange.transport",
            "exchange-layers",
        ),
        (
            "trainer/replica/wgpu/gpu/device.py",
            "import trainer.replica.wgpu.kernels",
            "wgpu-layers",
        ),
        ("launcher/commands/__init__.py", "import fabric", "one-ssh-door"),
    ],
)
def test_each_contract_bites(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for package in ("launcher", "trainer"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    broken = tmp_path / module
    before = broken.read_text() if broken.exists() else ""
    broken.write_text(f"{before}\n{line}\n")
    result = lint(tmp_path, contract)
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr


BY_STRING = {
    "launcher/commands/lazy.py": "commands, when one of them runs",
    "trainer/commands/lazy.py": "commands, when one of them runs",
    "trainer/evaluate/harness.py": "lm-eval, which is not Motley's",
}
"""Where a module is imported by a string, and what: `lint-imports` does not see it."""


def test_no_import_by_string_hides_a_circle() -> None:
    found = {
        str(path.relative_to(ROOT))
        for top in ("launcher", "trainer")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias))
        and {getattr(node, name, None) for name in ("id", "attr", "name")}
        & {"import_module", "__import__", "runpy", "run_module"}
    }
    assert found == set(BY_STRING)
