"""Model folders of named shapes: their numbers, and what is used again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rig.model_folders import SHAPES, model_folder
from benchmarks.rig.random_model import Dtype, write_model
from trainer.model.initialization import read_tensor
from trainer.model.safetensors_headers import read_headers
from trainer.system.errors import InputError


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_weights_are_as_those_of_a_new_model(tmp_path: Path, dtype: Dtype) -> None:
    headers = read_headers(write_model(tmp_path, SHAPES["layer"], dtype))
    table = read_tensor(headers["model.embed_tokens.weight"])
    assert np.sqrt(np.square(table).mean()) == pytest.approx(0.019, abs=1e-3)
    assert abs(table.mean()) < 1e-3
    assert (np.abs(table) >= 2**-7).all()
    assert (np.abs(table) < 2**-5).all()
    assert len(np.unique(table)) > 500
    assert (read_tensor(headers["model.norm.weight"]) == 1).all()
    other = read_tensor(headers["model.layers.0.mlp.up_proj.weight"])
    assert not np.array_equal(other.reshape(-1)[:100], table.reshape(-1)[:100])


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    with model_folder(tmp_path, "layer") as first:
        written = (first / "model.safetensors").stat().st_mtime_ns
    with model_folder(tmp_path, "layer") as again:
        assert again == first == tmp_path / "layer"
        assert (again / "model.safetensors").stat().st_mtime_ns == written
    with model_folder(None, "layer") as scratch:
        assert read_headers(scratch)
    assert not scratch.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["layer"]


def test_what_is_not_the_shape_or_was_cut_off_is_refused(tmp_path: Path) -> None:
    with model_folder(tmp_path, "layer") as folder:
        folder.rename(tmp_path / "tiny")
    with pytest.raises(InputError, match="not a model folder of the shape tiny"):
        model_folder(tmp_path, "tiny").__enter__()
    with (
        model_folder(tmp_path, "layer") as folder,
        (folder / "model.safetensors").open("r+") as file,
    ):
        file.truncate(1000)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        model_folder(tmp_path, "layer").__enter__()
