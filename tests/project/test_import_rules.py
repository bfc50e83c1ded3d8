"""The import rules of docs/architecture.md hold, and each of them bites when it is broken."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in a folder."""
    return subprocess.run(
        [LINT, "--no-cache"],
        cwd=folder,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


PLANTED = (
    ("launcher/errors.py", "import launcher.commands", "launcher-layers"),
    ("launcher/brand_new.py", "", "launcher-layers"),
    ("trainer/system/errors.py", "import trainer.config.run", "trainer-layers"),
    ("trainer/brand_new.py", "", "trainer-layers"),
    ("trainer/data/order.py", "import trainer.replica", "trainer-layers"),
    ("launcher/commands/__init__.py", "import trainer.exchange", "launcher-of-trainer"),
    ("trainer/exchange/__init__.py", "import launcher", "trainer-of-launcher"),
    ("launcher/commands/__init__.py", "import torch", "light-launcher"),
    ("trainer/config/run.py", "import torch", "light-launcher"),
    ("trainer/config/run.py", "import torch", "light-coordinator"),
    ("trainer/exchange/__init__.py", "import wgpu", "light-coordinator"),
    ("trainer/model/layout.py", "import torch", "light-coordinator"),
    ("trainer/optimizer/adamw.py", "import transformers", "light-coordinator"),
    ("trainer/checkpoint/store.py", "import peft", "light-coordinator"),
    ("trainer/exchange/coordinator/membership.py", "import socket", "sans-io"),
    ("trainer/exchange/coordinator/ledger.py", "import time", "sans-io"),
    ("trainer/replica/torch/replica.py", "import wgpu", "torch-beside-wgpu"),
    ("trainer/exchange/protocol/wire.py", "import trainer.exchange.transport", "exchange-layers"),
    ("trainer/replica/wgpu/gpu/device.py", "import trainer.replica.wgpu.kernels", "wgpu-layers"),
    ("launcher/commands/__init__.py", "import launcher.hosts.ssh_pipe", "one-ssh-door"),
    ("launcher/commands/runs.py", "import launcher.inventory.hosts", "commands-through-services"),
    ("launcher/hosts/fleet.py", "import paramiko", "one-login"),
    ("trainer/distill/stopping.py", "import trainer.checkpoint.resume", "composition-root"),
)
"""Files, lines at their ends, and the contracts that forbid them."""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what import-linter says of each contract where everything above is planted."""
    folder = tmp_path_factory.mktemp("broken")
    for package in ("launcher", "trainer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module, line in dict.fromkeys((module, line) for module, line, _ in PLANTED):
        with (folder / module).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    result = lint(folder)
    details = result.stdout.partition("Broken contracts\n")[2]
    assert details, result.stdout + result.stderr
    sections = re.split(r"^(.+)\n-+\n", details, flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return {each["id"]: found.get(each["name"], "") for each in contracts}


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED)
def test_each_contract_bites(
    complaints: dict[str, str], module: str, line: str, contract: str
) -> None:
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imported = line.removeprefix("import ")
    said = rf"^ *-? *{name} -> {imported} \(l\." if line else rf"^- {name}$"
    assert re.search(said, complaints[contract], re.MULTILINE), complaints[contract]


BY_STRING = {
    "trainer/system/commandline/lazy_group.py": "commands, when one of them runs",
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
