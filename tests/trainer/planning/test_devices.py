from __future__ import annotations

import pytest

from trainer.planning.cluster_text import parse_cluster
from trainer.planning.cost import Prices, plan_cost
from trainer.planning.devices import GIB, LinkRates, parse_link
from trainer.system.errors import InputError


def test_a_cluster_in_one_line() -> None:
    cluster = parse_cluster("8xA100-80G nvlink, 2 hosts, 200gbit")
    assert (cluster.world, cluster.hosts, cluster.is_equal) == (16, 2, True)
    assert cluster.between == LinkRates(up=25e9, down=25e9)
    assert cluster.groups[0].inside == 300e9
    assert cluster.text == "2 x 8 A100-80G, 200 Gbit/s between hosts"
    mixed = parse_cluster("1xRTX3090; 2xRTX4090, 1gbit")
    assert (mixed.world, mixed.is_equal, mixed.smallest.device.name) == (3, False, "RTX3090")
    assert parse_cluster("1xH200, 10gbit").between is None


def test_a_device_without_a_count_is_one_and_a_link_may_stand_apart() -> None:
    assert parse_cluster("RTX4090") == parse_cluster("1xRTX4090")
    assert parse_cluster("RTX 2080 Ti nvlink, 2 hosts, 1gbit").text.startswith("2 x 1 RTX2080Ti")
    apart = parse_cluster("RX580; RTX4090", "50mbit, 20ms")
    assert apart == parse_cluster("1xRX580; 1xRTX4090, 50mbit, 20ms")
    with pytest.raises(InputError, match="--link 1gbit: --cluster has a link too: 2gbit"):
        parse_cluster("T4, 2 hosts, 2gbit", "1gbit")
    with pytest.raises(InputError, match="--link 1gbit: is between hosts, and --cluster has one"):
        parse_cluster("2xT4", "1gbit")


def test_a_slow_link_in_words() -> None:
    cluster = parse_cluster("1xRTX3090; 1xRTX4090, 50mbit, 20ms, half duplex")
    assert cluster.between == LinkRates(up=6.25e6, down=6.25e6, half_duplex=True, round_trip=0.02)
    assert cluster.text.endswith(", 0.05 Gbit/s, 20 ms, half duplex between hosts")
    assert parse_cluster("2xT4, 1gbit; 1xL4, 100mbit").between == parse_link("100mbit")


def test_a_card_by_its_memory_and_this_machine() -> None:
    spaced = parse_cluster("2 x RTX 4090 pcie; 1xRX 6800, 1gbit")
    assert spaced.text.startswith("2 RTX4090 + 1 RX6800")
    (group,) = parse_cluster("2xRTX 2080 Ti nvlink").groups
    assert group.inside == 50e9
    (group,) = parse_cluster("2xH100 pcie").groups
    assert group.device.name == "H100-80G-PCIe"
    (group,) = parse_cluster("2x8GB").groups
    assert (group.device.name, group.device.memory, group.device.flops) == ("8GB", 8 * GIB, None)
    (here,) = parse_cluster("1xCPU").groups
    assert here.device.name.startswith("CPU, ")
    assert here.device.memory > 0
    with pytest.raises(InputError, match="1,000,000 devices; a plan has at most 65,536"):
        parse_cluster("1000000xT4")


def test_unlike_devices_hosts_memory_and_links() -> None:
    text = "lambda: RTX4090 64GB, 3GB/s disk; intel: 2xW5700X 300GB, CPU28; 1gbit"
    cluster = parse_cluster(text)
    assert (cluster.world, cluster.hosts, cluster.is_equal) == (4, 2, False)
    assert cluster.between == parse_link("1gbit")
    assert cluster.text == (
        "lambda: 1 RTX4090 with 64.0 GiB + intel: 2 W5700X with 300.0 GiB and 1 CPU, 28 cores,"
        " 1 Gbit/s between hosts"
    )
    sizes = [(pool.main_memory, pool.disk, pool.shares_host) for pool in cluster.groups]
    assert sizes == [
        (64 * GIB, 3e9, False),
        (300 * GIB, None, False),
        (300 * GIB, None, True),
    ]
    assert cluster.groups[2].device.memory == 300 * GIB
    (card, radeons) = parse_cluster("RTX4090, 2xW5700X").groups
    assert (card.device.name, radeons.device.name, radeons.devices) == ("RTX4090", "W5700X", 2)
    assert parse_cluster("RTX4090, 2xW5700X").hosts == 1


@pytest.mark.parametrize(
    ("text", "model", "memory"),
    [
        ("A100 80GB", "A100-80G", None),
        ("A100 512GB", "A100-40G", 512),
        ("A100 80GB 512GB", "A100-80G", 512),
        ("A100 nvlink 0.5TB", "A100-40G", 512),
        ("H100 80GB pcie 512 GB", "H100-80G-PCIe", 512),
        ("RTX 4090 24GB RAM", "RTX4090", 24),
        ("RTX4090 24GB, 64GB RAM", "RTX4090", 64),
        ("2 x 8GB", "8GB", None),
        ("8GB 64GB", "8GB", 64),
        ("CPU8-300GB", "CPU, 8 cores", 300),
    ],
)
def test_a_size_is_a_card_s_own_or_its_host_s(text: str, model: str, memory: int | None) -> None:
    (pool,) = parse_cluster(text).groups
    assert pool.device.name == model
    assert pool.main_memory == (memory and memory * GIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xA1000", "unknown device A1000; near it: "),
        ("8xA100-80G, 2 hosts", "2 hosts and no link between them"),
        ("8xA100-80G, soon", "cannot read 'soon'"),
        ("0xA100-80G", "needs devices"),
        ("2xRTX4090 nvlink", "a RTX4090 has no NVLink"),
        ("1xT4; 1xL4", "2 hosts and no link"),
        ("200gbit", "needs devices"),
        ("RTX4090, RTX3091", "cannot read 'RTX3091' in 'RTX4090, RTX3091': unknown device RTX3091"),
        ("RTX4090, 64GB", "cannot read '64GB' in 'RTX4090, 64GB'; write '64GB RAM' for the host"),
        ("W5700X 8GB", "cannot read 'W5700X 8GB' in 'W5700X 8GB'; a W5700X has 16 GiB"),
        ("RTX4090 64GB, 32GB RAM", "cannot read '32GB RAM' in .*; the host has a memory already"),
        ("a: T4; a: L4; 1gbit", "two hosts are named 'a'"),
        ("a: T4; b:; 1gbit", "cannot read ''"),
        ("a: T4; 2 hosts; 1gbit", "needs devices"),
        ("a: T4; b: L4; 1gbit; soon", "cannot read 'soon'"),
        ("CPU 300GB", "a processor needs cores and memory: CPU8-300GB"),
        ("lambda: RTX4090 64GB; intel: 2xW5700X 300GB", "2 hosts and no link"),
        ("1xT4, 2 hosts, 0gbit", "is not a rate"),
        ("", "cannot read ''"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")) as caught:
        parse_cluster(text)
    assert "\n" not in str(caught.value)


def test_energy_and_money() -> None:
    cluster = parse_cluster("2xA100-80G, 2 hosts, 200gbit")
    cost = plan_cost(cluster, 1800, Prices(kwh=0.5, hour=2, currency="EUR"))
    assert cost.kwh == pytest.approx(4 * 400 / 2 / 1000)
    assert cost.money == pytest.approx(4 + 0.4)
    assert plan_cost(cluster, 1800, Prices()).money is None
    assert cluster.groups[0].device.memory == 80 * GIB
