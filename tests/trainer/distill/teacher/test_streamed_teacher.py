"""A teacher whose layers are read at each use scores as one that keeps all."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import covering
from tests.trainer.distill.teacher.test_teacher import ARCHITECTURES, IN_ORDER, pieces
from tests.trainer.small_teacher import TOPK
from trainer.distill.teacher import torch_engine
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.torch_engine import (
    TorchEngine,
    open_torch,
)
from trainer.planning import stored_layers
from trainer.planning.forward import ForwardSize, frozen_setup, plan_forward
from trainer.planning.model_config import read_shape
from trainer.planning.replica import USABLE
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.teachers import BATCH, WINDOW
from trainer.replica.backend import Compute
from trainer.replica.torch.streaming import StreamedHead, StreamedLinear
from trainer.system.errors import InputError

FORWARD = ForwardSize(BATCH["cpu"], WINDOW)


DEEP: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("qwen3", "llama", "qwen3_moe", "mixtral", "deepseek_v3")},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {"sliding_window": 16},
    "gemma2": ARCHITECTURES["gemma2"],
    "gpt2": {},
}
"""Settings of a config with four layers, by family."""
STREAMED = [
    (family, stored, dtype, resident)
    for family in DEEP
    for stored in ("float32", "bfloat16", "float16")
    for dtype in ("float32", "bfloat16")
    for resident in (0, 1, 3)
]


@pytest.mark.parametrize(("family", "stored", "dtype", "resident"), covering(STREAMED))
def test_scores_are_those_of_the_resident_teacher(
    tiny_model: Any, family: str, stored: str, dtype: str, resident: int
) -> None:
    """Windows come in several batches, and rows of the embedding are read."""
    own = {"tie_word_embeddings": False, **DEEP[family]}
    folder = tiny_model(family, dtype=stored, num_hidden_layers=4, **own)
    torch.set_num_threads(1)
    found: list[list[bytes]] = []
    for asked in ("all", resident):
        engine = open_torch(folder, dtype, Compute("cpu", resident=asked), FORWARD)
        assert len(streamed_of(engine)) == (0 if asked == "all" else 4 - resident)
        teacher = Teacher(engine, TOPK, IN_ORDER, seed=5, batch_tokens=64)
        windows = teacher.score_pieces(pieces(IN_ORDER))
        found.append([field.tobytes() for each in windows for field in astuple(each.scores)])
    assert found[0] == found[1]


def streamed_of(engine: TorchEngine) -> set[int]:
    """Return the layers that an engine reads at each forward."""
    parts = engine.model.modules()
    return {part._layer for part in parts if isinstance(part, StreamedLinear)}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "granite"])
def test_memory_decides_which_layers_of_a_teacher_stay(
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", 32 * 64)
    folder = tiny_model(family, num_hidden_layers=8)
    shape = read_shape(folder)

    def need(resident: int | None) -> int:
        setup = frozen_setup(4)
        return plan_forward(shape, setup, FORWARD, resident, accelerator=False).total

    for resident in (HEAD_STREAMED, 0, 3, None):
        free = math.ceil(need(resident) / USABLE) + 1
        monkeypatch.setattr(torch_engine, "available_bytes", lambda _, free=free: free)
        engine = open_torch(folder, "float32", Compute("cpu"), FORWARD)
        kept = 8 if resident is None else max(0, resident)
        reads_head = resident == HEAD_STREAMED
        assert any(isinstance(each, StreamedHead) for each in engine.model.modules()) == reads_head
        assert len(streamed_of(engine)) == 8 - kept
        line = f"cpu: {kept} of 8 layers stay in memory, {8 - kept} are read from {folder}"
        assert (line in caplog.text) == (resident is not None)
    monkeypatch.setattr(torch_engine, "available_bytes", lambda _: need(4))
    with pytest.raises(InputError, match=r"free; use --resident auto$"):
        open_torch(folder, "float32", Compute("cpu", resident=5), FORWARD)
    with pytest.raises(InputError, match=r"free; use --resident auto$"):
        open_torch(folder, "float32", Compute("cpu", resident="all"), FORWARD)


def test_a_teacher_of_unknown_sizes_keeps_all_layers(tmp_path: Path) -> None:
    """A class may have names of its own for them, and defaults."""
    (tmp_path / "config.json").write_text('{"model_type": "ctrl"}')
    with pytest.raises(InputError, match=r"^--resident 1: .*hidden_size must.*; use all or auto$"):
        open_torch(tmp_path, "float32", Compute("cpu", resident=1), FORWARD)
    with pytest.raises(InputError, match="no such file"):
        open_torch(tmp_path, "float32", Compute("cpu"), FORWARD)


def test_a_file_that_is_cut_ends_a_teacher_with_one_line(tiny_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3", num_hidden_layers=4), folder)
    engine = open_torch(folder, "float32", Compute("cpu", resident=1), FORWARD)
    teacher = Teacher(engine, TOPK, IN_ORDER, seed=5, batch_tokens=64)
    teacher.score_pieces(pieces(IN_ORDER))
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: layer \d .*trunc") as caught:
        teacher.score_pieces(pieces(IN_ORDER))
    assert "\n" not in str(caught.value)
