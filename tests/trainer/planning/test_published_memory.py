"""Published figures of memory, each with its source; where one is wrong, its test says so."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from trainer.planning.activations import in_flight, of_gpt_layer
from trainer.planning.memory import adapter_parameters, plan_memory_by_part, state_bytes
from trainer.planning.shapes import NAMED
from trainer.planning.strategy import MIXED, SCHEDULES, ElementSizes, Strategy, TrainingSetup
from trainer.system.errors import InputError

GB, GIB = 1e9, 2**30
NF4_TWICE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""With double quantisation: an 8-bit absmax a block, and a fp32 one to each 256 of them."""
EXACT = 0.01
FP32_GRADIENTS = replace(MIXED, gradient=6)  # kept beside the bf16 ones
DEEPSPEED_PAGE = ElementSizes(weight=4, gradient=0, optimizer=16, activation=2)
DEEPSPEED_CODE = ElementSizes(weight=2, gradient=0, optimizer=18, activation=2)
FP32 = ElementSizes(weight=4, gradient=4, optimizer=8, activation=4)


@pytest.mark.parametrize(
    ("billions", "devices", "size", "published"),
    [
        # ZeRO, arXiv 1910.02054, figure 1 and table 1.
        (7.5, 64, MIXED, {0: 120, 1: 31.4, 2: 16.6, 3: 1.88}),
        (128, 64, MIXED, {1: 536, 2: 284, 3: 32}),
        # A table prints 448, 224, 112, 56: 64 bytes a parameter, four times what ZeRO needs. The
        # function beside it gives these.
        (7, 8, MIXED, {0: 112, 1: 38.5, 2: 26.25, 3: 14}),
        # The Ultra-Scale Playbook, "Memory usage in transformers": bf16, and with fp32 gradients.
        (405, 1, MIXED, {0: 6480}),
        (405, 1, FP32_GRADIENTS, {0: 8100}),
        # DeepSpeed, docs/code-docs/source/memory.rst, 15.93 GiB: 4 bytes of weights and 16 that are
        # sharded. Its own code has since become 2 and 18: 11.28 GiB for the same question.
        (2.851, 8, DEEPSPEED_PAGE, {2: 15.93 * GIB / GB}),
        (2.851, 8, DEEPSPEED_CODE, {2: 11.28 * GIB / GB}),
        # accelerate, "Model memory estimator": bert-base-cased with Adam, 1.61 GiB.
        (0.1083, 1, FP32, {0: 1.61 * GIB / GB}),
    ],
)
def test_weights_gradients_and_moments(
    billions: float, devices: int, size: ElementSizes, published: dict[int, float]
) -> None:
    """In GB, by ZeRO's stages."""
    found = {stage: state_bytes(billions * 1e9, stage, devices, size) / GB for stage in published}
    assert found == pytest.approx(published, rel=EXACT)


@pytest.mark.parametrize(
    ("name", "scores", "saved"), [("gpt3-175b", 80, 0.70), ("gpt-530b", 64, 0.65)]
)
def test_selective_recomputation(name: str, scores: float, saved: float) -> None:
    """arXiv 2205.05198, section 5: the term 5 a s / h, and the share that it is of a layer."""
    shape = NAMED[name]
    kept = of_gpt_layer(shape, 2048, 1, False, "none").value
    less = of_gpt_layer(shape, 2048, 1, False, "selective").value
    assert (kept - less) / shape.hidden == pytest.approx(scores, rel=EXACT)
    assert 1 - less / kept == pytest.approx(saved, rel=0.01)


def test_sequence_parallelism_divides_a_layer_by_the_tensor_size() -> None:
    """arXiv 2205.05198, equations 2 and 4: of `34 + 5 a s / h`, TP divides all but 10, SP all."""
    shape = NAMED["gpt-22b"]
    one = of_gpt_layer(shape, 2048, 1, False, "none").value
    assert of_gpt_layer(shape, 2048, 8, True, "none").value == pytest.approx(one / 8)
    ten = 10 * shape.hidden * (1 - 1 / 8)
    assert of_gpt_layer(shape, 2048, 8, False, "none").value == pytest.approx(one / 8 + ten)


