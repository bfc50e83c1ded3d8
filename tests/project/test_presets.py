"""Every shipped preset is a valid run config, and every setting is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.run import RunConfig, load, presets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_is_named_after_its_file(name: str) -> None:
    assert load(name).name == name


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_survives_yaml(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "run.yaml"
    copy.write_text(load(name).to_yaml())
    assert load(copy) == load(name)


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        inner = getattr(section, "model_fields", None)
        for key in [f"{name}.{leaf}" for leaf in inner] if inner else [name]:
            assert f"`{key}`" in page, f"docs/config.md does not explain {key}"
