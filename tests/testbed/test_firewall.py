"""A host that drops what nobody asked for: its ports open to the cluster, and to nobody else.

One host is coordinator and NFS server, as in the reference inventory; connections are real. What
listens there stands in for both services, so no other role need run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.testbed.conftest import NewHost
from tests.testbed.firewalls import switch_nftables_on, switch_ufw_on
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.plays import changed, changing_tasks, tagged
from tests.testbed.processes import Completed, run

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]

PORTS = NFS, COORDINATOR, MOVED, OTHER, RING = 2049, 9000, 9001, 8000, 40000
"""The last is one that the kernel may pick."""
PATIENCE = {True: 30, False: 2}
"""Seconds for a connection that should come about, and for one whose packets are dropped."""
CONNECT = (
    "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), int(sys.argv[3]))"
)


@pytest.mark.parametrize(
    ("switch_on", "restarts"),
    [
        (switch_nftables_on, [["reload", "nftables"], ["restart", "nftables"]]),
        (switch_ufw_on, [["restart", "ufw"]]),
    ],
    ids=["nftables", "ufw"],
)
def test_ports_are_open_to_the_cluster_only(
    lab: Lab,
    new_host: NewHost,
    tmp_path: Path,
    switch_on: Callable[[Host], None],
    restarts: list[list[str]],
) -> None:
    wall, peer = new_host(name="wall"), new_host(name="peer")
    switch_on(wall)
    listen = [f"--socket-property=ListenStream={wall.ip}:{port}" for port in PORTS]
    wall.exec(["systemd-run", "--quiet", *listen, "sleep", "infinity"])

    def play(*arguments: str, port: int = COORDINATOR, ring: bool = False) -> Completed:
        variables = {"share_server": "wall", "motley_port": port, "trainer_open_ring": ring}
        inventory = lab.write_inventory(
            tmp_path / "hosts.yml", variables, {"wall": {"motley_coordinator": True}}
        )
        program = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory)]
        return lab.run([*program, "--limit", "wall", *arguments], cwd=ROOT, timeout=300)

    def only_open(*wanted: int) -> None:
        """Prove that the peer gets in at these ports alone, and the operator's machine nowhere."""
        for port in PORTS:
            seconds = str(PATIENCE[port in wanted])
            connect = ["python3", "-c", CONNECT, wall.ip, str(port), seconds]
            came_in = run(peer.command(connect), check=False).returncode == 0
            assert came_in == (port in wanted), port
        stranger = ["python3", "-c", CONNECT, wall.ip, str(NFS), str(PATIENCE[False])]
        assert lab.run(stranger, check=False).returncode != 0

    both = tagged("share_firewall", "trainer_firewall")

    assert changed(play(*both, "--check", "--diff"))["wall"] > 0
    only_open()

    play(*both)
    only_open(NFS, COORDINATOR)
    again = play(*both)
    assert changed(again) == {"wall": 0}, changing_tasks(again)
    play(*both, ring=True)
    only_open(NFS, COORDINATOR, RING)
    for command in restarts:
        wall.exec(["systemctl", *command])
    only_open(NFS, COORDINATOR, RING)

    play(*both, port=MOVED)
    only_open(NFS, MOVED)

    play(*both, port=MOVED, ring=True)
    play("recipes/reset.yml", "--tags", "share")
    only_open(MOVED, RING)
    play("recipes/reset.yml", "--tags", "trainer")
    only_open()
    assert wall.exec(["find", "/etc", "/usr/local", "-xdev", "-iname", "*firewall*"]).stdout == ""
