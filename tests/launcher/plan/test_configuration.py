"""Paths in a run config: whose they are, and where checkpoints go on a cluster with a share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.options import config_order
from launcher.errors import ConfigError
from launcher.inventory.hosts import Host
from launcher.plan.configuration import (
    JobRequest,
    resolve_config,
    with_free_output,
    with_shared_checkpoints,
)
from trainer.config.run import RunConfig

NOTHING = {"preset": None, "config": None, "settings": (), "output": None}
LAPTOP = Host(name="laptop", connection="local")
INTEL = Host(name="intel", coordinator=True)


def read_config(hosts: Sequence[Host] = (LAPTOP,), **flags: Any) -> RunConfig:
    """Return the fine-tune of some flags."""
    config = config_order(**flags).resolve_job(hosts)
    assert isinstance(config, RunConfig)
    return config


def given_of_own(**flags: Any) -> set[str] | None:
    """Return the settings that are kept when the others follow from the data."""
    return config_order(**flags).derived_settings


def test_relative_paths_belong_to_the_coordinators_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {**NOTHING, "model": "inputs/qwen", "data": "inputs/train.jsonl"}
    here = read_config(**flags, hosts=[LAPTOP])
    assert here.data.train == str(tmp_path / "inputs/train.jsonl")
    there = read_config(**flags, hosts=[LAPTOP, INTEL])
    assert there.data.train == "/var/lib/motley/inputs/train.jsonl"
    assert there.model.path == "/var/lib/motley/inputs/qwen"
    assert there.output == "/var/lib/motley/runs/output"
    other = Host(name="intel", coordinator=True, state_folder="/big/motley")
    assert read_config(**flags, hosts=[other]).data.train == "/big/motley/inputs/train.jsonl"
    hub = read_config(**{**flags, "model": "Qwen/Qwen3-4B"}, hosts=[INTEL])
    assert hub.model.path == "Qwen/Qwen3-4B"
    absolute = read_config(**{**flags, "data": "/data/t.jsonl"}, hosts=[INTEL])
    assert absolute.data.train == "/data/t.jsonl"


def test_a_model_or_data_of_ones_own_is_not_the_quickstart() -> None:
    quickstart = read_config(**NOTHING, model=None, data=None)
    assert (quickstart.name, quickstart.training.max_steps) == ("quickstart", 420)
    assert given_of_own(**NOTHING, model=None, data=None) is None
    both = {**NOTHING, "model": "m", "data": "d", "settings": ("training.seed=3",)}
    config = read_config(**both)
    assert (config.name, config.training.max_steps, config.training.seed) == ("run", None, 3)
    assert config.data.validation is None
    assert given_of_own(**both) == {"model.path", "data.train", "training.seed"}
    for named in ({"preset": "quickstart"}, {"config": Path("run.yaml")}):
        assert given_of_own(**{**both, **named}) is None

    model = {**NOTHING, "model": "m", "data": None}
    alone = read_config(**model)
    assert Path(alone.data.train).parts[-3:] == ("demo", "data", "train.jsonl")
    assert str(alone.data.validation).endswith("demo/data/validation.jsonl")
    assert "data.validation" in (given_of_own(**model) or ())
    data = {**NOTHING, "settings": ("data.train=d",), "model": None, "data": None}
    assert read_config(**data).model.path.endswith("demo/pretrain/checkpoints/latest")
    assert given_of_own(**data) == {"data.train"}
    with pytest.raises(ConfigError, match=r"training\.epoch: unknown key"):
        read_config(**{**both, "settings": ("training.epoch=3",)})


def test_each_run_of_a_preset_has_an_output_of_its_own() -> None:
    """A plain second start is not refused for what the first one left; named folders stay."""
    taken = {"/here/demo/output/checkpoints", "/here/demo/output-2/checkpoints"}

    def names(folder: str) -> list[str]:
        return ["step-000004"] if folder in taken else []

    config = resolve_config(None, {}, Path("/here"))
    plain = JobRequest(leader="coordinator", source=None, settings={})
    made, lines = with_free_output(plain, config, names)
    assert made.output == "/here/demo/output-3"
    (line,) = lines
    assert line == "output: /here/demo/output-3, because /here/demo/output contains an earlier run"
    for order in (
        JobRequest(leader="coordinator", source=None, settings={"output": "demo/output"}),
        JobRequest(leader="coordinator", source="mine.yaml", settings={}),
    ):
        assert with_free_output(order, config, names) == (config, [])
    taken.clear()
    assert with_free_output(plain, config, names) == (config, [])


def test_checkpoints_go_to_the_share_unless_told_otherwise() -> None:
    config = read_config(**NOTHING, model="inputs/m", data="inputs/d", hosts=[INTEL])
    assert with_shared_checkpoints(config, None, "run-1").checkpoint.folder is None
    shared = with_shared_checkpoints(config, "/srv/motley", "run-1")
    assert shared.checkpoint.folder == "/srv/motley/checkpoints/run-1"
    assert with_shared_checkpoints(shared, "/elsewhere", "run-2") == shared
    own = {**NOTHING, "settings": ("checkpoint.folder=ckpt",), "model": "m", "data": "d"}
    assert read_config(**own, hosts=[INTEL]).checkpoint.folder == "/var/lib/motley/ckpt"
