"""Mixtures of experts and recurrent layers, as teachers: each engine's logits, or its refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.families import TEACHERS
from trainer.distill.teacher.engines import engine_kind
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.model.families import FAMILIES
from trainer.replica.backend import Compute
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

SPARSE = ["mixtral", "qwen3_moe", "gpt_oss", *TEACHERS]
RECURRENT = [name for name, family in FAMILIES.items() if family.recurrent and name != "qwen3_5"]
CPU = Compute("cpu")


def windows() -> list[NDArray[np.int32]]:
    """Return windows of several lengths, which are padded to the longest in a batch."""
    rng = np.random.default_rng(0)
    return [rng.integers(300, size=length, dtype=np.int32) for length in (23, 9, 70)]


@torch.no_grad()
def theirs(folder: Path, batch: Sequence[NDArray[np.int32]]) -> Tensor:
    """Return what transformers gives for one window at a time."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [model(torch.from_numpy(ids)[None].long(), use_cache=False).logits[0] for ids in batch]
    return torch.cat([row[:-1] for row in rows])


@pytest.mark.parametrize("model_type", [*SPARSE, *RECURRENT])
def test_torch_gives_the_logits_of_transformers(tiny: Tiny, model_type: str) -> None:
    folder = tiny.model(model_type)
    engine = TorchEngine(folder, torch.float32)
    found = torch.cat([part.clone() for part in engine.prefill(windows())])
    torch.testing.assert_close(found, theirs(folder, windows()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", [*SPARSE, *RECURRENT])
def test_openvino_refuses_in_one_line_before_it_loads_anything(tiny: Tiny, model_type: str) -> None:
    reason = "is a mixture of experts" if model_type in SPARSE else "has recurrent layers"
    with pytest.raises(InputError, match=rf"{reason}.*; use --engine torch$") as refused:
        engine_kind("openvino").open(tiny.model(model_type), "float32", CPU)
    assert "\n" not in str(refused.value)
