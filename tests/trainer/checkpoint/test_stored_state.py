"""A checkpoint that is read in pieces."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.tiny_run import make_store, save, tiny_layout, tiny_state
from trainer.checkpoint.reader import open_checkpoint, step_folders
from trainer.checkpoint.stored_state import StoredState
from trainer.system.errors import StorageError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(make_store(tmp_path), 3)


@pytest.fixture
def stored(checkpoint: Path) -> StoredState:
    return open_checkpoint(checkpoint, tiny_layout())[0]


def test_pieces_are_those_of_what_was_saved(stored: StoredState) -> None:
    state = tiny_state(3)
    for vector in ("weights", "first_moment", "second_moment"):
        whole = getattr(state, vector)
        for slot in tiny_layout().iter_tensors():
            piece = np.empty(slot.size - 7, np.float32)
            stored.read_slice(vector, slot, 5, piece[:-1])
            assert np.array_equal(piece[:-1], whole[slot.start + 5 : slot.stop - 3])
        assert np.array_equal(stored.read_vector(vector), whole)


def test_a_file_that_changes_after_it_was_checked(stored: StoredState, checkpoint: Path) -> None:
    os.truncate(checkpoint / "adapter_model.safetensors", 400)
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors: is truncated"):
        stored.read_vector("weights")
    (checkpoint / "optimizer.safetensors").unlink()
    with pytest.raises(StorageError, match=r"optimizer\.safetensors: cannot be read: No such"):
        stored.read_vector("first_moment")


def test_a_file_without_one_of_the_tensors(checkpoint: Path) -> None:
    wider = tiny_layout(32)
    files = checkpoint / "adapter_model.safetensors", checkpoint / "optimizer.safetensors"
    with pytest.raises(StorageError, match=r"lora_A\.weight is missing or has another shape"):
        StoredState(*files, wider)


@pytest.mark.parametrize(
    "name", ["step-²²", "step-٣", "step--1", "step-1_0", "step- 1", "step-" + "9" * 19]
)
def test_a_folder_whose_number_is_none_is_no_step(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "step-000002").mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step-000002"]
