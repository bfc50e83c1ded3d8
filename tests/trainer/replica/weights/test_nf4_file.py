"""The one file of a model's NF4 weights, which all backends and numbers of resident layers read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.trainer.replica.driving import gradient
from trainer.model.safetensors_headers import read_headers
from trainer.replica.weights.nf4_file import open_quantized
from trainer.system.storage import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

pytest.importorskip("bitsandbytes")
NF4 = {"task": "causal-lm", "model__quantization": "nf4"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_tensors_in_any_order_are_one_file_with_a_layer_as_one_span(
    tiny: Tiny, cache: Path
) -> None:
    folder = tiny.model(num_hidden_layers=12)
    tensors = {name: each for name, each in read_headers(folder).items() if "_proj" in name}
    with open_quantized(folder, tensors, through_bf16=False) as first:
        pass
    with open_quantized(folder, dict(reversed(tensors.items())), through_bf16=False) as second:
        pass
    assert first == second
    assert len(list(cache.glob("*/nf4.safetensors"))) == 1
    for layer in range(12):
        parts = [each for name, each in first.items() if f".layers.{layer}." in name]
        size = sum(each.end - each.begin for each in parts)
        assert max(each.end for each in parts) - min(each.begin for each in parts) == size


def test_a_start_quantises_nothing_that_is_there(
    tiny: Tiny, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tiny.model(num_hidden_layers=3)
    tiny.start(folder, **NF4, model__resident=0)
    tiny.start(folder, **NF4, model__resident=2)
    assert len(list(cache.glob("*/nf4.safetensors"))) == 1
    assert sum("quantising 21 tensors" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_made_again_by_the_next_start(
    tiny: Tiny, cache: Path, damage: str
) -> None:
    folder = tiny.model()
    tensors = {name: each for name, each in read_headers(folder).items() if "_proj" in name}
    with open_quantized(folder, tensors, through_bf16=False) as first:
        pass
    (file,) = cache.glob("*/nf4.safetensors")
    whole = file.read_bytes()
    if damage == "cut":
        os.truncate(file, len(whole) - 1)
    else:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        cache_folder._PINNED.clear()  # as another process
    with open_quantized(folder, tensors, through_bf16=False) as second:
        assert second == first
    assert file.read_bytes() == whole


def test_where_no_cache_can_be_written_the_file_lives_as_long_as_the_model(
    tiny: Tiny, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, batch = tiny.model(), tiny.batch(3, "causal-lm")
    whole = gradient(tiny.start(folder, **NF4)[0], batch)[0]
    cache.write_text("a file")
    replica, _ = tiny.start(folder, **NF4, model__resident=0)
    assert "quantised for this run only" in caplog.text
    assert np.array_equal(gradient(replica, batch)[0], whole)
