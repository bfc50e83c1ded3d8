"""What the ranks of a layer keep for backward is what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.replica.kept_tensors import kept_bytes
from tests.trainer.replica.torch.parallel.one_process import parallel_replica
from trainer.data.tokens import Encoded
from trainer.model.architecture import read_architecture
from trainer.planning.activations import of_head, of_layer
from trainer.planning.model_config import read_shape
from trainer.planning.replica import make_training_setup
from trainer.planning.strategy import Strategy

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_planned_activations"
LENGTH = 64


def kept_and_planned(folder: str, settings: dict[str, Any]) -> list[float]:
    """Return the bytes that autograd keeps for each further token, and those of the plan."""
    replica, config = parallel_replica(folder, settings)

    def saved(samples: int) -> int:
        ids = np.arange(LENGTH, dtype=np.int32)
        return kept_bytes(lambda: replica.accumulate([Encoded(ids, ids)] * samples))

    measured = (saved(4) - saved(2)) / (2 * LENGTH)
    architecture = read_architecture(Path(folder))
    shape, training = (
        read_shape(Path(folder)),
        make_training_setup(config, accelerator=False, recompute=False),
    )
    strategy = Strategy(world=2, tensor=2, sequence=config.parallel.sequence)
    layers = architecture.num_layers * of_layer(shape, training, strategy).value
    return [measured, layers + of_head(shape, training).value]


@pytest.mark.parametrize("method", [{"method": "full"}, {"lora.lora_rank": 4}])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_plan_is_near_what_is_kept(
    ranks: Ranks, drawn_model: DrawnModel, method: dict[str, Any], sequence: bool
) -> None:
    settings = method | {"parallel.tensor": 2, "parallel.sequence": sequence}
    model = drawn_model(num_hidden_layers=4, intermediate_size=256)
    measured, planned = ranks.run(f"{HERE}:kept_and_planned", model, settings)[0]
    assert measured == pytest.approx(planned, rel=0.05)
