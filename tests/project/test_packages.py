"""pyproject.toml, the Makefile and the folders tell the same story."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tests import ROOT
from tests.trainer.small_model import write_data
from tests.waiting import PATIENCE
from trainer import __version__

if TYPE_CHECKING:
    from tests.conftest import TinyModel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[str]:
    """Return every requirement of the distribution and its extras."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [*PROJECT["project"]["dependencies"], *(item for extra in extras for item in extra)]


def test_every_folder_of_sources_is_a_package() -> None:
    """setuptools finds packages alone, so a folder without `__init__.py` would not be installed."""
    folders = {
        file.parent for top in ("launcher", "trainer") for file in (ROOT / top).rglob("*.py")
    }
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_package_data_exists() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: nothing matches {pattern}"


def test_what_others_may_import_exists_and_is_typed() -> None:
    section = (ROOT / "docs" / "json.md").read_text().partition("## From Python")[2]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", section, re.M)
    strict = PROJECT["tool"]["pyright"]["strict"]
    assert rows
    for module, names in rows:
        assert f"{module.replace('.', '/')}.py" in strict, f"{module} is not checked strictly"
        for name in re.findall(r"`(\w+)`", names):
            assert getattr(importlib.import_module(module), name).__doc__


def test_the_makefile_installs_the_torch_that_the_project_requires() -> None:
    version = re.search(r"^TORCH_VERSION\s*:=\s*(\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert version
    assert f"torch=={version[1]}" in requirements()


def test_a_plain_launcher_install_pulls_no_torch() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    light = [*PROJECT["project"]["dependencies"], *extras["launcher"], *extras["coordinator"]]
    heavy = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "motley[trainer]")
    assert not [item for item in light if item.startswith(heavy)]


def test_the_launcher_runs_without_the_extras_that_train(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    extras = {"blake3", "jinja2", "psutil", "safetensors", "tensorboard", "tokenizers"}
    wanted = PROJECT["project"]["optional-dependencies"]["launcher"]
    assert not [item for item in wanted if re.split("[<>=]", item)[0] in extras]
    absent = sorted(extras - {"jinja2"})  # which is Ansible's as well
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent}); "
        "from launcher.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", code]
    given = ["--model", tiny_model(), "--data", write_data(tmp_path / "train.jsonl")]
    subprocess.run([*command, "init", tmp_path / "run.yaml", *given], check=True)
    done = subprocess.run(
        [*command, "cluster", "up", "--dry-run", "--config", tmp_path / "run.yaml"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "--role coordinator" in done.stdout


def test_every_dependency_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in requirements():
        name = re.split(r"[\[<>=;,! ]", requirement, maxsplit=1)[0]
        assert name == "motley" or f"`{name}`" in reasons, f"{name} is not in docs/dependencies.md"


def test_programs_run_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """As on a borrowed machine without a network: what they import is there, Motley is not."""
    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    (tmp_path / "launcher").symlink_to(ROOT / "launcher")
    for module, says in (("trainer.cli", __version__), ("launcher.cli", f"motley {__version__}")):
        without = (
            "import importlib.metadata, runpy, sys\n"
            "found = importlib.metadata.distribution\n"
            "def distribution(name):\n"
            "    if name == 'motley': raise importlib.metadata.PackageNotFoundError(name)\n"
            "    return found(name)\n"
            "importlib.metadata.distribution = distribution\n"
            "sys.argv = [sys.argv[1], '--version']\n"
            "runpy.run_module(sys.argv[0], run_name='__main__')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", without, module],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.stdout.strip(), done.returncode) == (says, 0), done.stderr
