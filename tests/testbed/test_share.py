"""The share on two hosts: owners, everything that can break in between, rsync's narrow door.

The kernel here has no NFS: the server is nfs-ganesha, the client of nfs.py stands in for the
kernel's, behind the role's own units. Server on Debian 12 with a firewall, client on Debian 13.
What broke is whole again at the end of its test; the last test undoes the role.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests import ROOT
from tests.testbed.firewalls import switch_nftables_on
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plan import Plan
from tests.testbed.plays import changed, changing_tasks, tagged
from tests.testbed.processes import Completed, wait_until

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1800)]

CHECKPOINTS = "/srv/motley/checkpoints"
DOOR = ["/usr/bin/rsync", "--config=/etc/motley/rsyncd.conf", "--server", "--daemon", "."]
CHECK = "import json, launcher.agent.checks.shared_folder as s; f = s.check_share('/srv/motley'); "
CHECK += "print(json.dumps([f.status, f.detail]))"
SILENT = "/srv/motley: no answer within 4 s"
LOOK_AFTER = ["systemctl", "start", "motley-share.service"]  # as its timer does every minute
PATIENCE = 240.0
"""Seconds for what comes back by itself: a client's time-outs, TCP's ever rarer attempts."""


@dataclass
class Share:
    """Two hosts with the role, and a caller of playbooks on both."""

    lab: Lab
    server: Host
    client: Host
    play: Callable[..., Completed]

    def check(self) -> tuple[str, str]:
        """Ask the client as its agent would: the run user, within the check's own deadline."""
        argv = ["timeout", "--kill-after=1", "30", "python3", "-P", "-c", CHECK]
        environment = {"PYTHONPATH": "/srv/code"}
        done = self.client.exec(argv, user="motley", env=environment, timeout=40)
        status, detail = json.loads(done.stdout)
        return status, detail

    def write(self, path: str, text: str) -> None:
        """Write a file on the client as the run user."""
        self.client.exec(["tee", path], user="motley", input=text, timeout=PATIENCE)

    def read(self, path: str) -> str:
        """Read a file on the client as the run user."""
        return self.client.exec(["cat", path], user="motley", timeout=PATIENCE).stdout

    def wait_usable(self) -> None:
        """Wait until the check finds nothing wrong."""
        wait_until(lambda: self.check()[0] != "fail", PATIENCE, "the share does not come back")


