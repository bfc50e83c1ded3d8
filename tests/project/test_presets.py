"""Every shipped preset is a valid run config."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.run import list_presets, load_config
from trainer.planning.memory import plan_memory_by_part
from trainer.planning.model_config import named_shape
from trainer.planning.replica import USABLE, make_strategy, make_training_setup


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_every_preset_loads_and_is_named_after_its_file(name: str) -> None:
    assert load_config(name).name == name


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_every_preset_survives_yaml(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "run.yaml"
    copy.write_text(load_config(name).to_yaml())
    assert load_config(copy) == load_config(name)


@pytest.mark.parametrize("name", ["ddp-qlora", "fsdp-lora", "tp-sp-lora", "pp-lora"])
def test_presets_for_two_cards_say_the_memory_that_is_planned(name: str) -> None:
    config, parallel = load_config(name), load_config(name).parallel
    strategy = make_strategy(parallel, 2)
    assert parallel.count_copies(2) == strategy.replicas
    planned: list[float] = []
    for recompute in (False, True):
        training = make_training_setup(config, accelerator=True, recompute=recompute)
        memory = plan_memory_by_part(named_shape("qwen3-4b"), training, strategy)
        assert memory.total < 24 * 2**30 * USABLE
        planned.append(memory.total / 2**30)
    text = list_presets()[name].read_text(encoding="utf-8")
    assert f"card: {planned[0]:.1f} GiB, with recomputation {planned[1]:.1f} GiB" in text
