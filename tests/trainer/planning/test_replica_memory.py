"""The plan covers what torch keeps, without being far above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from trainer.data.tokens import Encoded
from trainer.model.architecture import read_architecture
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout, read_headers
from trainer.planning.activations import of_head, of_layer, of_layer_input
from trainer.planning.replica import BUSY_TOKENS, must_recompute, plan_memory, training_of
from trainer.planning.shapes import shape_of
from trainer.planning.strategy import Strategy
from trainer.replica.microbatch import Limit, split
from trainer.replica.torch.replica import TorchReplica

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeConfig, TinyModel
    from trainer.config.run import RunConfig
    from trainer.planning.replica import MemoryPlan


def plan_of(folder: Path, config: RunConfig, **settings: bool) -> MemoryPlan:
    return plan_memory(
        read_architecture(folder),
        read_headers(folder),
        build_layout(folder, config),
        config,
        **{"accelerator": False, "recompute": False, **settings},
    )


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_counted(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    model_type: str,
    method: str,
    dtype: str,
    recompute: bool,
) -> None:
    """Counts the bytes that autograd saves for each further sample."""
    # Wide enough that the terms of the estimate carry their real weight.
    folder = tiny_model(model_type, hidden_size=256, intermediate_size=768)
    config = make_config(folder, method=method, model__dtype=dtype)
    layout = build_layout(folder, config)
    replica = TorchReplica(folder, config, layout, threads=1, gradient_checkpointing=recompute)
    replica.write_trainable(initial_weights(layout, folder, config))
    length = 64

    def saved(samples: int) -> int:
        sizes: dict[int, int] = {}
        alive: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or its address would be given out again
            return tensor

        batch = [Encoded(np.arange(length, dtype=np.int32), 0)] * samples
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            replica.forward_backward(batch, lambda *_: None)
        return sum(sizes.values())

    # Weights and their copies are in both and cancel out.
    measured = (saved(4) - saved(2)) / (2 * length)
    training = training_of(config, accelerator=False, recompute=recompute)
    shape, one = shape_of(read_architecture(folder)), Strategy()
    layer = of_layer_input if recompute else of_layer
    planned = 2 * layer(shape, training, one).value + of_head(shape, training).value
    # The first norm's input does not count where the embedding is frozen.
    unused = 0 if recompute or method == "full" else 4 * shape.hidden
    small = 24  # means of norms, positions: a few numbers for each token
    assert planned - unused <= measured <= 1.005 * (planned - unused) + small


def test_parts(tiny_model: TinyModel, make_config: MakeConfig) -> None:
    folder = tiny_model()
    plain = plan_of(folder, make_config(folder))
    layout = build_layout(folder, make_config(folder))
    stored = sum(header.end - header.begin for header in read_headers(folder).values())
    assert plain.frozen == stored
    assert plain.trainable == plain.gradients == 4 * layout.size
    quantised = plan_of(folder, make_config(folder, model__quantization="nf4"))
    assert quantised.frozen < plain.frozen / 2
    full = plan_of(folder, make_config(folder, method="full"))
    assert (full.frozen, full.state) == (0, 4 * full.trainable)
    card = plan_of(folder, make_config(folder, method="full"), accelerator=True, recompute=True)
    assert card.state == 0
    assert card.per_token < full.per_token
    heads = [
        plan_of(folder, make_config(folder, task="causal-lm", method=method)).workspace
        for method in ("full", "lora")
    ]
    assert heads[0] - heads[1] == 4 * 300 * 64  # the gradient of the output layer


def test_split_keeps_every_sample_once_within_the_limit() -> None:
    lengths = [5, 40, 3, 40, 0, 17, 90, 8]
    groups = split(lengths, Limit(3, 100))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[index] for index in group)
        assert len(group) == 1 or (len(group) <= 3 and width * len(group) <= 100)
    assert groups[0] == [6]
    assert split([], Limit(1, 1)) == []


def test_a_student_keeps_activations_where_a_busy_gpu_has_room(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model("qwen3")
    config = make_config(folder, method="full")
    plan = plan_of(folder, config, accelerator=True, moments=True)
    size = build_layout(folder, config).size
    assert plan.state == 2 * 4 * size
    assert plan_of(folder, config, accelerator=True).state == 0
    enough = plan.fixed + BUSY_TOKENS * plan.per_token
    assert not must_recompute(plan, int(enough / 0.9) + 10)
    assert must_recompute(plan, int(enough / 0.9) - 10)
