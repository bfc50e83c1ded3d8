"""What a rank says of itself before the first collective."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

HERE = "tests.trainer.distributed.test_roll_call"


def refused(folder: str, data: str, output: str) -> str:
    """Return what this rank says when rank 1 has another torch."""
    import pytest
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from tests.trainer.distributed.training import run_config
    from trainer.build.inputs import read_inputs
    from trainer.distributed.roll_call import Member, call_roll
    from trainer.distributed.run import _facts
    from trainer.errors import RefusedError

    rank = dist.get_rank()
    inputs = read_inputs(run_config(folder, data, output, {}), "test")
    store = PrefixStore(output, dist.distributed_c10d._get_default_store())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "__version__", "1.0")
        me = Member(rank, f"host{rank}", "cpu", _facts(inputs, torch.device("cpu")))
    with pytest.raises(RefusedError) as error:
        call_roll(store, me, dist.get_world_size(), 120)
    return str(error.value)


def test_a_rank_with_another_torch_is_named(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    """That with other weights, data or settings is in tests/cluster."""
    for said in ranks.run(f"{HERE}:refused", str(model), str(data), str(tmp_path)):
        assert said.startswith("rank 1 on host1 has another version of torch than rank 0 on host0")
        assert ": 1.0, not 2." in said
        assert "\n" not in said
