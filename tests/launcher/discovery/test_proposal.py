"""Who does what, and the figures that decided; and which pairs are measured together."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from launcher.discovery.links import MeasuredLink, pair_rounds
from launcher.discovery.proposal import propose_roles, size_text
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host

GIB = 1 << 30
CARD = Device("cuda", "GPU-1", "NVIDIA RTX 4090", 24 * GIB)
INTEL = Host(name="intel", memory=300 * GIB, cores=16, devices=(Device("cpu", "cpu"),))
LAMBDA = Host(name="lambda", memory=64 * GIB, cores=32, devices=(CARD,))
LAPTOP = Host(name="laptop", memory=16 * GIB, cores=8, devices=(Device("cpu", "cpu"),))


def test_a_link_that_was_not_tried_is_no_evidence_against_a_host() -> None:
    links = [
        link("lambda", "intel", 900),
        link("lambda", "laptop", 90),
        MeasuredLink("intel", "laptop", problem="port 9000 is in use", unknown=True),
    ]
    found = propose_roles([LAMBDA, INTEL, LAPTOP], {}, links).coordinator
    assert (found.host, found.reason) == (
        "intel",
        "reaches 1 of 2 other hosts, 1 not measured; its slowest link is 900 Mbit/s",
    )


def link(one: str, other: str, megabits: float | None, problem: str = "") -> MeasuredLink:
    rate = None if megabits is None else megabits * 1e6
    return MeasuredLink(one, other, rate, rate, 1e-3, problem)


def test_the_reference_cluster() -> None:
    links = [
        link("lambda", "intel", 941),
        link("lambda", "laptop", 500),
        link("intel", "laptop", 520),
    ]
    disks = {"lambda": 900 * GIB, "intel": 2 << 40}
    found = propose_roles([LAMBDA, INTEL, LAPTOP], disks, links)
    assert found.coordinator.host == "intel"
    assert found.coordinator.reason == (
        "reaches every other host; its slowest link is 520 Mbit/s; the most memory, 300 GiB"
    )
    assert (found.share.host, found.share.reason) == ("intel", "the most free disk, 2 TiB")
    assert (found.student.host, found.teacher.host) == ("lambda", "intel")
    assert "NVIDIA RTX 4090, 24 GiB" in found.student.reason
    assert found.teacher.reason == "the most memory beside lambda, 300 GiB"


def test_the_coordinator_reaches_most_then_fastest_then_has_most_memory() -> None:
    hosts = [LAMBDA, INTEL, LAPTOP]
    cut = [
        link("lambda", "intel", 900),
        link("lambda", "laptop", 90),
        link("intel", "laptop", None, "no route"),
    ]
    found = propose_roles(hosts, {}, cut).coordinator
    assert (found.host, found.reason) == (
        "lambda",
        "reaches every other host; its slowest link is 90 Mbit/s",
    )
    slow = [
        link("lambda", "intel", 900),
        link("lambda", "laptop", 900),
        link("intel", "laptop", 100),
    ]
    assert propose_roles(hosts, {}, slow).coordinator.host == "lambda"
    assert propose_roles(hosts, {}, []).coordinator.host == "intel"


def test_a_host_without_devices_is_no_student() -> None:
    """It coordinates, or keeps the share, with however many cores."""
    nas = replace(INTEL, name="nas", devices=(), cores=128, memory=1 << 40)
    found = propose_roles([nas, LAPTOP], {}, [])
    assert (found.student.host, found.teacher.host) == ("laptop", "nas")
    filled = replace(nas, fill_with_cpu=True)
    assert propose_roles([filled, LAPTOP], {}, []).student.host == "nas"
    assert propose_roles([nas, replace(nas, name="other")], {}, []).student.host == "nas"


def test_one_machine_does_everything() -> None:
    found = propose_roles([LAPTOP], {}, [])
    roles = (found.coordinator, found.share, found.teacher, found.student)
    assert {role.host for role in roles} == {"laptop"}
    assert found.student.reason == "no host has a CUDA card; the most cores, 8"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8])
def test_every_pair_is_measured_once_and_no_machine_twice_at_once(count: int) -> None:
    names = [f"h{number}" for number in range(count)]
    found = pair_rounds(names)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(combinations(names, 2))
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert len(found) <= max(count, 1)


def test_sizes() -> None:
    assert [size_text(size) for size in (3 << 20, 24 * GIB, int(1.5 * 2**40))] == [
        "3 MiB",
        "24 GiB",
        "1.5 TiB",
    ]
