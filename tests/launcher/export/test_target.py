"""Targets: equal hosts of an inventory, or a line of text."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.export.job import ExportedJob
from launcher.export.target import check_strategy, choose_target, parse_target
from launcher.export.torchrun import render_torchrun
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from trainer.config.run import RunConfig
from trainer.system.backends import Backend


def host(name: str, *devices: tuple[Backend, str], **facts: Any) -> Host:
    made = tuple(
        Device(backend=backend, id=f"{backend}-{number}", name=card)
        for number, (backend, card) in enumerate(devices)
    )
    return Host(name=name, devices=made, **facts)


def config(**settings: object) -> RunConfig:
    tree = {"task": "causal-lm", "model": {"path": "m"}, "data": {"train": "d"}}
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return RunConfig.model_validate(tree).with_settings(changes)


CARD = ("cuda", "NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize("text", ["2 nodes x 8 H100-80G", "1 node x 4 CPU"])
def test_a_target_says_what_it_read(text: str) -> None:
    assert parse_target(text).text == text
    assert parse_target(text.lower().replace(" x ", "x")).text == text


def test_equal_hosts_are_a_target_and_each_gets_its_command() -> None:
    hosts = [host("one", CARD, CARD, address="10.0.0.1"), host("two; reboot", CARD, CARD)]
    target = choose_target(hosts)
    assert (target.nodes, target.devices, target.world_size, target.backend) == (2, 2, 4, "cuda")
    job = ExportedJob(run_id="run", config=config(), target=target, version="1", wheel="w.whl")
    rendered = render_torchrun(job)
    assert rendered.steps[2:] == (
        "on one: sh torchrun.sh 0 10.0.0.1",
        "on two; reboot: sh torchrun.sh 1 10.0.0.1",
    )
    assert "reboot" not in rendered.files["torchrun.sh"]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([host("one", CARD), host("two", CARD, CARD)], "two has 2 x NVIDIA GeForce RTX 4090, one"),
        ([host("one", CARD, ("cpu", ""))], "one has 1 x cpu and 1 x NVIDIA GeForce RTX 4090: an"),
        ([host("one", ("wgpu", "Radeon"))], "on CUDA or on processors, not on Radeon"),
        ([host("one")], "one has no device"),
    ],
)
def test_hosts_that_equal_processes_cannot_use_are_named(hosts: list[Host], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_target(hosts)


@pytest.mark.parametrize(
    "name", ["RTX 4090\ntouch /tmp/x", "RTX 4090\r", "$(touch x)", "# x", "a" * 100, "\u202eRTX"]
)
def test_a_name_that_is_no_card_stands_in_no_script(name: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a card") as caught:
        choose_target([host("lambda", ("cuda", name))])
    assert "\n" not in str(caught.value)


def test_a_strategy_that_does_not_divide_the_target_and_a_distillation() -> None:
    target = parse_target("3 nodes x 1 CPU")
    with pytest.raises(
        ConfigError, match=r"3 nodes x 1 CPU: parallel: tensor 2 .* does not divide"
    ):
        check_strategy(config(parallel__tensor=2), target, None)
    with pytest.raises(ConfigError, match="equal processes train on samples, not on logits"):
        check_strategy(config(distillation__alpha=0.5), target, None)
    check_strategy(config(parallel__data="fsdp"), target, None)
