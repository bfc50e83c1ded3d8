"""Layers that are read ahead: their bytes, their turns, and files that fail while they are read."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainer.model.safetensors_headers import TensorHeader, read_file_headers
from trainer.replica.weights.frozen_weights import FrozenWeights
from trainer.replica.weights.layer_feed import LayerFeed
from trainer.system.errors import InputError

LAYERS = 5


def stored(folder: Path, *, files: int = 1) -> dict[int, dict[str, TensorHeader]]:
    """Return the tensors of layers, each of its own values, in so many files."""
    tensors = {
        f"{layer}.{name}": np.arange(size, dtype=dtype) + 1000 * layer
        for layer in range(LAYERS)
        for name, size, dtype in (
            ("a", 7000, np.float32),
            ("b", 3, np.float16),  # what lies behind it has no multiple of a line's bytes
            ("c", 5001, np.float32),
        )
    }
    headers: dict[str, TensorHeader] = {}
    for number in range(files):
        path = folder / f"part-{number}.safetensors"
        save_file(dict(list(tensors.items())[number::files]), path)
        headers |= read_file_headers(path)
    return {layer: {name: headers[f"{layer}.{name}"] for name in "abc"} for layer in range(LAYERS)}


def values(feed: LayerFeed, layer: int, name: str) -> np.ndarray:
    dtype = np.float16 if name == "b" else np.float32
    return feed.tensor(layer, name).view(dtype)


def expected(layer: int, name: str) -> np.ndarray:
    sizes = {"a": 7000, "b": 3, "c": 5001}
    return np.arange(sizes[name], dtype=np.float16 if name == "b" else np.float32) + 1000 * layer


@pytest.mark.parametrize("files", [1, 2, 3])
def test_layers_pass_in_the_announced_order_and_in_any_other(tmp_path: Path, files: int) -> None:
    feed = LayerFeed(FrozenWeights(stored(tmp_path, files=files)))
    order = [0, 1, 2, 3, 4, 3, 2, 1, 0, 3, 1, 1, 4]
    following = [*order[1:9], None, 2, 0, None, None]  # the last ones are not those that come
    for layer, after in zip(order, following, strict=True):
        feed.hold(layer, after)
        for name in "cab":
            assert np.array_equal(values(feed, layer, name), expected(layer, name))
    assert feed.slot_bytes == 2 * FrozenWeights(stored(tmp_path, files=files)).span_bytes
    feed.close()


def test_what_is_still_in_a_slot_is_not_read_again(tmp_path: Path) -> None:
    feed = LayerFeed(FrozenWeights(stored(tmp_path)))
    for layer, after in ((0, 1), (1, 2), (2, 1), (2, 1), (1, 0), (0, 1), (1, 2)):
        feed.hold(layer, after)
    assert feed.reads == 5, "0, 1, 2 up, 0 down, 2 up"
    feed.close()


def test_a_late_use_is_an_error(tmp_path: Path) -> None:
    feed = LayerFeed(FrozenWeights(stored(tmp_path)))
    feed.hold(0, 1)
    late = values(feed, 0, "a")
    with pytest.raises(RuntimeError, match="layer 0: a is used after the layer's turn"):
        feed.hold(1, 2)
    feed.hold(1, 2)
    with pytest.raises(RuntimeError, match="layer 0: a is used after the layer's turn"):
        feed.tensor(0, "a")
    del late
    feed.close()


def test_closing_joins_the_thread_and_leaves_no_open_file(tmp_path: Path) -> None:
    before = threading.active_count()
    feed = LayerFeed(FrozenWeights(stored(tmp_path)))
    feed.hold(0, 1)
    assert threading.active_count() == before + 1
    feed.close()
    assert threading.active_count() == before
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


@pytest.mark.parametrize("fault", ["cut", "written", "replaced", "removed"])
def test_a_file_that_changes_is_named_with_its_layer(tmp_path: Path, fault: str) -> None:
    """The reader meets it; who waits for the layer hears of it, at each attempt."""
    feed = LayerFeed(FrozenWeights(stored(tmp_path)))
    feed.hold(0, None)
    path = tmp_path / "part-0.safetensors"
    if fault == "cut":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
    elif fault == "written":
        with path.open("r+b") as file:
            file.seek(-8, 2)
            file.write(bytes(8))
    elif fault == "replaced":
        other = tmp_path / "new"
        other.write_bytes(path.read_bytes())
        other.replace(path)
    else:
        path.unlink()
    for _ in range(2):
        with pytest.raises(InputError, match=f"^{re.escape(str(path))}: .*layer 4") as caught:
            feed.hold(4, 3)
        assert "\n" not in str(caught.value)
    feed.close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    layers = stored(tmp_path)
    (tmp_path / "part-0.safetensors").unlink()
    with pytest.raises(InputError, match=r"part-0\.safetensors: cannot be read: No such file"):
        FrozenWeights(layers)
