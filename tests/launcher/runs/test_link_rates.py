"""Measured link rates: read from an inventory, and what `launch plan` takes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.inventory.hosts import Host, load_inventory
from launcher.inventory.variables import VariableReader
from launcher.runs.plan_inputs import slowest_link


def host(name: str, **rates: float) -> Host:
    return Host(name=name, link_rates=tuple((other, 1e6 * rate) for other, rate in rates.items()))


def test_the_slowest_direction_of_the_slowest_pair() -> None:
    hosts = [host("a", b=941, c=200), host("b", a=938, c=940), host("c", a=160)]
    assert slowest_link(hosts) == 160e6 / 8
    assert slowest_link([hosts[2], host("a")]) == 160e6 / 8  # one direction is enough


def test_a_pair_that_was_not_measured_may_be_the_slowest() -> None:
    assert slowest_link([host("a", b=941), host("b"), host("c", a=941)]) is None
    assert slowest_link([host("a", gone=1)]) is None


@pytest.mark.parametrize("value", ["941", ["b"], {"b": 0}, {"b": "1gbit"}, {"b": True}])
def test_rates_of_another_kind(value: object) -> None:
    with pytest.raises(
        ConfigError, match="motley_link_rates: must be a mapping of hosts to Mbit/s"
    ):
        VariableReader("f: host a", {"motley_link_rates": value}).link_rates()


def test_they_are_read_from_an_inventory(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("all:\n  hosts:\n    a: {motley_link_rates: {b: 941, c: 93.5}}\n")
    (found,) = load_inventory(file)
    assert dict(found.link_rates) == {"b": 941e6, "c": 93.5e6}
