"""What build.py promises about order: data is read before anybody joins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config.run import load_config
from trainer.init_model import ModelSizes, init_model
from trainer.replica.backend import ReplicaChoice
from trainer.run.composition import run as build
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError


class _Nothing:
    device = "cpu"


@pytest.mark.parametrize("run_id", ["run", "a.b_c-1", "c++", "a(b"])
def test_a_run_keeps_the_name_of_its_rounds(tmp_path: Path, run_id: str) -> None:
    name = build._name_rounds(tmp_path, run_id)
    assert name.startswith(f"{run_id}-")
    assert build._name_rounds(tmp_path, run_id) == name
    assert build._name_rounds(tmp_path, "another") != name


class _ConnectedError(Exception):
    pass


def test_a_worker_has_read_its_data_when_it_connects(tmp_path: Path) -> None:
    """A member is dealt samples at once; one that still reads would miss the deadline."""
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"input": "ls -l", "label": 0}) + "\n")
    model = init_model(data, tmp_path / "model", ModelSizes(hidden_size=64, num_layers=1), 0)
    settings = {"model.path": str(model), "data.train": str(data), "num_classes": 2}
    inputs = read_inputs(load_config(None, settings), "run")
    data.write_text("no JSON\n")

    def connect() -> None:
        raise _ConnectedError

    with pytest.raises(_ConnectedError):  # and not for the data, which is another by now
        build.make_worker(inputs, ReplicaChoice(_Nothing(), "cpu", ""), connect)  # pyright: ignore[reportArgumentType]  # fails before it is used
    with pytest.raises(InputError, match=r"train\.jsonl:1"):
        read_inputs(load_config(None, settings), "run")