@pytest.fixture(scope="module")
def share(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Share]:
    first, second = lab.free_addresses(2)
    hosts = lab.add_hosts(
        [Plan("store", first), Plan("reader", second, suite="trixie", nspawn=[AUTOFS])]
    )
    server, client = hosts
    switch_nftables_on(server)
    inventory = lab.write_inventory(
        tmp_path_factory.mktemp("inventory") / "hosts.yml",
        {"share_server": server.name, "share_protocols": [3, 4], "share_operators": ["guest"]},
        {server.name: {"motley_coordinator": True}},
        hosts=hosts,
    )

    def play(*arguments: str) -> Completed:
        program = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory)]
        done = lab.run([*program, *arguments], cwd=ROOT, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        return done

    for host in hosts:
        host.exec(["groupadd", "--gid", "7100", "motley"])
        account = ["--uid", "7100", "--gid", "7100", "--home-dir", "/var/lib/motley"]
        host.exec(["useradd", *account, "--create-home", "motley"])
        host.exec(["useradd", "--create-home", "guest"])
        code = host.folder / "root/srv/code"
        lab.inside("mkdir", code)
        lab.inside("cp", "--recursive", ROOT / "launcher", code)
    install_client(client)
    play(*tagged("share"))
    yield Share(lab, server, client, play)
    for host in hosts:
        host.remove()


def test_the_server_listens_on_the_network_of_the_cluster_alone(share: Share) -> None:
    listening = share.server.exec(["ss", "-H", "-ltn", "sport = 2049"]).stdout.split()[3]
    assert listening in (f"{share.server.ip}:2049", f"[::ffff:{share.server.ip}]:2049")


def test_owners_are_right_on_both_sides_and_root_is_nobody(share: Share) -> None:
    share.client.exec(["mkdir", f"{CHECKPOINTS}/demo"], user="motley")
    share.write(f"{CHECKPOINTS}/demo/a", "written on the client\n")
    share.client.exec(["ln", "-s", "demo", f"{CHECKPOINTS}/latest"], user="motley")

    assert share.server.exec(["cat", f"{CHECKPOINTS}/latest/a"]).stdout == "written on the client\n"
    for host in (share.server, share.client):
        owner = host.exec(["stat", "--format=%u:%g", f"{CHECKPOINTS}/demo/a"]).stdout.strip()
        assert owner == "7100:7100"
    by_root = share.client.exec(["touch", f"{CHECKPOINTS}/by-root"], check=False)
    assert by_root.returncode != 0


def test_the_check_finds_the_mount_and_measures_it(share: Share) -> None:
    status, detail = share.check()
    assert status in ("ok", "warn")
    assert f"{share.server.ip}:{CHECKPOINTS}" in detail


def test_a_server_that_dies_costs_a_line_and_comes_back_by_itself(share: Share) -> None:
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    share.server.exec(["systemctl", "stop", "nfs-ganesha"])

    status, detail = share.check()
    assert status == "fail", detail
    assert CHECKPOINTS.rpartition("/")[0] in detail

    share.server.exec(["systemctl", "start", "nfs-ganesha"])
    share.wait_usable()
    assert share.read(f"{CHECKPOINTS}/before") == "kept\n"


def test_a_cable_that_is_cut_while_a_file_is_written(share: Share) -> None:
    """Whoever writes is told after a while, whoever asks at once, and a cable is all it takes."""
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    share.client.shape("20mbit")  # the file takes minutes
    path = f"{CHECKPOINTS}/long"
    write = ["timeout", "--signal=KILL", str(PATIENCE)]
    write += ["dd", "if=/dev/zero", f"of={path}", "bs=64k", "count=8000", "conv=fsync"]
    command = share.client.command(write, user="motley")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as writer:
        size = ["find", CHECKPOINTS, "-name", "long", "-size", "+1M"]
        wait_until(lambda: share.server.exec(size).stdout != "", PATIENCE, "nothing is written")
        share.client.cut()

        status, detail = share.check()
        assert (status, detail[: len(SILENT)]) == ("fail", SILENT)
        assert "Connection timed out" in writer.communicate()[1]

    share.client.heal()
    share.client.shape(None)
    share.wait_usable()
    assert share.read(f"{CHECKPOINTS}/before") == "kept\n"
    share.write(path, "again\n")
    assert share.server.exec(["cat", path]).stdout == "again\n"


def test_handles_that_the_server_no_longer_knows_are_recovered(share: Share) -> None:
    """As when a server is installed anew and its data restored."""
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    share.server.exec(["systemctl", "stop", "nfs-ganesha"])
    share.server.exec(["cp", "--archive", CHECKPOINTS, "/srv/restored"])
    share.server.exec(["rm", "--recursive", CHECKPOINTS])
    share.server.exec(["mv", "/srv/restored", CHECKPOINTS])
    share.server.exec(["systemctl", "start", "nfs-ganesha"])

    def recovered() -> bool:
        share.client.exec(LOOK_AFTER, timeout=PATIENCE)
        said = share.client.exec(["journalctl", "--unit=motley-share", "--output=cat"]).stdout
        return "Stale file handle: remounting" in said

    wait_until(recovered, PATIENCE, "nobody noticed stale handles")
    share.wait_usable()
    assert share.read(f"{CHECKPOINTS}/before") == "kept\n"


def test_a_client_that_dies_is_replaced(share: Share) -> None:
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    share.client.exec(["pkill", "--signal", "KILL", "mount.nfs4"])
    assert share.check()[0] == "fail"

    assert share.client.exec(["systemctl", "is-active", "motley-share.timer"]).returncode == 0
    share.client.exec(LOOK_AFTER, timeout=PATIENCE)

    assert share.check()[0] != "fail"
    assert share.read(f"{CHECKPOINTS}/before") == "kept\n"


def test_after_a_reboot_the_mounts_are_there_when_they_are_used(share: Share) -> None:
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    share.client.reboot()
    assert share.read(f"{CHECKPOINTS}/before") == "kept\n"
    assert share.check()[0] != "fail"


def test_operators_may_call_rsync_in_one_way_only(share: Share) -> None:
    def sudo(*argv: str) -> Completed:
        return share.client.exec(["sudo", "-n", *argv], user="guest", check=False, input="")

    assert sudo("-u", "motley", *DOOR).stdout.startswith("@RSYNCD:")
    for refused in (
        ["-u", "motley", *DOOR[:-1], "/etc"],
        ["-u", "motley", "/usr/bin/rsync", "--config=/tmp/mine", *DOOR[2:]],
        ["-u", "motley", "/usr/bin/rsync", "--server", "--sender", "-r", ".", "/var/lib/motley"],
        DOOR,
    ):
        done = sudo(*refused)
        assert done.returncode != 0, refused
        assert "@RSYNCD" not in done.stdout


def test_reset_undoes_it_and_data_stays(share: Share) -> None:
    share.write(f"{CHECKPOINTS}/before", "kept\n")
    reset = ("recipes/reset.yml", "--tags", "share")
    names = [share.server.name, share.client.name]

    assert all(changed(share.play(*reset)).values())

    assert share.server.exec(["cat", f"{CHECKPOINTS}/before"]).stdout == "kept\n"
    assert share.server.exec(["ss", "-H", "-ltn", "sport = 2049"]).stdout == ""
    assert "motley" not in share.server.exec(["nft", "list", "ruleset"]).stdout
    assert "/srv/motley" not in share.client.exec(["cat", "/proc/self/mountinfo"]).stdout
    for host in (share.server, share.client):
        places = ["/etc", "/usr/local", "-xdev", "-iname", "*motley*"]
        assert host.exec(["find", *places, "-not", "-type", "d"]).stdout == ""
    again = share.play(*reset)
    assert changed(again) == dict.fromkeys(names, 0), changing_tasks(again)
