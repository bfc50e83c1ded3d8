"""F-HET-002: planned memory <= device memory, refused before start.

That the plan covers what torch really keeps is measured in
tests/trainer/planning/test_replica_memory.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.model.layout import build_layout, read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import MemoryPlan, check_fits, fitting_tokens, plan_memory
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
    plan = plan_of(folder, make_config(folder, method=method))
    check_fits(plan, 2 * plan.least, "cuda:0")
    with pytest.raises(InputError, match=r"cuda:0: the run needs .* GiB .* are free") as caught:
        check_fits(plan, plan.least, "cuda:0")
    assert "\n" not in str(caught.value)
    assert "model.quantization nf4" in str(caught.value)


def test_what_is_in_nf4_is_not_advised_to_be(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model()
    config = make_config(folder, model__quantization="nf4")
    plan = plan_of(folder, config)
    with pytest.raises(InputError, match=r"use a smaller data\.max_seq_len, or training\.grad"):
        check_fits(plan, plan.least, "cuda:0", nf4=True)


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
