"""What a host of the cluster tells everybody on its network."""

from __future__ import annotations

from xml.etree import ElementTree

import jinja2
import pytest

from launcher.discovery.mdns import SERVICES
from tests import ROOT

TEMPLATE = ROOT / "playbooks/roles/base/templates/avahi.service.j2"


@pytest.mark.parametrize(("port", "announced"), [("", "22"), (2222, "2222")])
def test_it_says_where_ssh_is_and_nothing_else(port: object, announced: str) -> None:
    text = jinja2.Template(TEMPLATE.read_text(encoding="utf-8")).render(base_ssh={"port": port})
    group = ElementTree.fromstring(text.partition("?>")[2])
    (service,) = group.findall("service")
    assert {child.tag: child.text for child in service} == {
        "type": SERVICES[0].removesuffix(".local."),
        "port": announced,
    }
    assert [child.tag for child in group] == ["name", "service"]
