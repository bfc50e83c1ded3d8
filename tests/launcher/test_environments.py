"""What a wheel needs on a host, by its own metadata."""

from pathlib import Path

import pytest

from launcher import environments
from launcher.environments import WheelFacts, read_wheel
from launcher.errors import ConfigError
from launcher.wheel import build_wheel

ROOT = Path(__file__).parents[2]


def test_requirements_come_from_the_wheel(tmp_path: Path) -> None:
    facts = read_wheel(build_wheel(ROOT, tmp_path).path)
    light = facts.recipe(["coordinator"], None)
    heavy = facts.recipe(["trainer"], "cpu")
    assert light.torch is None
    assert heavy.torch == "cpu"
    assert set(light.requirements) < set(heavy.requirements)
    assert 'bitsandbytes<0.51,>=0.50; sys_platform == "linux"' in heavy.requirements
    assert not [line for line in heavy.requirements if "extra ==" in line or "motley" in line]
    assert not [line for line in heavy.requirements if line.startswith(("ansible", "pytest"))]
    assert heavy.key != facts.recipe(["trainer"], "cuda").key
    with pytest.raises(ConfigError, match="say which build, cpu or cuda"):
        facts.recipe(["trainer"], None)


def test_the_index_is_the_makefiles() -> None:
    assert f"TORCH_CPU_INDEX ?= {environments.TORCH_CPU_INDEX}\n" in (ROOT / "Makefile").read_text()


def test_an_old_python_is_told(tmp_path: Path) -> None:
    facts = WheelFacts(tmp_path, "1.0", "0" * 64, (), ">=3.99")
    with pytest.raises(ConfigError, match=r"Motley needs 3\.99 or newer"):
        facts.recipe([], None)
