"""A recipe that is killed after each task that changed something arrives where it would have.

A play dies as soon as one task has changed something, and is called again until one comes to its
end: so the play is interrupted after every task once, and nothing that a task only remembered
(handlers, `is changed`) is ever done. A task that changed nothing leaves nothing to be lost. The
reference is a host of the same name and address that nothing interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.firewalls import switch_nftables_on
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plan import Plan
from tests.testbed.plays import changed, changing_tasks
from tests.testbed.state import differences, state

# Each of some fifty interruptions of the share is a play from its beginning, on two cores.
pytestmark = [pytest.mark.testbed, pytest.mark.timeout(7200)]

CALLBACKS = {
    "ANSIBLE_CALLBACK_PLUGINS": str(Path(__file__).with_name("callbacks")),
    "ANSIBLE_CALLBACKS_ENABLED": "killed_after_change",
}
RESET = "recipes/reset.yml"
ROLE = "recipes/gpu-training.yml --skip-tags validate --tags"
MOST = 80
"""Interruptions of one play: more means that a task changes something each time."""
FIRMWARE = "tests/testbed/firmware.yml"
Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What a role goes through: first steps, changed settings while daemons run, its reset."""

    hosts: dict[str, str]
    steps: list[Step]
    before: list[Step] = field(default_factory=list[Step])
    """Roles that are there already, uninterrupted."""
    make: Callable[[Host], None] | None = None


@dataclass(frozen=True)
class Place:
    """Where playbooks are called from."""

    lab: Lab
    checkout: Path
    folder: Path


def _two(host: Host) -> None:
    """A server behind nftables, a client; the account is there."""
    switch_nftables_on(host)
    host.exec(["groupadd", "--gid", "7100", "motley"])
    account = ["--uid", "7100", "--gid", "7100", "--home-dir", "/var/lib/motley"]
    host.exec(["useradd", *account, "--create-home", "motley"])
    if host.name == "reader":
        install_client(host)


def _initramfs(host: Host) -> None:
    """A kernel without modules, and the initramfs of it."""
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    host.exec(["apt-get", "-qq", "update"], timeout=300)
    install = ["apt-get", "-qq", "--yes", "--no-install-recommends", "install", "initramfs-tools"]
    host.exec(install, env=quiet, timeout=300)
    host.exec(["mkdir", "-p", "/lib/modules/6.1.0-1-test"])
    host.exec(["tee", "/boot/config-6.1.0-1-test"], input="CONFIG_RD_GZIP=y\n")
    host.exec(["update-initramfs", "-c", "-k", "6.1.0-1-test"], timeout=300)


SHARE: dict[str, Any] = {"share_server": "store", "share_protocols": [3, 4]}
MORE = {**SHARE, "share_clients": ["10.77.0.12", "10.77.0.99"], "share_mount_seconds": 20}
CASES = {
    "base": Case(
        {"node": "bookworm"},
        [
            (f"{ROLE} base", {}),
            (f"{ROLE} base", {"base_open_files": 4096}),
            (f"{RESET} --tags base", {}),
        ],
    ),
    "share": Case(
        {"store": "bookworm", "reader": "trixie"},
        [
            (f"{ROLE} share", SHARE),
            (f"{ROLE} share", MORE),
            (f"{RESET} --tags share", MORE),
        ],
        make=_two,
    ),
    "trainer": Case(
        {"node": "trixie"},
        [
            (f"{ROLE} trainer", {}),
            (f"{ROLE} trainer", {"motley_port": 9001}),
            (f"{RESET} --tags trainer", {}),
        ],
        before=[(f"{ROLE} base", {})],
        make=switch_nftables_on,
    ),
    "nvidia": Case(
        {"node": "bookworm"},
        [("tests/testbed/driver.yml", {}), (f"{RESET} --tags nvidia", {})],
        make=_initramfs,
    ),
    "vulkan": Case(
        {"node": "bookworm"},
        [
            (FIRMWARE, {}),
            (f"{ROLE} vulkan", {"vulkan_allow_software": True}),
            (f"{RESET} --tags vulkan", {}),
        ],
        before=[(f"{ROLE} base", {})],
    ),
}


@pytest.mark.parametrize("role", CASES)
def test_a_role_that_is_interrupted_after_every_task(
    lab: Lab, checkout: Path, tmp_path: Path, role: str
) -> None:
    case = CASES[role]
    at = Place(lab, checkout, tmp_path)
    addresses = lab.free_addresses(len(case.hosts))

    def walk(killed: bool) -> list[dict[str, list[str]]]:
        """Return the state of each host after each step."""
        plans = [
            Plan(name, ip, suite=suite, nspawn=[AUTOFS])
            for (name, suite), ip in zip(case.hosts.items(), addresses, strict=True)
        ]
        hosts = lab.add_hosts(plans)
        states: list[dict[str, list[str]]] = []
        try:
            for host in hosts:
                if case.make is not None:
                    case.make(host)
            for step in case.before:
                play(at, hosts, step)
            for step in case.steps:
                play(at, hosts, step, killed=killed)
                states.append({host.name: state(lab, host) for host in hosts})
        finally:
            for host in hosts:
                host.remove()
        return states

    expected, found = walk(killed=False), walk(killed=True)

    differ: dict[str, list[str]] = {}
    for (words, _), undisturbed, interrupted in zip(case.steps, expected, found, strict=True):
        for name, lines in undisturbed.items():
            print(f"{role}: {words}: {name}: {len(lines)} lines compared")
            differ[f"{len(differ)} {words}: {name}"] = differences(lines, interrupted[name])
    assert not any(differ.values()), differ


def play(at: Place, hosts: list[Host], step: Step, killed: bool = False) -> None:
    """Run a playbook to its end; one that was killed once more: that changes nothing."""
    words, variables = step
    settings = {"trainer_extras": "coordinator", "share_mode": "rsync"}
    if "share_server" in variables:
        del settings["share_mode"]
    inventory = at.lab.write_inventory(
        at.folder / "hosts.yml",
        {**settings, **variables},
        {hosts[0].name: {"motley_coordinator": True}},
        hosts=hosts,
    )
    program = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), *words.split()]
    killing = CALLBACKS if killed else {}
    for number in range(MOST):
        done = at.lab.run(program, cwd=at.checkout, env=killing, timeout=1200, check=False)
        if done.returncode == 0:
            break
        output = done.stdout[-4000:] + done.stderr[-1000:]
        assert killed, output
        assert done.returncode in (-9, 137), output
        print(f"killed {number}: {changing_tasks(done)}")
        assert changing_tasks(done), output
    else:
        raise AssertionError(f"{words}: still changes something: {changing_tasks(done)}")
    if killed:
        again = at.lab.run(program, cwd=at.checkout, timeout=1200)
        assert set(changed(again).values()) == {0}, changing_tasks(again)
