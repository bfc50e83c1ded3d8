"""Pipelines against one process: every schedule, and what else may differ from a plain step."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.covering import covering
from tests.trainer.replica.driving import drawn_weights
from tests.trainer.replica.torch.parallel.one_process import (
    alone,
    device,
    farthest,
    parallel_replica,
    samples,
)
from tests.trainer.replica.torch.parallel.test_exactness import METHODS, check
from trainer.config.parallel import PipelineConfig, Schedule
from trainer.model.architecture import read_architecture
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.linear import Linear
from trainer.replica.torch.replica import TorchReplica

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel
    from trainer.replica.torch.parallel.replica import ParallelReplica

HERE = "tests.trainer.replica.torch.parallel.test_pipeline"
EXACTNESS = "tests.trainer.replica.torch.parallel.test_exactness"
PACKED = {"training.pack": True, "data.max_seq_len": 64}

# schedule, method, model, packed, recomputed, tied, layers
CASES = [
    ("gpipe", "full", "qwen3", False, True, True, 4),
    ("gpipe", "lora", "qwen2", True, False, True, 5),
    ("gpipe", "qlora", "llama", True, True, False, 4),
    ("1f1b", "full", "qwen2", True, True, False, 5),
    ("1f1b", "lora", "llama", False, False, True, 5),
    ("1f1b", "qlora", "qwen3", False, True, True, 4),
    ("interleaved", "full", "llama", True, True, True, 4),
    ("interleaved", "lora", "qwen3", False, False, False, 4),
    ("interleaved", "qlora", "qwen2", False, True, True, 5),
    ("zbv", "full", "qwen3", True, False, False, 5),
    ("zbv", "lora", "qwen2", True, True, True, 4),
    ("zbv", "qlora", "llama", False, False, True, 5),
]


def pipeline(schedule: str, microbatches: int = 4, stages: int = 2) -> dict[str, Any]:
    return {
        "parallel.pipeline.stages": stages,
        "parallel.pipeline.schedule": schedule,
        "parallel.pipeline.microbatches": microbatches,
    }


def test_every_pair_of_properties_occurs() -> None:
    assert {case[0] for case in CASES} == set(get_args(Schedule))
    for one, other in combinations(zip(*CASES, strict=True), 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))


@pytest.mark.parametrize(
    ("schedule", "method", "model_type", "packed", "recomputed", "tied", "layers"), covering(CASES)
)
def test_first_step(
    ranks: Ranks,
    drawn_model: DrawnModel,
    schedule: str,
    method: str,
    model_type: str,
    packed: bool,
    recomputed: bool,
    tied: bool,
    layers: int,
) -> None:
    """The last micro-batches are partly or wholly padding: 11 samples, or fewer rows."""
    folder = drawn_model(model_type, num_hidden_layers=layers, tie_word_embeddings=tied)
    settings = METHODS[method] | pipeline(schedule) | (PACKED if packed else {})
    check(ranks.run(f"{EXACTNESS}:first_step", folder, settings, recomputed))


@pytest.mark.parametrize(
    ("schedule", "stages", "count", "method", "model_type"),
    [
        ("1f1b", 2, 11, "lora", "qwen2"),
        ("zbv", 2, 1, "qlora", "llama"),
        ("zbv", 2, 11, "full", "qwen3"),
        ("1f1b", 4, 11, "full", "qwen3"),
    ],
)
def test_copies_of_a_pipeline_and_more_stages(
    ranks: Ranks,
    drawn_model: DrawnModel,
    schedule: str,
    stages: int,
    count: int,
    method: str,
    model_type: str,
) -> None:
    """Of two copies one has more samples, or all of them; four stages have two in the middle."""
    folder = drawn_model(model_type, num_hidden_layers=5)
    settings = METHODS[method] | pipeline(schedule, stages=stages)
    check(ranks.run(f"{EXACTNESS}:first_step", folder, settings, False, count, world=4))


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_a_step_is_the_same_after_other_shapes_and_an_evaluation(
    ranks: Ranks, drawn_model: DrawnModel, schedule: str
) -> None:
    folder = drawn_model(num_hidden_layers=5)
    for found in ranks.run(f"{HERE}:steps", folder, pipeline(schedule)):
        assert found["same"]
        assert found["evaluation"] == pytest.approx(found["loss"], rel=1e-6)
        assert found["several rounds"] < 1e-5


def steps(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a step gives before and after others, and one in several rounds."""
    replica, config = parallel_replica(folder, settings | METHODS["lora"])
    batch, other = samples(config, 11, 300), samples(config, 3, 300, seed=1)
    loss = replica.accumulate(batch).loss_sum
    first = _gradients(replica)
    assert any(gradient.any() for gradient in first.values())
    replica.accumulate(other)
    evaluation = replica.evaluate(batch).loss_sum
    again = replica.accumulate(batch).loss_sum
    same = again == loss and all(
        torch.equal(first[name], gradient) for name, gradient in _gradients(replica).items()
    )
    small, _ = parallel_replica(
        folder, settings | METHODS["lora"] | {"training.micro_batch_size": 2}
    )
    small.accumulate(batch)
    apart = max(
        float((gradient - first[name]).norm() / first[name].norm())
        for name, gradient in _gradients(small).items()
    )
    return {"loss": loss, "same": same, "evaluation": evaluation, "several rounds": apart}


