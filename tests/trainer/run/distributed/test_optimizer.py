"""The norm over all ranks, and a gradient that is not finite on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer.replica.torch.parallel.conftest import drawn_model
from tests.trainer.replica.torch.parallel.one_process import parallel_replica, samples
from trainer.system.errors import NonFiniteError

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

__all__ = ["drawn_model"]

HERE = "tests.trainer.run.distributed.test_optimizer"
STRATEGIES = [
    {},
    {"parallel.data": "fsdp"},
    {"parallel.tensor": 2, "parallel.sequence": True},
    {"parallel.tensor": 2, "parallel.data": "fsdp"},
]


def norms(folder: str, settings: dict[str, Any], spoiled: int | None) -> list[Any]:
    """Return the norm that an update finds, and that of the gathered gradient, on rank 0.

    Args:
        spoiled: a rank whose first gradient has a NaN; then return the error.
    """
    from trainer.replica.torch.parallel import flat_vector
    from trainer.run.distributed.optimizer import ParallelAdamW

    replica, config = parallel_replica(folder, {"method": "full", **settings})
    optimizer = ParallelAdamW(
        config.optimizer, replica.layout, replica.parameters, replica.copy_counts
    )
    batch = samples(config, 6, 300)
    replica.accumulate([batch[index] for index in replica.local_samples(len(batch))])
    before = replica.gather_parameters(replica.parameters)
    if spoiled == dist.get_rank():
        gradient = next(iter(replica.parameters.values())).grad
        assert gradient is not None
        flat_vector.local_part(gradient).view(-1)[0] = torch.nan
    whole = replica.gather_gradient()
    try:
        found = optimizer.apply(3, 1e-3)
    except NonFiniteError as error:
        after = replica.gather_parameters(replica.parameters)
        return [str(error), before is None or np.array_equal(before, after)]  # type: ignore[arg-type]  # both are None or neither
    return [found, None if whole is None else float(np.linalg.norm(whole.astype(np.float64)))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_is_that_of_the_whole_gradient(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any]
) -> None:
    world = 4 if len(strategy) == 2 and "parallel.data" in strategy else 2
    found = ranks.run(f"{HERE}:norms", drawn_model(), strategy, None, world=world)
    wanted = found[0][1]
    assert [norm for norm, _ in found] == pytest.approx([wanted] * world, rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES[1:3])
def test_a_gradient_that_is_not_finite_on_one_rank_halts_all_before_the_update(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any]
) -> None:
    for message, untouched in ranks.run(f"{HERE}:norms", drawn_model(), strategy, 1):
        assert message.startswith(
            "step 3: NaN or Inf in the gradient of model.embed_tokens.weight: "
        )
        assert untouched
