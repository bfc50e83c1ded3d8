"""What a wheel needs on a host, by the locks in it."""

import re
import tomllib
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.installation import environments
from launcher.installation.environments import WheelFacts, read_wheel, split_lock
from tests import ROOT
from tests.launcher.handmade import make_wheel

LOCKS = {"coordinator", "trainer", "torch-cpu", "torch-cuda", "uv"}


def names(lock: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+)==", lock, re.M))


def test_packages_come_from_the_wheels_locks(tmp_path: Path) -> None:
    locks = [f"launcher/locks/{name}.txt" for name in LOCKS]  # as in the real wheel (test_wheel)
    files = {name: (ROOT / name).read_text() for name in locks}
    facts = read_wheel(make_wheel(tmp_path, "motley", "1.0", files))
    assert set(facts.locks) == LOCKS
    light = facts.make_recipe(["coordinator"], None)
    heavy = facts.make_recipe(["trainer"], "cpu")
    assert (light.torch, light.torch_lock) == (None, "")
    assert heavy.torch == "cpu"
    assert names(light.packages) < names(heavy.packages)
    assert "bitsandbytes" in names(heavy.packages)
    assert not names(heavy.packages) & {"motley", "torch", "ansible-core", "pytest"}
    assert names(heavy.torch_lock) == {"torch"}
    assert names(light.lock) == names(light.packages) | {"uv"}
    cuda = facts.make_recipe(["trainer"], "cuda")
    assert facts.name_installation(heavy) != facts.name_installation(cuda)
    with pytest.raises(ConfigError, match="name its build, cpu or cuda"):
        facts.make_recipe(["trainer"], None)


def test_another_hash_is_another_package() -> None:
    one, other = (f"leaf==1.0 \\\n    --hash=sha256:{digit * 64}\n" for digit in "12")
    assert len(split_lock(one + other)) == 2
    assert split_lock(one + "twig==1.0 --hash=sha256:3\n") - split_lock(one) == {
        "twig==1.0 --hash=sha256:3"
    }


def test_a_wheel_without_uvs_lock_is_refused(tmp_path: Path) -> None:
    wheel = WheelFacts(tmp_path / "x.whl", "1.0", "0" * 64, {"coordinator": ""}, ">=3.11")
    with pytest.raises(ConfigError, match=r"x\.whl has no lock for uv"):
        wheel.make_recipe(["coordinator"], None)


def test_which_extras_need_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in ("coordinator", "trainer"):
        needed = any(requirement.startswith("torch") for requirement in extras[extra])
        assert needed == (extra in environments._TORCH_EXTRAS)


def test_the_index_is_the_makefiles() -> None:
    assert f"TORCH_CPU_INDEX ?= {environments.TORCH_CPU_INDEX}\n" in (ROOT / "Makefile").read_text()


def test_an_old_python_is_told(tmp_path: Path) -> None:
    facts = WheelFacts(tmp_path, "1.0", "0" * 64, {}, ">=3.99")
    with pytest.raises(ConfigError, match=r"Motley needs 3\.99 or newer"):
        facts.make_recipe([], None)
