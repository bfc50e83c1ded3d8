"""What is offered for a cluster, and what the rules pick."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.planning.cluster_text import parse_cluster
from trainer.planning.decision import pick_strategy
from trainer.planning.memory import MemoryParts, plan_memory_by_part
from trainer.planning.shapes import NAMED
from trainer.planning.strategies import Request, StrategyOption, list_options
from trainer.planning.strategy import Strategy, TrainingSetup

RACK = "8xA100-80G nvlink, 2 hosts, 200gbit"
SLOW = "50mbit, 20ms, half duplex"


def request_of(shape: str, cluster: str, method: str = "lora", length: int = 2048) -> Request:
    return Request(
        shape=NAMED[shape],
        cluster=parse_cluster(cluster),
        method=method,  # pyright: ignore[reportArgumentType]
        length=length,
    )


@pytest.fixture(scope="module")
def rack() -> list[StrategyOption]:
    return list_options(request_of("7b", RACK))


def test_every_strategy_has_a_line(rack: list[StrategyOption]) -> None:
    keys = [option.key for option in rack]
    assert len(keys) == len(set(keys))
    assert {"ddp", "zero-1", "zero-2", "fsdp", "diloco", "motley", "ddp-qlora"} <= set(keys)
    assert {"ddp-tp8", "ddp-tp8-sp", "fsdp-tp8-sp", "tp8-sp-pp2-1f1b"} <= set(keys)
    for schedule in ("gpipe", "1f1b", "interleaved", "zbv"):
        assert f"ddp-pp2-{schedule}" in keys


def test_a_step_has_the_same_rows_in_every_strategy(rack: list[StrategyOption]) -> None:
    for option in rack:
        strategy = option.strategy
        rows = option.training.rows * strategy.microbatches * strategy.replicas
        assert rows == 8 * 16, option.key


def test_what_is_sharded_shrinks(rack: list[StrategyOption]) -> None:
    size = {option.key: option.memory.bytes_by_part() for option in rack}
    assert size["fsdp"]["weights"] == pytest.approx(size["ddp"]["weights"] / 16, rel=1e-6)
    assert size["zero-1"]["gradients"] == size["ddp"]["gradients"] > size["zero-2"]["gradients"]
    assert size["zero-1"]["optimizer"] == pytest.approx(size["ddp"]["optimizer"] / 16, rel=1e-6)
    assert size["motley"]["optimizer"] == 0


@pytest.mark.parametrize(
    ("shape", "cluster", "method", "picked"),
    [
        ("7b", RACK, "lora", "ddp"),
        ("7b", RACK, "full", "fsdp"),
        ("7b", "1xH200", "lora", "one-device"),
        ("7b", "1xRTX3090; 2xRTX4090, 1gbit", "lora", "motley"),
        ("70b", RACK, "lora", "fsdp"),
        ("13b", "1xRTX4090", "lora", "one-device-qlora"),
        ("405b", "1xRTX4090", "lora", None),
        ("qwen3-0.6b", "2xH200 nvlink, 2 hosts, 100mbit", "full", "diloco"),
        ("qwen3-4b", f"1xRTX3090; 1xRTX4090, {SLOW}", "lora", "diloco"),
    ],
)
def test_the_pick(shape: str, cluster: str, method: str, picked: str | None) -> None:
    asked = request_of(shape, cluster, method)
    found = list_options(asked)
    chosen = pick_strategy(asked, found)
    assert (chosen.option.key if chosen.option else None) == picked
    assert chosen.option is None or chosen.option.fits
    assert any(character.isdigit() for character in chosen.sentence)
    assert all(line.endswith(".") for line in chosen.lines)


@pytest.mark.parametrize(
    ("link", "tokens", "titles", "said"),
    [
        ("1gbit", 50e6, ("Motley bf16", "DiLoCo H1"), "Motley bf16: bf16 after each step adds"),
        (SLOW, 50e6, ("Motley int8", "DiLoCo H17"), "DiLoCo H17: int4 once in 17 steps"),
        (SLOW, 5e6, ("Motley int8", "DiLoCo H7"), "Motley int8: int8 after"),
    ],
)
def test_the_exchange_follows_the_link(
    link: str, tokens: float, titles: tuple[str, str], said: str
) -> None:
    """Adapters of 132 MB: what a step hides is taken, rounds where the run is long enough."""
    asked = replace(request_of("qwen3-4b", f"1xRTX3090; 1xRTX4090, {link}"), tokens=tokens)
    found = list_options(asked)
    assert tuple(option.title for option in found[:2]) == titles
    assert pick_strategy(asked, found).sentence.startswith(said)
    for option in found[:2]:
        assert option.time is not None
        assert option.time.choice is not None
        assert option.time.exposed == option.time.choice.taken.exposed


def test_workers_of_one_host_exchange_as_they_are() -> None:
    found = {option.key: option for option in list_options(request_of("qwen3-4b", "2xRTX4090"))}
    assert (found["motley"].title, found["diloco"].title) == ("Motley fp32", "DiLoCo H1")
    assert found["motley"].time is not None
    assert found["motley"].time.exposed.value == 0


@pytest.mark.parametrize(
    ("cluster", "keys"),
    [("2xW5700X", {"motley", "diloco"}), ("W5700X, 2 hosts, 1gbit", {"motley", "diloco"})],
)
def test_equal_devices_without_torch_hold_whole_models(cluster: str, keys: set[str]) -> None:
    request = request_of("qwen3-8b", cluster, "qlora", length=512)
    options = list_options(request)
    assert {option.key for option in options} == keys
    chosen = pick_strategy(request, options).option
    assert chosen is not None
    assert chosen.key == "motley"
    alone = list_options(replace(request, cluster=parse_cluster("W5700X")))
    assert [option.key for option in alone] == ["one-device"]


def test_a_device_of_unknown_speed_is_planned_by_memory_alone() -> None:
    asked = request_of("7b", "2xRTX4090")
    group = asked.cluster.groups[0]
    unknown = replace(group, device=replace(group.device, flops=None, watts=None))
    asked = replace(asked, cluster=replace(asked.cluster, groups=(unknown,)))
    found = list_options(asked)
    assert all(option.time is None and option.cost is None for option in found)
    assert pick_strategy(asked, found).option is not None


def test_gradients_take_the_place_of_activations_in_a_step_of_one_micro_batch() -> None:
    """As was measured (docs/decisions.md, Strategies): 0.85 of the plan if both were added."""
    shape, training = NAMED["1b"], TrainingSetup(length=512)

    def gradients(**settings: Any) -> int:
        strategy = Strategy(world=2, **settings)
        return plan_memory_by_part(shape, training, strategy).bytes_by_part()["gradients"]

    every = gradients(data="fsdp", microbatches=2)
    assert every == pytest.approx(4 * shape.parameters / 2)
    activations = plan_memory_by_part(shape, training, Strategy(world=2, data="fsdp")).activations
    assert gradients(data="fsdp") == pytest.approx(every - activations[0].value)
    assert gradients(tensor=2) < gradients(tensor=2, microbatches=2)
    assert gradients(data="ddp") == gradients(data="ddp", microbatches=2)  # buckets stay


def test_the_copies_that_a_checkpoint_makes_on_a_processor_are_planned() -> None:
    """Two of weights and moments, `benchmarks/memory.py --method fsdp` measures; after the step."""
    shape = NAMED["1b"]

    def planned(**settings: Any) -> MemoryParts:
        training = TrainingSetup(length=settings.pop("length", 64), on_host=True)
        return plan_memory_by_part(shape, training, Strategy(**settings))

    short = planned(world=2, data="fsdp")
    copies = 2 * 12 * shape.parameters / 2
    parts = short.bytes_by_part()
    stays = sum(parts[name] for name in ("weights", "optimizer")) + 4 * shape.parameters / 2
    gathered = sum(found.value for found in short.buffers[:-1])
    assert short.total == pytest.approx(stays + copies + gathered)
    long = planned(world=2, data="fsdp", length=1 << 20)
    assert long.buffers[-1].value == 0
    for without in ({}, {"world": 2, "data": "motley"}, {"world": 2, "data": "diloco"}):
        assert "checkpoint" not in "".join(found.name for found in planned(**without).buffers)


def test_precision_and_recomputation_are_planned() -> None:
    plain = request_of("7b", "1xRTX4090")
    wide, narrow = (
        list_options(replace(plain, precision=word, recompute=False))[0]
        for word in ("fp32", "fp16")
    )
    assert wide.memory.total > 1.7 * narrow.memory.total
    assert narrow.time is not None
    assert wide.time is not None
    share = wide.time.compute.value / wide.training.rows / narrow.time.compute.value
    assert share * narrow.training.rows == pytest.approx(165.2 / 82.6)
    sheet = list_options(replace(plain, cluster=parse_cluster("1xB200"), precision="fp32"))
    assert [option.time for option in sheet] == [None] * len(sheet), "none in its data sheet"
    for again in (True, False):
        for option in list_options(replace(plain, recompute=again)):
            assert option.training.recompute == ("full" if again else "none")