def _gradients(replica: ParallelReplica) -> dict[str, Tensor]:
    return {
        name: part.grad.clone()
        for name, part in replica.parameters.items()
        if part.grad is not None
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_recomputed_layer_runs_twice(
    ranks: Ranks, drawn_model: DrawnModel, schedule: str
) -> None:
    """Not again for each of its weights, as a schedule that splits backward would have it."""
    folder = drawn_model(num_hidden_layers=4)
    found = ranks.run(f"{HERE}:layer_runs", folder, METHODS["full"] | pipeline(schedule))
    layers, microbatches = 2, 4
    assert found == [2 * layers * microbatches] * 2


def layer_runs(folder: str, settings: dict[str, Any]) -> int:
    """Return how often this rank's layers ran in a step."""
    replica, config = parallel_replica(folder, settings, recompute=True)
    runs: list[None] = []
    assert replica._pipeline is not None
    for stage in replica._pipeline._stages:
        for layer in stage.part.model.layers:
            layer.register_forward_pre_hook(lambda *_: runs.append(None))
    replica.accumulate(samples(config, 8, 300))
    return len(runs)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_a_classifier_and_its_confusion(
    ranks: Ranks, drawn_model: DrawnModel, schedule: str
) -> None:
    folder = drawn_model(num_hidden_layers=4)
    settings = pipeline(schedule) | {"task": "classify"}
    found = ranks.run(f"{HERE}:classified", folder, settings)
    assert found[0] == found[1]
    loss, wanted, confusion, wanted_confusion, gradient = found[0]
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert confusion == wanted_confusion
    assert gradient < 1e-5


def classified(folder: str, settings: dict[str, Any]) -> list[Any]:
    replica, config = parallel_replica(folder, settings)
    batch = samples(config, 7, 300)
    mine = replica.evaluate(batch)
    plain = {key: value for key, value in settings.items() if not key.startswith("parallel.")}
    single = TorchReplica(Path(folder), config, replica.layout, str(device()), threads=1)
    single.write_trainable(drawn_weights(Path(folder), config))
    wanted = single.evaluate(batch)
    replica.accumulate(batch)
    flat = replica.gather_gradient()
    apart = 0.0
    if flat is not None:
        apart = farthest(replica.layout, flat, alone(folder, plain, batch)[1])[1]
    worst = torch.tensor(apart)
    dist.all_reduce(worst)
    return [mine.loss_sum, wanted.loss_sum, mine.confusion, wanted.confusion, float(worst)]


def test_bf16_is_as_far_from_fp32_as_in_one_process(ranks: Ranks, drawn_model: DrawnModel) -> None:
    folder = drawn_model(num_hidden_layers=4)
    (mine, single, _), _ = ranks.run(f"{HERE}:in_bf16", folder, pipeline("zbv"))
    assert 1e-4 < mine < 2 * single


def in_bf16(folder: str, settings: dict[str, Any]) -> list[float]:
    """Return how far bf16 gradients are from those of fp32: of ranks, and of one process."""
    settings = settings | METHODS["lora"] | {"model.dtype": "bfloat16"}
    replica, config = parallel_replica(folder, settings)
    batch = samples(config, 11, 300)
    replica.accumulate(batch)
    mine = replica.gather_gradient()
    if mine is None:
        return []
    plain = {key: value for key, value in settings.items() if not key.startswith("parallel.")}
    exact = alone(folder, plain | {"model.dtype": "float32"}, batch)[1]
    single = alone(folder, plain, batch)[1]
    return [
        float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        for found in (mine, single, exact)
    ]


def test_weights_written_are_those_gathered(ranks: Ranks, drawn_model: DrawnModel) -> None:
    folder = drawn_model(num_hidden_layers=5)
    settings = METHODS["full"] | pipeline("interleaved", stages=2)
    assert ranks.run(f"{HERE}:weights_return", folder, settings, world=4)[0]


def weights_return(folder: str, settings: dict[str, Any]) -> bool:
    replica, config = parallel_replica(folder, settings)
    gathered = replica.gather_parameters(replica.parameters)
    return gathered is not None and np.array_equal(gathered, drawn_weights(Path(folder), config))


class Recorded:
    """A model's weights, and the names of those that were read."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def tensor(self, name: str) -> Tensor:
        self.names.append(name)
        return torch.zeros(2, 2) if "norm" not in name else torch.zeros(2)

    def embedding(self, name: str) -> nn.Module:
        return nn.Embedding.from_pretrained(self.tensor(name))

    def linear(self, name: str, *, biased: bool) -> nn.Module:
        self.names += [f"{name}.weight", *([f"{name}.bias"] if biased else [])]
        return Linear(torch.zeros(2, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_its_own_weights_alone(drawn_model: DrawnModel, tied: bool) -> None:
    from trainer.replica.torch.parallel.pipeline import split_layers

    folder = Path(drawn_model("qwen2", num_hidden_layers=5, tie_word_embeddings=tied))
    architecture, tree = read_architecture(folder), read_config(folder)
    read: list[str] = []
    for layers in split_layers(5, 3):
        stored = Recorded()
        part = Decoder(architecture, tree, "here", stored, None, layers)
        numbers = {int(name.split(".")[2]) for name in stored.names if ".layers." in name}
        assert numbers == set(layers)
        assert all(
            name.split(".")[2] in map(str, layers)
            for name, _ in part.model.layers.named_parameters(prefix="model.layers")
        )
        read += stored.names
    if tied:
        read.remove("model.embed_tokens.weight")  # the last stage's head has a copy
    assert sorted(read) == sorted(read_headers(folder))


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 4, [1, 1, 2, 1]),
        (6, 4, [1, 2, 2, 1]),
        (4, 4, [1, 1, 1, 1]),
        (28, 8, [3, 3, 3, 4, 4, 4, 4, 3]),
    ],
)
def test_layers_are_split_evenly(layers: int, stages: int, wanted: list[int]) -> None:
    from trainer.replica.torch.parallel.pipeline import split_layers

    found = split_layers(layers, stages)
    assert [len(part) for part in found] == wanted
    assert [layer for part in found for layer in part] == list(range(layers))


def test_a_v_gives_the_first_process_the_first_stage_and_the_last() -> None:
    from trainer.replica.torch.parallel.stages import place_stages

    assert place_stages(PipelineConfig(stages=3, schedule="zbv")) == [0, 1, 2, 2, 1, 0]
    assert place_stages(PipelineConfig(stages=2, schedule="interleaved")) == [0, 1, 0, 1]
    assert place_stages(PipelineConfig(stages=3)) == [0, 1, 2]
