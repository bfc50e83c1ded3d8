"""A state that is written while it is gathered, and what a failure of either side does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import MakeConfig, TinyModel
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.model.layout import GradientLayout, build_layout
from trainer.optimizer.adamw import TrainState
from trainer.run.distributed.gathered_checkpoint import StreamedState
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import Disk

Open = Callable[[str, Disk], CheckpointStore]


class FullDisk(Disk):
    """Takes nothing."""

    def write(self, descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture
def layout(tiny_model: TinyModel, make_config: MakeConfig) -> GradientLayout:
    folder = tiny_model()
    return build_layout(folder, make_config(folder))


@pytest.fixture
def open_store(
    tmp_path: Path, layout: GradientLayout, tiny_model: TinyModel, make_config: MakeConfig
) -> Open:
    folder = tiny_model()
    return lambda name, disk: CheckpointStore(
        tmp_path / name, layout, make_config(folder), folder, disk=disk
    )


def drawn_state(layout: GradientLayout) -> TrainState:
    drawing = np.random.default_rng(0)
    return TrainState(*(drawing.random(layout.size, np.float32) for _ in range(3)), step=2)


def put_all(stream: StreamedState, layout: GradientLayout, state: TrainState) -> None:
    for vector in (state.weights, state.first_moment, state.second_moment):
        for slot in layout.iter_tensors():
            stream.put(vector[slot.start : slot.stop])
        stream.put(None)


PROGRESS = RunProgress("run", 2, 0, 8, 0, 0, {})


def test_the_files_are_those_of_a_snapshot(open_store: Open, layout: GradientLayout) -> None:
    state, stream = drawn_state(layout), StreamedState(2)
    streamed, whole = open_store("streamed", Disk()), open_store("whole", Disk())
    with ThreadPoolExecutor(1) as writer:
        path = writer.submit(streamed.save, stream, PROGRESS)
        put_all(stream, layout, state)
    wanted = whole.save(state.take_snapshot(), PROGRESS)
    found = {file.name: file.read_bytes() for file in path.result().iterdir()}
    assert found == {file.name: file.read_bytes() for file in wanted.iterdir()}


def test_the_ranks_gather_to_the_end_if_the_disk_is_full(
    open_store: Open, layout: GradientLayout
) -> None:
    stream, store = StreamedState(2), open_store("full", FullDisk())
    with ThreadPoolExecutor(1) as writer:
        saving = writer.submit(store.save, stream, PROGRESS)
        put_all(stream, layout, drawn_state(layout))  # returns
    with pytest.raises(StorageError, match="No space left on device"):
        saving.result()


def test_nothing_is_saved_if_a_rank_is_lost(open_store: Open, layout: GradientLayout) -> None:
    stream, store = StreamedState(2), open_store("lost", Disk())
    with ThreadPoolExecutor(1) as writer:
        saving = writer.submit(store.save, stream, PROGRESS)
        stream.put(np.zeros(3, np.float32))
        stream.give_up()
    with pytest.raises(StorageError, match="the other ranks' parts did not arrive"):
        saving.result()
    assert not list(store.folder.glob("step-*"))
