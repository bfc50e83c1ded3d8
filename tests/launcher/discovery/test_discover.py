"""`launch discover` on a real network: sshd, mDNS and links between namespaces. Needs root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.inventory.hosts import load_inventory
from tests.launcher.discovery.conftest import PROGRAMS, Lan
from tests.launcher.sshd import make_key
from tests.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.long
def test_from_an_empty_file_to_a_cluster_that_grows(lan: Lan, tmp_path: Path) -> None:
    first, second, third = lan.machines
    file = tmp_path / "mine.yml"
    first.announce()
    second.announce()
    tree, _ = lan.discover("--write", file)
    assert [host["name"] for host in tree["hosts"]] == ["m1", "m2"]
    for host, machine in zip(tree["hosts"], (first, second), strict=True):
        assert (host["address"], host["sources"]) == (machine.address, ["mDNS"])
        assert (host["hostname"], host["host_key"]) == (machine.name, machine.fingerprint)
        assert host["memory"] > 0
        assert host["free_disk"] > 0
        assert host["devices"]
        assert (
            "Motley is not installed at /opt/motley" in host["missing_reason"]
            or host["motley_version"]
        )
    (link,) = tree["links"]
    assert (link["source"], link["target"], link["problem"]) == ("m1", "m2", "")
    assert (
        0 < link["forward_rate"] < 400e6
    )  # shaped to 200 Mbit/s, with a burst that the shaper lets pass
    assert 0 < link["reverse_rate"] < 400e6
    coordinator = tree["proposal"]["coordinator"]
    assert coordinator["reason"].startswith("reaches every other host; its slowest link is ")

    hosts = load_inventory(file)
    assert [host.name for host in hosts] == ["m1", "m2"]
    assert [host.name for host in hosts if host.coordinator] == [coordinator["host"]]
    assert sum(host.student for host in hosts) == sum(host.teacher for host in hosts) == 1
    assert dict(hosts[0].link_rates)["m2"] == pytest.approx(link["forward_rate"], abs=1e6)
    assert f"# {coordinator['reason']}" in file.read_text()

    edited = file.read_text().replace("m1:", "m1:   # mine", 1).replace("/srv/motley", "/srv/other")
    file.write_text(edited)
    third.announce()
    tree, _ = lan.discover("--write", file, "--no-links")
    gone = [line for line in tree["diff"][2:] if line.startswith("-")]
    come = [line for line in tree["diff"][2:] if line.startswith("+")]
    assert gone == []
    assert [line.split(":")[0].strip("+ ") for line in come] == [
        "m3",
        "ansible_host",
        "ansible_user",
        "ansible_ssh_common_args",
    ]
    assert file.read_text().startswith(edited.rstrip("\n"))
    assert [host.name for host in load_inventory(file)] == ["m1", "m2", "m3"]

    tree, _ = lan.discover("--write", file, "--no-links", "--no-mdns")  # by the file alone
    assert tree["diff"] == []
    assert [host["sources"] for host in tree["hosts"]] == [["inventory"]] * 3
    program = [str(PROGRAMS / "ansible-inventory"), "-i", str(file), "--host", "m3"]
    shown = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert f'"ansible_host": "{third.address}"' in shown.stdout


@pytest.mark.long
def test_a_machine_that_vanishes_and_one_with_another_key(lan: Lan, tmp_path: Path) -> None:
    first, second, _ = lan.machines
    file = tmp_path / "mine.yml"
    lan.discover(first.address, second.address, "--no-mdns", "--no-links", "--write", file)
    before = file.read_bytes()
    assert [host.name for host in load_inventory(file)] == ["m1", "m2"]
    second.end("sshd")
    tree, said = lan.discover("--no-mdns", "--no-links", "--write", file, code=3)
    assert said.startswith(f"launch: host m2: {second.address} port 22 refused the connection")
    assert [host["name"] for host in tree["hosts"]] == ["m1"]
    assert file.read_bytes() == before

    second.serve(lan.key)
    lan.known_hosts.write_text(first.known_line)  # and a key of its own that it is known by
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
    lan.known_hosts.write_text(f"{first.known_line}{second.address} {' '.join(other)}\n")
    known = lan.known_hosts.read_bytes()
    second.announce()
    for flags in ((), ("--no-mdns", "--write", file)):
        tree, said = lan.discover(first.address, "--no-links", *flags, code=3)
        assert f"host m2: ITS HOST KEY HAS CHANGED: {lan.known_hosts}:2" in said
        assert second.fingerprint in said
        assert [host["name"] for host in tree["hosts"]] == ["m1"]
    assert file.read_bytes() == before
    assert lan.known_hosts.read_bytes() == known


def test_strangers_are_named_and_left_alone(lan: Lan) -> None:
    first, second, third = lan.machines
    keys = third.folder / "authorized_keys"
    kept = keys.read_bytes()
    keys.write_bytes(b"")
    lan.known_hosts.write_text(first.known_line + third.known_line)
    for machine in lan.machines:
        machine.announce()
    tree, said = lan.discover("--no-links")
    assert said == ""
    assert [host["name"] for host in tree["hosts"]] == ["m1"]
    refused = {one["name"]: one["error"] for one in tree["refused"]}
    assert refused["m2"].startswith(f"host m2: its host key {second.fingerprint} (ED25519) is not")
    assert "then accept it: --accept-new-host-keys" in refused["m2"]
    assert "refused (offered: " in refused["m3"]
    keys.write_bytes(kept)

    lan.discover("--accept-new-host-keys", code=2)
    assert second.address not in lan.known_hosts.read_text()
    tree, _ = lan.discover(second.address, "--accept-new-host-keys")  # this one, and nobody else
    assert [host["name"] for host in tree["hosts"]] == ["m2"]
    assert second.known_line.split()[2] in lan.known_hosts.read_text()


def test_two_machines_with_one_key(lan: Lan, tmp_path: Path) -> None:
    first, second, _ = lan.machines
    own = {name: (second.folder / name).read_bytes() for name in ("host", "host.pub")}
    second.end("sshd")
    for name in own:
        (second.folder / name).write_bytes((first.folder / name).read_bytes())
    second.serve(lan.key)
    lan.known_hosts.write_text(first.known_line + second.known_line)
    file = tmp_path / "mine.yml"
    addresses = (first.address, second.address)
    _, said = lan.discover(*addresses, "--no-mdns", "--write", file, code=4)
    assert said.startswith(
        f"launch: hosts m1, m2: different machines with one host key {first.fingerprint}"
    )
    assert not file.exists()
    second.end("sshd")
    for name, content in own.items():
        (second.folder / name).write_bytes(content)
    second.serve(lan.key)


def test_no_link_between_two_machines(lan: Lan, tmp_path: Path) -> None:
    first, second, third = lan.machines
    first.run(f"ip route add unreachable {second.address}/32")
    second.run(f"ip route add unreachable {first.address}/32")
    file = tmp_path / "mine.yml"
    addresses = [machine.address for machine in lan.machines]
    tree, said = lan.discover(*addresses, "--no-mdns", "--write", file, code=4)
    first.run(f"ip route del unreachable {second.address}/32")
    second.run(f"ip route del unreachable {first.address}/32")
    assert said == ("launch: no link between m1 and m2: m2 has no route to an address of m1\n")
    assert [bool(link["problem"]) for link in tree["links"]] == [True, False, False]
    assert tree["proposal"]["coordinator"]["host"] == third.name
    (head,) = (host for host in load_inventory(file) if host.coordinator)
    assert {name for name, _ in head.link_rates} == {"m1", "m2"}


def test_three_machines_do_not_collide_with_themselves(lan: Lan) -> None:
    """Each listens at the same port in the round after it listened for another one."""
    tree, _ = lan.discover(*(machine.address for machine in lan.machines), "--no-mdns")
    assert [link["problem"] for link in tree["links"]] == ["", "", ""]


def test_a_port_in_use_is_no_missing_link(lan: Lan) -> None:
    """The host whose port another program has is not ruled out by links that were not tried."""
    first, *_ = lan.machines
    first.hold(9000)
    try:
        addresses = [machine.address for machine in lan.machines]
        tree, said = lan.discover(*addresses, "--no-mdns", code=4)
    finally:
        first.end("holder")
    assert "the link is not measured between m1 and m2: host m1: port 9000" in said
    assert "no link between" not in said
    assert [link["unknown"] for link in tree["links"]] == [True, True, False]
    assert "1 not measured" in tree["proposal"]["coordinator"]["reason"]


def test_many_names_without_an_address_cost_one_wait(lan: Lan) -> None:
    first, *_ = lan.machines
    first.announce(without_address=400)
    tree, said = lan.discover("--no-links", code=3, seconds=60)
    assert [host["name"] for host in tree["hosts"]] == ["m1"]
    assert "mDNS: 401 names are announced, the first 256 were read" in said


HOLD = (
    "import socket as s; h = s.socket(s.AF_INET, s.SOCK_DGRAM); h.bind(('', 5353)); print(input())"
)


def test_mdns_that_another_program_blocks(lan: Lan) -> None:
    first, *_ = lan.machines
    with lan.operating([sys.executable, "-c", f"print('held', flush=True); {HOLD}"]) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        wait_for(lambda: lan.udp_port_is_taken(5353), "the port is held")
        tree, said = lan.discover(first.address, "--no-links", code=3)
        assert [host["name"] for host in tree["hosts"]] == ["m1"]
        why = "mDNS is blocked on 10.77.91.1: Address already in use"
        assert said == f"launch: {why}; give addresses, or --no-mdns\n"
        _, said = lan.discover("--no-links", code=3)
        assert said.startswith(f"launch: no machine found: {why}; give addresses")


@pytest.mark.needs("nft")
def test_mdns_that_a_firewall_drops(lan: Lan) -> None:
    """Silence would prove nothing: what this machine asks has to come back to it."""
    first, *_ = lan.machines
    first.announce()
    lan.operate("nft add table ip t")
    lan.operate("nft add chain ip t in { type filter hook input priority 0 ; }")
    lan.operate("nft add rule ip t in udp dport 5353 drop")
    try:
        _, said = lan.discover(code=3)
        assert "a firewall drops UDP port 5353" in said
    finally:
        lan.operate("nft delete table ip t")
