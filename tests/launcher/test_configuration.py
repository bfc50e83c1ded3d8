"""Paths in a run config: whose they are, and where checkpoints go on a cluster with a share."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.commands.options import read_config
from launcher.inventory.hosts import Host
from launcher.plan.configuration import with_shared_checkpoints

NOTHING = {"preset": None, "config": None, "settings": (), "output": None}
LAPTOP = Host(name="laptop", connection="local")
INTEL = Host(name="intel", coordinator=True)


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
    assert there.output == "/var/lib/motley/demo/output"
    other = Host(name="intel", coordinator=True, state_folder="/big/motley")
    assert read_config(**flags, hosts=[other]).data.train == "/big/motley/inputs/train.jsonl"
    hub = read_config(**{**flags, "model": "Qwen/Qwen3-4B"}, hosts=[INTEL])
    assert hub.model.path == "Qwen/Qwen3-4B"
    absolute = read_config(**{**flags, "data": "/data/t.jsonl"}, hosts=[INTEL])
    assert absolute.data.train == "/data/t.jsonl"


def test_checkpoints_go_to_the_share_unless_told_otherwise() -> None:
    config = read_config(**NOTHING, model="inputs/m", data="inputs/d", hosts=[INTEL])
    assert with_shared_checkpoints(config, None, "run-1").checkpoint.folder is None
    shared = with_shared_checkpoints(config, "/srv/motley", "run-1")
    assert shared.checkpoint.folder == "/srv/motley/checkpoints/run-1"
    assert with_shared_checkpoints(shared, "/elsewhere", "run-2") == shared
    own = {**NOTHING, "settings": ("checkpoint.folder=ckpt",), "model": "m", "data": "d"}
    assert read_config(**own, hosts=[INTEL]).checkpoint.folder == "/var/lib/motley/ckpt"
