"""Speed by number of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.planning.devices import parse_cluster
from trainer.planning.scaling import parts_of, scaling
from trainer.planning.shapes import NAMED
from trainer.planning.strategies import Request


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1xRTX4090", [1]),
        ("3xRTX4090", [1, 2, 3]),
        ("4xA100-80G nvlink, 3 hosts, 200gbit", [1, 2, 4, 8, 12]),
        ("1xRTX3090; 2xRTX4090, 2 hosts; 1xT4, 1gbit", [1, 3, 5, 6]),
    ],
)
def test_parts_grow_to_the_whole_cluster(text: str, sizes: list[int]) -> None:
    cluster = parse_cluster(text)
    parts = list(parts_of(cluster))
    assert [part.world for part in parts] == sizes
    assert parts[-1] == cluster
    for part in parts:
        assert part.between == (cluster.between if part.hosts > 1 else None)


def test_no_strategy_is_faster_than_its_devices_together() -> None:
    cluster = parse_cluster("2xA100-80G nvlink, 2 hosts, 200gbit")
    found = scaling(Request(shape=NAMED["1b"], cluster=cluster, method="lora"))
    assert [point.devices for point in found["DDP"]] == [1, 2, 4]
    for name, points in found.items():
        for point in points:
            assert point.option.fits, name
            assert 0 < point.speedup <= point.devices * 1.000001, name
    assert found["DDP"][0].speedup == pytest.approx(1)


def test_what_does_not_fit_and_what_has_no_speed_have_no_points() -> None:
    asked = Request(shape=NAMED["7b"], cluster=parse_cluster("2xRTX4090"), method="full")
    assert scaling(asked)["DDP"] == []
    group = asked.cluster.groups[0]
    unknown = replace(group, device=replace(group.device, flops=None))
    silent = replace(asked, cluster=replace(asked.cluster, groups=(unknown,)))
    assert not any(scaling(silent).values())
