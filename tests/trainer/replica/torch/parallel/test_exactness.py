"""The first step of every strategy against one process."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.covering import covering
from tests.trainer.replica.torch.parallel.one_process import (
    alone,
    farthest,
    parallel_replica,
    samples,
)

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_exactness"
DDP = {"parallel.data": "ddp"}
FSDP = {"parallel.data": "fsdp"}
TP = {"parallel.tensor": 2}
SP = {"parallel.tensor": 2, "parallel.sequence": True}
BOTH = {"parallel.tensor": 2, "parallel.data": "fsdp"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"lora.lora_rank": 4},
    "qlora": {"lora.lora_rank": 4, "model.quantization": "nf4"},
}


def first_step(
    folder: str, settings: dict[str, Any], recompute: bool, count: int = 11
) -> dict[str, Any]:
    """Return how far the loss and the gradients of a step are from those of one process."""
    replica, config = parallel_replica(folder, settings, recompute=recompute)
    batch = samples(config, count, 300)
    result = replica.accumulate([batch[index] for index in replica.local_samples(len(batch))])
    mine = replica.gather_gradient()
    if mine is None:
        return {}
    plain = {key: value for key, value in settings.items() if not key.startswith("parallel.")}
    loss, wanted = alone(folder, plain, batch)
    name, distance = farthest(replica.layout, mine, wanted)
    return {
        "loss": abs(result.loss_sum / result.weight / loss - 1),
        "gradient": distance,
        "of": name,
    }


def check(found: list[dict[str, Any]], within: float = 1e-5) -> None:
    assert found[0]["loss"] < within, found
    assert found[0]["gradient"] < within, found


FAMILIES: dict[str, dict[str, Any]] = {
    # First, as the part that `make test` runs has it fully trained and divided.
    "llama": {"vocab_size": 301},
    "qwen2": {"tie_word_embeddings": False, "vocab_size": 301},
    "qwen3": {},
}
"""Tied and not, and with a vocabulary that two ranks cannot share equally."""


STRATEGIES = {"ddp": DDP, "fsdp": FSDP, "tp": TP, "tp-sp": SP}


@pytest.mark.parametrize(
    ("model_type", "method", "strategy"), covering(product(FAMILIES, METHODS, STRATEGIES))
)
def test_first_step(
    ranks: Ranks, drawn_model: DrawnModel, model_type: str, method: str, strategy: str
) -> None:
    folder = drawn_model(model_type, **FAMILIES[model_type])
    settings = METHODS[method] | STRATEGIES[strategy]
    check(ranks.run(f"{HERE}:first_step", folder, settings, False))


@pytest.mark.parametrize(
    ("method", "model_type", "sequence", "packed", "recompute"),
    covering(
        (method, *other)
        for other in [
            ("qwen3", False, True, False),
            ("qwen2", True, True, True),
            ("llama", True, False, False),
            ("qwen3", True, False, True),
        ]
        for method in METHODS
    ),
)
def test_first_step_of_fsdp_x_tensor(
    ranks: Ranks,
    drawn_model: DrawnModel,
    model_type: str,
    method: str,
    sequence: bool,
    packed: bool,
    recompute: bool,
) -> None:
    settings = METHODS[method] | BOTH
    settings |= {"parallel.sequence": sequence, "training.pack": packed}
    folder = drawn_model(model_type, **FAMILIES[model_type])
    check(ranks.run(f"{HERE}:first_step", folder, settings, recompute, world=4))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "packed": ({"vocab_size": 301}, {"method": "full", "training.pack": True}, False),
    "biased": ({"attention_bias": True, "mlp_bias": True}, {"method": "full"}, False),
    "two-targets": (
        {},
        {"lora.target_modules": ["q_proj", "down_proj"], "training.pack": True},
        True,
    ),
    "classify": ({}, {"task": "classify", "method": "full"}, True),
    "classify-nf4": ({}, {"task": "classify", "model.quantization": "nf4"}, False),
}
"""Of what differs: the model's config, settings, whether activations are computed again."""


@pytest.mark.parametrize(("other", "strategy"), covering(product(OTHERS, ["ddp", "fsdp", "tp-sp"])))
def test_first_step_of_other_models_and_settings(
    ranks: Ranks, drawn_model: DrawnModel, other: str, strategy: str
) -> None:
    model, settings, recompute = OTHERS[other]
    folder = drawn_model("llama", **model)
    check(ranks.run(f"{HERE}:first_step", folder, settings | STRATEGIES[strategy], recompute))


@pytest.mark.parametrize("settings", [DDP, FSDP, BOTH], ids=["ddp", "fsdp", "fsdp-x-tensor"])
def test_a_copy_without_samples_counts_for_nothing(
    ranks: Ranks, drawn_model: DrawnModel, settings: dict[str, Any]
) -> None:
    """The last step of an epoch may have fewer samples than copies."""
    world = 4 if "parallel.tensor" in settings else 2
    model = drawn_model(vocab_size=301)
    check(
        ranks.run(f"{HERE}:first_step", model, {"method": "full"} | settings, False, 1, world=world)
    )
    classify = {"method": "full", "task": "classify"} | settings
    check(ranks.run(f"{HERE}:first_step", model, classify, False, 1, world=world))


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), BOTH | SP])
def test_bf16_is_as_near_to_fp32_as_one_process_is(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any]
) -> None:
    """With autocast the order of sums decides the last of eight bits."""
    world = 4 if strategy.keys() >= BOTH.keys() else 2
    settings = {"model.dtype": "bfloat16"} | strategy
    found = ranks.run(f"{HERE}:first_step", drawn_model(), settings, False, 6, world=world)
    check(found, within=3e-2)


def written_weights(folder: str, settings: dict[str, Any]) -> bool | None:
    """Return whether weights come back from the ranks' parts as they were written."""
    replica, _ = parallel_replica(folder, settings)
    weights = np.random.default_rng(2).random(replica.layout.size, np.float32)
    replica.write_trainable(weights)
    back = replica.gather_parameters(replica.parameters)
    return None if back is None else bool(np.array_equal(back, weights))


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), BOTH | SP])
def test_weights_are_written_into_the_parts_and_gathered_from_them(
    ranks: Ranks, drawn_model: DrawnModel, strategy: dict[str, Any]
) -> None:
    world = 4 if strategy.keys() >= BOTH.keys() else 2
    settings = {"method": "full"} | strategy
    model = drawn_model(vocab_size=301)
    assert ranks.run(f"{HERE}:written_weights", model, settings, world=world)[0] is True
