"""What a host of the cluster tells everybody on its network."""

from __future__ import annotations

from xml.etree import ElementTree

import jinja2
import pytest

from launcher.discovery.mdns import SERVICES
from tests import ROOT

TEMPLATE = ROOT / "playbooks/roles/base/templates/avahi.service.j2"


@pytest.mark.parametrize(
    ("arrival", "port", "announced"),
    [
        ("10.0.0.1 40000 10.0.0.2 2200", "", "2200"),  # which ssh_config alone knows
        ("fe80::1%eth0 40000 fe80::2%eth0 22", 2222, "22"),  # a router's, forwarded
        ("", "", "22"),  # without ssh
        ("", 2222, "2222"),
    ],
)
def test_it_says_where_ssh_is_and_nothing_else(arrival: str, port: object, announced: str) -> None:
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(base_ssh={"port": port}, base_arrival={"stdout": arrival})
    group = ElementTree.fromstring(text.partition("?>")[2])
    (service,) = group.findall("service")
    assert {child.tag: child.text for child in service} == {
        "type": SERVICES[0].removesuffix(".local."),
        "port": announced,
    }
    assert [child.tag for child in group] == ["name", "service"]
