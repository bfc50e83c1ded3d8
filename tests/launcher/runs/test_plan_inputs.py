"""Surveyed hosts as the devices of a plan."""

import pytest

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.runs.plan_inputs import describe_cluster
from trainer.planning.devices import LinkRates

CARD = Device("cuda", "GPU-1", "NVIDIA GeForce RTX 4090", 24 << 30)
CPU = Device("cpu", "cpu", threads=4)
GIGABIT = LinkRates(up=125e6, down=125e6)


def test_equal_hosts_are_one_group_and_others_are_not() -> None:
    hosts = [Host(name=name, devices=(CARD, CARD)) for name in ("a", "b")]
    cluster = describe_cluster(hosts, GIGABIT)
    assert (cluster.world, cluster.is_equal, cluster.text) == (
        4,
        True,
        "2 x 2 RTX4090, 1 Gbit/s between hosts",
    )
    mixed = describe_cluster([*hosts, Host(name="c", devices=(CPU,), memory=8 << 30)], GIGABIT)
    assert (mixed.world, mixed.is_equal) == (5, False)
    assert mixed.smallest.device.memory == 6 << 30
    assert mixed.groups[1].main_memory == 8 << 30
    both = describe_cluster([Host(name="a", devices=(CARD, CPU), memory=64 << 30)], None)
    assert (both.hosts, both.world, both.is_equal) == (1, 2, False), "one host of two kinds"
    assert any("assumed" in remark for remark in mixed.remarks)


def test_an_unknown_device_has_its_own_memory_and_no_time() -> None:
    odd = Device("wgpu", "0000:0b:00.0", "Odd Card", 4 << 30)
    cluster = describe_cluster([Host(name="a", devices=(odd,))], None)
    assert cluster.groups[0].device.flops is None
    assert "Odd Card is not a known device" in cluster.remarks[0]
    silent = Device("wgpu", "0000:0b:00.0", "Odd Card")
    with pytest.raises(ConfigError, match="does not report its memory"):
        describe_cluster([Host(name="a", devices=(silent,))], None)


def test_two_hosts_need_a_link() -> None:
    hosts = [Host(name=name, devices=(CARD,)) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"no link between them.* with --link"):
        describe_cluster(hosts, None)
    with pytest.raises(ConfigError, match="has a device to train on"):
        describe_cluster([Host(name="a", devices=())], None)
