"""An exported run on two booted hosts with Debian's Slurm, and an environment by its own setup.sh.

The hosts share one folder, as the nodes of a cluster do; nothing of this machine's environment is
on them.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cluster.going_out import check_one_loss_curve
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.plan import Plan
from tests.testbed.processes import run, wait_until

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(5400)]

SHARED = "/cluster"
OPS = 1000
"""The user who may log in, the same on both hosts."""
CONFIG = """\
ClusterName=motley
SlurmctldHost=n1
SlurmUser=slurm
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr={first} CPUs=2
NodeName=n2 NodeAddr={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Two nodes; the first one controls, and is logged in to."""

    def __init__(self, lab: Lab, shared: Path) -> None:
        self.shared = shared
        bind = f"--bind={shared}:{SHARED}"
        first, second = lab.free_addresses(2)
        plans = [Plan("n1", first, nspawn=[bind]), Plan("n2", second, nspawn=[bind])]
        self.first, self.second = self.hosts = lab.add_hosts(plans)
        config = CONFIG.format(first=first, second=second)
        names = (
            f"127.0.0.1 localhost\n{first} n1\n{second} n2\n"  # no 127.0.1.1: ranks meet by name
        )
        key = secrets.token_bytes(512).hex()
        for host, daemons in ((self.first, "slurmctld slurmd"), (self.second, "slurmd")):
            write(host, "/etc/hosts", names)
            packages = f"munge python3-venv slurm-client {daemons}"
            install = "apt-get -qq update && apt-get -qq install -y --no-install-recommends "
            quiet = {"DEBIAN_FRONTEND": "noninteractive"}
            host.exec(["sh", "-c", install + packages], env=quiet, timeout=600)
            write(host, "/etc/slurm/slurm.conf", config)
            # It detects the machine's cgroups, where a host has others; nothing here uses them.
            write(host, "/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
            write(host, "/etc/munge/munge.key", key)
            host.exec(["chown", "munge:", "/etc/munge/munge.key"])
            host.exec(["chmod", "400", "/etc/munge/munge.key"])
            host.exec(["systemctl", "restart", "munge", *daemons.split()])
        wait_until(lambda: self.idle == ["n1", "n2"], 120, "the nodes are not idle")

    @property
    def idle(self) -> list[str]:
        """The nodes that take jobs."""
        listing = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        return sorted(self.first.exec(listing, check=False).stdout.split())

    def runs(self, folder: Path) -> None:
        """Take an exported folder to the cluster, follow its steps, and fetch its output."""
        there = self.shared / folder.name
        run(["rsync", "-a", f"--chown={OPS}:{OPS}", f"{folder}/", there])
        inside = f"cd {SHARED}/{folder.name}"
        self.first.exec(["sh", "-c", f"{inside} && sh setup.sh"], user="ops", timeout=3000)
        submit = f"{inside} && sbatch --wait job.sbatch"
        done = self.first.exec(["sh", "-c", submit], user="ops", timeout=600, check=False)
        said = "".join(log.read_text() for log in there.glob("slurm-*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + said
        for host in self.hosts:  # each has run a task of it
            ran = host.exec(["journalctl", "--unit=slurmd", "--no-pager"]).stdout
            assert "launch task StepId=" in ran, ran
        run(["rsync", "-a", f"{there}/output/", folder / "output"])


def write(host: Host, path: str, text: str) -> None:
    host.exec(["sh", "-c", f"mkdir -p $(dirname {path}) && cat > {path}"], input=text)


def test_a_run_goes_to_two_hosts_and_comes_back_with_one_loss_curve(
    lab: Lab,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = tmp_path_factory.mktemp("shared")
    shared.chmod(0o755)
    slurm = Slurm(lab, shared)
    try:
        check_one_loss_curve(tmp_path, "2 nodes x 1 CPU", slurm.runs, monkeypatch, capsys)
    finally:
        for host in slurm.hosts:
            host.remove()
