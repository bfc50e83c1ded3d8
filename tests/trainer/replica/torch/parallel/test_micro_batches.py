"""How many collectives a step has: adapters add none, micro-batches only where they must."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.trainer.replica.torch.parallel.one_process import parallel_replica, samples

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_micro_batches"


def collectives(folder: str, settings: dict[str, Any]) -> dict[str, int]:
    """Return how often each collective runs in a step of 8 samples a rank."""
    replica, config = parallel_replica(folder, settings)
    batch = samples(config, 8 * replica.copies, 300)
    share = [batch[index] for index in replica.local_samples(len(batch))]
    replica.accumulate(share)  # DDP rebuilds its buckets after the first
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        replica.accumulate(share)
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results  # `events` would also build a tree, for seconds
    names = [event.name() for event in results.events()]
    sort = "nccl:" if torch.cuda.is_initialized() else "gloo:"
    return dict(Counter(name for name in names if name.startswith(sort)))


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        ({"parallel.data": "ddp"}, 1),
        ({"parallel.data": "fsdp"}, 4),
        ({"parallel.pipeline.stages": 2, "parallel.pipeline.microbatches": 2}, 1),
    ],
    ids=["ddp", "fsdp", "pp-x-ddp"],
)
def test_ddp_reduces_once_a_step_and_fsdp_in_each_micro_batch(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any], times: int
) -> None:
    """By all-reduces, or by reduce-scatters, which gloo makes of all-reduces."""
    settings = {"method": "full", **strategy}
    one, four = (
        ranks.run(
            f"{HERE}:collectives",
            drawn_model(),
            settings | {"training.micro_batch_size": size},
            world=4 if "parallel.pipeline.stages" in strategy else 2,
        )[0]
        for size in (8, 2)
    )
    reductions = [sum(n for name, n in each.items() if "reduce" in name) for each in (one, four)]
    first, second = (number - 1 for number in reductions)  # without the sum of the losses
    assert second == times * first > 0, (one, four)


@pytest.mark.parametrize("method", [{"method": "full"}, {"lora.lora_rank": 4}])
def test_a_tensor_parallel_layer_has_two_sums_forward_and_two_backward(
    ranks: Ranks, drawn_model: DrawnModel, method: dict[str, Any]
) -> None:
    """Adapters add none."""
    counts = [
        sum(
            ranks.run(
                f"{HERE}:collectives",
                drawn_model(num_hidden_layers=layers),
                {"parallel.tensor": 2, "training.micro_batch_size": 8, **method},
            )[0].values()
        )
        for layers in (1, 2)
    ]
    assert counts[1] - counts[0] == 4
