"""fp16 over several processes: an overflow of one is one of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.trainer.replica.driving import drawn_weights
from tests.trainer.replica.torch.parallel.one_process import (
    alone,
    farthest,
    parallel_replica,
    samples,
)
from trainer.replica.torch.precision import SCALE_OF_MEAN

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_precision"
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.data": "ddp"},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": 2},
    "pp": {"parallel.pipeline.stages": 2},
}
FP16 = {"training.precision": "fp16", "method": "full"}


def overflowing_step(folder: str, settings: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the distance of an fp16 step to fp32's, and each rank's scale; the head is steep."""
    replica, config = parallel_replica(folder, settings)
    weights = drawn_weights(Path(folder), config)
    for slot in replica.layout.iter_tensors():
        if slot.name == "model.norm.weight":
            weights[slot.start : slot.stop] *= factor
    replica.write_trainable(weights)
    batch = samples(config, 6, 300)
    result = replica.accumulate([batch[index] for index in replica.local_samples(len(batch))])
    mine = replica.gather_gradient()
    scales: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scales, replica._scale.value)
    if mine is None:
        return {}
    plain = {key: value for key, value in settings.items() if not key.startswith("parallel.")}
    loss, wanted = alone(folder, plain | {"training.precision": "fp32"}, batch, weights)
    name, distance = farthest(replica.layout, mine, wanted)
    same = abs(result.loss_sum / result.weight / loss - 1)
    finite = bool(np.isfinite(mine).all())
    return {"loss": same, "gradient": distance, "of": name, "finite": finite, "scales": scales}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_an_overflow_halves_the_scale_of_all_ranks(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any]
) -> None:
    folder = drawn_model(tie_word_embeddings=False)
    found = ranks.run(f"{HERE}:overflowing_step", folder, FP16 | strategy, 1e2)[0]
    assert found["finite"], found
    assert found["loss"] < 1e-2, found
    assert found["gradient"] < 5e-2, found
    one, two = found["scales"]
    assert one == two < SCALE_OF_MEAN
