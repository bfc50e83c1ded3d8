"""The test bed itself: hosts are real, links can be shaped and cut, and nothing stays behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.testbed.conftest import NewHost
from tests.testbed.errors import LabError
from tests.testbed.lab import Lab
from tests.testbed.processes import wait_until

pytestmark = pytest.mark.testbed


def reaches(lab: Lab, ip: str) -> bool:
    """Whether the operator's machine can log in to an address."""
    return lab.run(["ssh", "-o", "ConnectTimeout=2", ip, "true"], check=False).returncode == 0


def test_hosts_are_real_systems(lab: Lab, new_host: NewHost) -> None:
    twelve, thirteen = new_host("bookworm"), new_host("trixie")

    for host, version in ((twelve, "12"), (thirteen, "13")):
        told = lab.run(["ssh", host.name, ". /etc/os-release; echo $VERSION_ID; hostname; id -un"])
        assert told.stdout.split() == [version, host.name, "ops"]
        assert lab.run(["ssh", host.ip, "sudo -n id -u"]).stdout.strip() == "0"
        assert host.exec(["cat", "/proc/1/comm"]).stdout.strip() == "systemd"
        assert "sshd" in host.exec(["journalctl", "--unit=ssh", "--no-pager"]).stdout
    script = "echo > /dev/tcp/$1/22"
    assert twelve.exec(["bash", "-c", script, "-", thirteen.ip], check=False).returncode == 0


def test_a_changed_host_key_is_refused(lab: Lab, new_host: NewHost) -> None:
    host = new_host()
    assert reaches(lab, host.ip)
    key = "/etc/ssh/ssh_host_ed25519_key"
    host.exec(["rm", key, f"{key}.pub"])
    host.exec(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    host.exec(["systemctl", "restart", "ssh"])

    refused = lab.run(["ssh", host.ip, "true"], check=False)

    assert refused.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in refused.stderr


def test_packages_come_from_where_the_machine_has_them(new_host: NewHost) -> None:
    host = new_host("bookworm")
    host.exec(["apt-get", "-qq", "update"], timeout=120)
    install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "python3-venv"]
    host.exec(install, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=120)
    host.exec(["python3", "-m", "venv", "/srv/environment"])

    host.exec(["/srv/environment/bin/pip", "install", "--quiet", "six"], timeout=120)

    assert host.exec(["/srv/environment/bin/python", "-c", "import six"]).returncode == 0


def test_a_shaped_link_is_slow_both_ways(lab: Lab, new_host: NewHost) -> None:
    host = new_host()
    size, rate, burst = 4 << 20, 32e6, 256 << 10
    host.shape("32mbit")
    assert host.rate == "32Mbit"
    read = ["ssh", host.ip, f"head -c {size} /dev/zero"]
    write = ["ssh", host.ip, "wc -c"]

    for command, given in ((read, None), (write, "0" * size)):
        started = time.monotonic()
        told = lab.run(command, input=given).stdout
        took = time.monotonic() - started
        assert len(told) == size or int(told) == size
        # Only what tbf must hold back: a slow machine takes longer, none can be faster.
        assert took > 0.9 * (size - burst) * 8 / rate

    host.shape(None)
    assert host.rate is None


def test_a_cut_host_is_out_of_reach_until_healed(lab: Lab, new_host: NewHost) -> None:
    host, other = new_host(), new_host()

    host.cut()
    assert not host.linked
    assert not reaches(lab, host.ip)
    assert reaches(lab, other.ip)
    assert host.exec(["systemctl", "is-active", "ssh"]).stdout.strip() == "active"

    host.heal()
    assert host.linked
    # Not at once: a neighbour look-up that began while the cable was out fails first.
    wait_until(lambda: reaches(lab, host.ip), 20, "the healed host is not reachable")


def test_a_host_reboots_and_keeps_its_disk(lab: Lab, new_host: NewHost) -> None:
    host = new_host(volumes={"/var/lib/small": "20M"})
    boot = host.exec(["journalctl", "--list-boots", "--no-pager"]).stdout
    started = host.leader
    for folder in ("/etc", "/var/lib/small"):
        host.exec(["touch", f"{folder}/kept"])
    lab.run(["ssh", host.ip, "sudo systemctl reboot"], check=False)
    host.wait_rebooted(started)

    assert host.leader != started, boot
    host.exec(["ls", "/etc/kept", "/var/lib/small/kept"])
    assert reaches(lab, host.ip)


def test_power_can_be_lost_and_come_back(lab: Lab, new_host: NewHost) -> None:
    host = new_host()
    for off in (host.power_off, host.crash):
        off()
        assert not host.running
        assert not reaches(lab, host.ip)
        with pytest.raises(LabError, match="is off"):
            host.exec(["true"])
        host.start()
        host.wait_booted()
        assert reaches(lab, host.ip)


def test_disks_can_be_small(new_host: NewHost) -> None:
    host = new_host(disk="200M", volumes={"/var/lib/small": "5M"})
    for folder in ("/var/lib/small", "/srv"):
        full = host.exec(["dd", "if=/dev/zero", f"of={folder}/file", "bs=1M"], check=False)
        assert "No space left on device" in full.stderr
        host.exec(["rm", f"{folder}/file"])


def test_names_and_addresses_are_unique(lab: Lab, new_host: NewHost) -> None:
    host = new_host()
    with pytest.raises(LabError, match="taken"):
        lab.add_host(host.name)
    with pytest.raises(LabError, match="taken"):
        lab.add_host("other", ip=host.ip)
    with pytest.raises(LabError, match="suite jessie: there are bookworm, trixie"):
        lab.add_host("other", suite="jessie")
    assert host.name in lab.hosts
    assert "other" not in lab.hosts


def test_the_inventory_reaches_every_host(lab: Lab, new_host: NewHost, tmp_path: Path) -> None:
    names = [new_host().name, new_host("trixie").name]
    inventory = lab.write_inventory(tmp_path / "hosts.yml", groups={"cluster": names})

    done = lab.run(["ansible", "-i", inventory, "cluster", "-m", "ping", "-o"], cwd=tmp_path)

    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == names
    assert done.stdout.count("SUCCESS") == 2
