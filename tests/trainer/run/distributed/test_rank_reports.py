"""What a rank says of itself before the first collective."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.trainer.small_model import write_data

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

HERE = "tests.trainer.run.distributed.test_rank_reports"
OTHER = {
    "config": {"optimizer.learning_rate": 0.5},
    "section parallel": {"parallel.data": "fsdp"},
    "version of torch": {},
    "data": {},
}
"""What rank 1 has of its own, and its settings."""


def refused(folder: str, data: str, other: str, output: str) -> dict[str, str]:
    """Return what this rank says in each case."""
    import pytest
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from tests.trainer.run.distributed.training import run_config
    from trainer.run.distributed.rank_reports import RankReport, gather_rank_reports
    from trainer.run.distributed.run import _common_facts
    from trainer.run.inputs import read_inputs
    from trainer.system.errors import RefusedError

    rank, default = dist.get_rank(), dist.distributed_c10d._get_default_store()
    said: dict[str, str] = {}
    for what, settings in OTHER.items():
        own: dict[str, Any] = settings if rank == 1 else {}
        file = other if rank == 1 and what == "data" else data
        inputs = read_inputs(run_config(folder, file, output, own), "test")
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and what == "version of torch":
                patch.setattr(torch, "__version__", "1.0")
            me = RankReport(rank, f"host{rank}", "cpu", _common_facts(inputs, torch.device("cpu")))
        store = PrefixStore(f"{output}/{what}", default)
        with pytest.raises(RefusedError) as error:
            gather_rank_reports(store, me, dist.get_world_size(), 120)
        said[what] = str(error.value)
    return said


def test_a_rank_with_something_else_is_named(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    """That with other weights is in tests/cluster."""
    other = write_data(tmp_path / "other.jsonl", count=30)
    arguments = str(model), str(data), str(other), str(tmp_path / "out")
    for said in ranks.run(f"{HERE}:refused", *arguments):
        for what, line in said.items():
            assert line.startswith(
                f"rank 1 on host1: its {what} differs from that of rank 0 on host0: "
            )
            assert "\n" not in line
        assert ": 1.0, not 2." in said["version of torch"]
