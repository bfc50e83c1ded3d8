"""An operator whose sudo rules are not the recipe's alone, on real sudo: no password is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.conftest import COORDINATES, Play
from tests.testbed.host import Host
from tests.testbed.image import SUITES
from tests.testbed.lab import Lab
from tests.testbed.plays import changed, changing_tasks, tagged
from tests.testbed.test_operators import findings
from tests.testbed.test_units import install
from tests.testbed.training import Operator

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]

BESIDE = "/opt/motley/current/bin/trainer"
SITE = "/etc/sudoers.d/site"
PASSWORD = "ops ALL=(ALL:ALL) ALL"
"""What many hosts have; `site` sorts after `motley`, and before `zz-motley`."""
HARMLESS = (
    PASSWORD,
    "%ops ALL=(ALL) ALL\nops ALL=(root) PASSWD: ALL",
    "Defaults requiretty",
    "Defaults use_pty\nDefaults !env_reset",
    "Defaults listpw=always, verifypw=always",
    "Defaults timestamp_timeout=0, timestamp_type=global",
    "Defaults secure_path=/nowhere",
)
"""What an administrator may have there, without effect on what the recipe allows."""
LATER = {
    "a later file": f"echo '{PASSWORD}' >/etc/sudoers.d/zzz-site",
    "a rule below the includedir": f"echo '{PASSWORD}' >>/etc/sudoers",
    "another includedir": (
        "sed -i s,^@includedir.*,@includedir\\ /etc/sudo-site.d, /etc/sudoers; "
        f"mkdir /etc/sudo-site.d; cp {SITE} /etc/sudo-site.d"
    ),
}


class Station:
    """A host, its operator, and an administrator who has the password of sudo."""

    def __init__(self, host: Host, operator: Operator, play: Play) -> None:
        self.host = host
        self.operator = operator
        self._play = play

    def write_site_rules(self, text: str) -> None:
        """Write the administrator's file; an invalid one is refused."""
        self.host.exec(["install", "-m", "0440", "/dev/stdin", SITE], input=f"{text}\n")
        self.host.exec(["visudo", "-c"])

    def play_rules(self, **options: Any) -> Any:
        """Run the recipe's part that writes the rule and calls it."""
        only = (*tagged("trainer_operators"), "--limit", self.host.name)
        return self._play(*only, ansible_become_password="secret", **options)

    def reachable(self) -> dict[str, str]:
        """Return what `launch doctor` finds of the login."""
        return findings(self.operator, "reachable")[self.host.name]


@pytest.fixture(params=SUITES)
def station(
    lab: Lab, play: Play, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Station]:
    host = lab.add_host(f"s-{request.param}", request.param)
    install(lab, host)
    host.exec(["chpasswd"], input="ops:secret")
    host.exec(["rm", "/etc/sudoers.d/ops"])
    here = {host.name: COORDINATES}
    inventory = lab.write_inventory(tmp_path / "hosts.yml", {}, here, hosts=[host])
    yield Station(host, Operator(lab, tmp_path / "laptop", inventory), play)
    host.remove()


def test_no_rule_of_the_site_asks_the_operator_for_a_password(station: Station) -> None:
    station.host.exec(["mv", "/etc/sudoers.d/zz-motley", "/etc/sudoers.d/motley"])  # as it was
    station.write_site_rules(PASSWORD)
    found = station.reachable()
    assert found["status"] == "fail"
    assert "ops may not become motley there (sudo: a password is required)" in found["detail"]
    assert "connection lost" not in found["detail"]
    fallback = ("-e", f"motley_trainer_command=[{BESIDE}]")
    station.host.exec(["install", "-m", "0755", "/dev/stdin", BESIDE], input="")
    found = findings(station.operator, "reachable", *fallback)[station.host.name]
    assert found["detail"].startswith("as ops, plain sessions"), found

    assert changed(station.play_rules()) == {station.host.name: 2}
    assert station.host.exec(["test", "-e", "/etc/sudoers.d/motley"], check=False).returncode != 0
    again = station.play_rules()
    assert changed(again) == {station.host.name: 0}, changing_tasks(again)
    for rules in HARMLESS:
        station.write_site_rules(f"{PASSWORD}\n{rules}")
        found = station.reachable()
        assert found["status"] == "ok", (rules, found)
        assert found["detail"].startswith("as motley, systemd units"), (rules, found)


@pytest.mark.parametrize("case", LATER)
def test_a_rule_that_comes_later_is_named_by_the_recipe(station: Station, case: str) -> None:
    station.write_site_rules(PASSWORD)
    station.host.exec(["sh", "-c", LATER[case]])

    done = station.play_rules(fails=True)

    name = station.host.name
    assert f"{name}: ops cannot call" in done.stdout
    assert "launcher.agent` (sudo: a password is required)" in done.stdout
    assert "sudo -l -U ops" in done.stdout
    assert "may not become motley" in station.reachable()["detail"]


def test_units_that_sudo_refuses_are_a_warning(station: Station) -> None:
    station.write_site_rules(PASSWORD)
    refused = "ops ALL=(root) PASSWD: /usr/local/sbin/motley-unit"
    station.host.exec(["tee", "/etc/sudoers.d/zzz-site"], input=f"{refused}\n")
    found = station.reachable()
    assert found["status"] == "warn"
    assert "plain sessions" in found["detail"]
    assert "sudo refuses motley-unit: sudo: a password is required" in found["detail"]
    assert "--tags trainer" in found["remedy"]
    failed = station.play_rules(fails=True)
    assert "cannot call `sudo -n /usr/local/sbin/motley-unit`" in failed.stdout