@pytest.mark.parametrize(
    ("name", "weights_gb", "published_gb"), [("65b", 33.6, 41), ("33b", 16.8, 21), ("13b", 6.7, 10)]
)
def test_qlora(name: str, weights_gb: float, published_gb: float) -> None:
    """QLoRA, arXiv 2305.14314, table 6: 41, 21 and 10 GB, adapters and activations included.

    Its 4.127 bits a parameter are of weights alone, so the published totals are upper bounds.
    """
    ours = NF4_TWICE_BYTES * NAMED[name].parameters / GB
    assert ours == pytest.approx(weights_gb, rel=0.01)
    assert ours < published_gb


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("7b", 6.738, None),
        ("13b", 13.016, None),
        ("70b", 68.977, None),
        ("405b", 405.853, None),
        ("qwen3-0.6b", 0.596, None),
        ("qwen3-4b", 4.022, None),
        ("gpt3-175b", 174.6, None),
        ("gpt-1t", 1008, None),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
    ],
)
def test_parameters_of_named_shapes(name: str, billions: float, active: float | None) -> None:
    """Model cards of Llama, Qwen3 and Mixtral; table 3 of arXiv 2205.05198."""
    shape = NAMED[name]
    assert shape.parameters / GB == pytest.approx(billions, rel=0.005)
    assert shape.active_parameters / GB == pytest.approx(active or billions, rel=0.02)


def test_gpt_parameters_follow_the_formula_of_narayanan() -> None:
    """arXiv 2104.04473, equation 2: `P = 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h)`."""
    for name in ("gpt-22b", "gpt3-175b", "gpt-530b", "gpt-1t"):
        shape = NAMED[name]
        layers, hidden = shape.layers, shape.hidden
        published = (
            12
            * layers
            * hidden**2
            * (1 + 13 / (12 * hidden) + (shape.vocab + 2048) / (12 * layers * hidden))
        )
        assert shape.parameters == pytest.approx(published, rel=1e-5)


def test_adapters_of_qwen3_4b() -> None:
    """Gradients in fp32, counted from the layout: 132 MB for all linears at rank 16."""
    shape = NAMED["qwen3-4b"]
    every = adapter_parameters(shape, TrainingSetup(method="lora", rank=16))
    assert 4 * every / 1e6 == pytest.approx(132, rel=EXACT)
    few = TrainingSetup(method="lora", rank=8, targets=("q_proj", "v_proj"))
    assert 4 * adapter_parameters(shape, few) / 1e6 == pytest.approx(11.8, rel=EXACT)


def test_micro_batches_in_flight() -> None:
    """8 stages, 64 micro-batches: arXiv 2205.05198 (1F1B), 2401.10241 (ZB-V)."""
    found = {
        schedule: in_flight(Strategy(world=8, stages=8, schedule=schedule, microbatches=64)).value
        for schedule in SCHEDULES
    }
    assert found == {"gpipe": 64, "1f1b": 8, "interleaved": 8 * (1 + 7 / 16), "zbv": 8}


def test_every_printed_formula_gives_its_value() -> None:
    """What `--explain` shows is what was computed, for every term of many plans."""
    checked = 0
    for name, method, data, tensor, stages, recompute in itertools.product(
        ("7b", "gpt3-175b", "qwen3-30b-a3b"),
        ("full", "lora", "qlora"),
        ("ddp", "zero2", "fsdp", "diloco", "motley"),
        (1, 2),
        (1, 4),
        ("none", "full"),
    ):
        strategy = Strategy(
            world=16,
            data=data,
            tensor=tensor,
            stages=stages,
            microbatches=8,
            schedule=SCHEDULES[checked % len(SCHEDULES)],
        )
        training = TrainingSetup(method=method, recompute=recompute)
        for _, term in plan_memory_by_part(NAMED[name], training, strategy).list_terms():
            assert math.isfinite(term.value)
            assert term.source
            checked += 1
    assert checked > 1000


def test_sizes_that_do_not_divide_are_refused_with_both() -> None:
    with pytest.raises(InputError, match="6 devices do not divide into tensor 4 x stages 1"):
        Strategy(world=6, tensor=4)
