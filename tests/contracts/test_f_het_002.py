"""F-HET-002: planned memory <= device memory, refused before start.

That the plan covers what torch really keeps is measured in
tests/trainer/planning/test_replica_memory.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.model.layout import build_layout, read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import (
    MemoryPlan,
    check_fits,
    fitting_tokens,
    plan_memory,
    suggest_smaller,
)
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica.torch import replica as torch_replica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeConfig, TinyModel
    from trainer.config.run import RunConfig


def plan_of(folder: Path, config: RunConfig) -> MemoryPlan:
    return plan_memory(
        read_shape(folder),
        read_headers(folder),
        build_layout(folder, config),
        config,
        accelerator=False,
        recompute=False,
    )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_plan_above_the_device_is_refused_in_one_line(
    tiny_model: TinyModel, make_config: MakeConfig, method: str
) -> None:
    folder = tiny_model()
    config = make_config(folder, method=method)
    plan, smaller = plan_of(folder, config), suggest_smaller(config, None, recompute=False)
    check_fits(plan, 2 * plan.least, "cuda:0", smaller)
    with pytest.raises(InputError, match=r"cuda:0: the run needs .* GiB .* are free") as caught:
        check_fits(plan, plan.least, "cuda:0", smaller)
    assert "\n" not in str(caught.value)
    assert "model.quantization nf4" in str(caught.value)


def test_only_what_needs_less_is_advised(make_config: MakeConfig, tmp_path: Path) -> None:
    config, quantized = (
        make_config(tmp_path, model__quantization=quantization) for quantization in ("none", "nf4")
    )
    length = "a smaller data.max_seq_len"
    again = f"{length}, or training.gradient_checkpointing on"
    assert suggest_smaller(quantized, None, recompute=False) == again
    assert suggest_smaller(config, None, recompute=True) == f"model.quantization nf4 or {length}"
    assert suggest_smaller(config, 2, recompute=True) == f"model.resident 0 or {length}"
    assert suggest_smaller(config, 0, recompute=True) == length
    assert suggest_smaller(config, HEAD_STREAMED, recompute=True) == length
    memory = "a device with more memory"
    found = suggest_smaller(config, HEAD_STREAMED, recompute=False, shorter=False)
    assert found == f"model.quantization nf4 or {memory}"
    assert suggest_smaller(quantized, 0, recompute=True, shorter=False) == memory


def test_micro_batches_stay_within_the_device(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model()
    plan = plan_of(folder, make_config(folder))
    for left in (plan.least, 2**27, 2**30):
        tokens = fitting_tokens(plan, left)
        assert tokens == 1 or (
            plan.per_token * tokens + plan.gradients + plan.state + plan.workspace <= left
        )
    assert fitting_tokens(plan, 2**40) > fitting_tokens(plan, 2**30)


def test_the_replica_refuses_before_it_loads(
    tiny_model: TinyModel, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    monkeypatch.setattr(torch_replica, "available_bytes", lambda _device: 1 << 20)
    monkeypatch.delattr(torch_replica, "load_model")  # any attempt to load would fail otherwise
    with pytest.raises(InputError, match=r"cpu: the run needs .* GiB"):
        torch_replica.TorchReplica(folder, config, build_layout(folder, config))
