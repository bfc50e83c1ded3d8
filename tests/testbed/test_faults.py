"""What a home does to a cluster, one fault after the other, to one run that goes on through all.

Each test leaves the run whole for the next one: three ranks that take part in every step. Repeated
(README.md), each round of tests has a run of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.testbed.training import (
    STATE,
    Cluster,
    Operator,
    Running,
    leftovers,
    up_flags,
    verified,
)

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def going(cluster: Cluster) -> Iterator[list[Running]]:
    """Return a place for the run that goes on; empty before the first test and after an end."""
    yield []
    cluster.operator.launch("cluster", "down", check=False)


@pytest.fixture
def run(cluster: Cluster, going: list[Running]) -> Running:
    """Return the run that goes on, whole."""
    if not going:
        going.append(Running.start(cluster))
    going[0].wait_whole()
    return going[0]


def test_a_cut_cable(cluster: Cluster, run: Running) -> None:
    """Whoever is behind it is fenced off and comes back; status tells meanwhile."""
    losses, returns = len(run.events("lost", rank=1)), len(run.events("rejoined", rank=1))
    cluster.w1.cut()
    run.wait_event("lost", since=losses, rank=1)
    run.wait_steps()
    began = time.monotonic()
    run.wait_status(coordinator="running", worker_1="unreachable", worker_2="running")
    print(f"status beside a host that is away: {time.monotonic() - began:.1f} s")
    cluster.w1.heal()
    run.wait_event("rejoined", since=returns, rank=1)
    run.wait_whole()
    run.check()


def test_a_reboot_of_a_workers_host(cluster: Cluster, run: Running) -> None:
    """Its unit comes back by itself, and the worker joins again."""
    returns = len(run.events("rejoined", rank=1))
    cluster.w1.reboot()
    run.wait_event("rejoined", since=returns, rank=1)
    run.wait_whole()
    worker = run.wait_status(worker_1="running")["processes"][2]
    assert worker["name"] == "worker-1"
    assert worker["attempt"] >= 2
    run.check()


def test_a_power_cut_after_which_the_checkpoints_are_gone(cluster: Cluster, run: Running) -> None:
    """The coordinator's unit comes back and asks for them, rather than to begin at step 0."""
    run.wait_event("checkpoint", since=len(run.events("checkpoint")))
    resumed, at = len(run.events("resumed")), run.events("checkpoint")[-1]["step"]
    folder = f"/srv/motley/checkpoints/{run.run_id}"
    cluster.head.crash()
    # Over NFS: the server remembers for a minute what it showed, and is not told of a local `mv`.
    cluster.w1.exec(["mv", folder, f"{folder}-elsewhere"], user="motley")
    cluster.head.start()
    cluster.head.wait_booted()

    def names_the_folder() -> bool:
        logs = cluster.operator.launch("logs", "coordinator", check=False).stdout
        return f"{folder}: is missing, though" in logs

    run.wait(names_the_folder, "the coordinator names the folder")
    missing = cluster.w2.exec(["test", "-e", folder], check=False)
    assert missing.returncode != 0, "nothing was begun there"
    cluster.w1.exec(["mv", f"{folder}-elsewhere", folder], user="motley")
    assert run.wait_event("resumed", since=resumed)["step"] >= at
    run.wait_whole()
    run.check()


def test_training_needs_neither_ssh_nor_the_launcher(cluster: Cluster, run: Running) -> None:
    watching = cluster.operator.start("status", "--watch")
    following = cluster.operator.start("logs", "worker-1", "-f")
    for host in cluster.hosts:
        host.exec(["systemctl", "stop", "ssh.socket", "ssh.service"], check=False)
        host.exec(["pkill", "-x", "sshd"], check=False)
    for view in (watching, following):
        view.kill()
        view.communicate(timeout=60)
    at = run.step
    run.wait_steps(5)
    blind = cluster.operator.launch("status", check=False)
    assert blind.returncode == 3
    assert len(blind.stderr.splitlines()) <= 1 + len(cluster.hosts)
    for host in cluster.hosts:
        host.exec(["systemctl", "start", "ssh.service"])
    tree = run.wait_status(coordinator="running")
    assert tree["training"]["step"] > at
    assert tree["processes"][0]["attempt"] == 1


def test_a_full_disk_on_the_coordinators_host(cluster: Cluster, run: Running) -> None:
    """Its log of metrics and its status stop; the training and the checkpoints do not."""
    filler = f"{STATE}/filler"
    cluster.head.exec(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], check=False)
    used = cluster.head.exec(["df", "--output=pcent", STATE]).stdout.split()[-1]
    assert used == "100%"
    pointer = f"/srv/motley/checkpoints/{run.run_id}/latest"

    def newest() -> str:
        return cluster.w2.exec(["readlink", pointer]).stdout.strip()

    before = newest()
    run.wait(lambda: newest() != before, "a checkpoint while the disk is full")
    cluster.head.exec(["rm", filler])
    at = run.step
    run.wait(lambda: run.step > at + 3, "metrics again")
    run.wait_status()
    assert not run.events("diverged")


def test_an_nfs_server_that_stops(cluster: Cluster, run: Running) -> None:
    """Training goes on, status answers, nothing is corrupt, and a later checkpoint is saved."""
    saved = len(run.events("checkpoint"))
    run.wait_event("checkpoint", since=saved)
    cluster.w2.exec(["systemctl", "kill", "--signal=SIGSTOP", "nfs-ganesha"])
    try:
        run.wait_steps(40)  # two checkpoints are due
        began = time.monotonic()
        run.wait_status()
        print(f"status beside a dead NFS server: {time.monotonic() - began:.1f} s")
    finally:
        cluster.w2.exec(["systemctl", "kill", "--signal=SIGCONT", "nfs-ganesha"])
    saved = len(run.events("checkpoint"))
    run.wait_event("checkpoint", since=saved)
    assert verified(cluster.w2, f"/srv/motley/checkpoints/{run.run_id}")


def test_a_changed_host_key(cluster: Cluster, run: Running) -> None:
    """Refused in one line, also by whoever accepts keys of new hosts."""
    key = "/etc/ssh/ssh_host_ed25519_key"
    host = cluster.w1
    host.exec(["cp", "-a", key, f"{key}.pub", "/root/"])
    host.exec(["rm", key, f"{key}.pub"])
    try:
        host.exec(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
        host.exec(["systemctl", "restart", "ssh.service"])
        for flags in ((), ("--accept-new-host-keys",)):
            refused = cluster.operator.launch("doctor", *flags, "--json", check=False)
            assert refused.returncode in (3, 4)
            assert "w1" in refused.stdout + refused.stderr
            assert "ITS HOST KEY HAS CHANGED" in refused.stdout + refused.stderr
    finally:
        host.exec(
            [
                "cp",
                "-a",
                "/root/ssh_host_ed25519_key",
                "/root/ssh_host_ed25519_key.pub",
                "/etc/ssh/",
            ]
        )
        host.exec(["systemctl", "restart", "ssh.service"])
    run.wait_status()


def test_a_second_start_and_a_skewed_wheel_are_refused(cluster: Cluster, run: Running) -> None:
    other = cluster.another_operator("second")
    busy = other.launch("cluster", "up", *up_flags(), check=False)
    assert busy.returncode == 4
    assert f"the cluster is busy: run {run.run_id} is running" in busy.stderr

    find = ["find", "/opt/motley/current/lib/", "-path", "*/launcher/__init__.py"]
    code = cluster.w1.exec(find).stdout.strip()
    whole = cluster.w1.exec(["cat", code]).stdout
    try:
        cluster.w1.exec(["tee", code], input=f"{whole}\n# another version\n")
        done = cluster.operator.launch("doctor", "--json", check=False)
        assert done.returncode == 4
        checks, _ = json.JSONDecoder().raw_decode(done.stdout)
        failed = [check for check in checks["checks"] if check["status"] == "fail"]
        assert {check["name"] for check in failed} >= {"version"}
        assert any("launch cluster push" in check["remedy"] for check in failed)
    finally:
        cluster.w1.exec(["tee", code], input=whole)


def test_down_leaves_nothing_anywhere(cluster: Cluster, run: Running, going: list[Running]) -> None:
    run.check()
    going.clear()
    assert "no process is left" in cluster.operator.launch("cluster", "down").stdout
    assert {host.name: leftovers(host) for host in cluster.hosts} == {
        host.name: [] for host in cluster.hosts
    }


def test_of_two_operators_at_once_one_wins(cluster: Cluster) -> None:
    cluster.operator.launch("cluster", "down", "--all")
    operators: list[Operator] = [cluster.another_operator(name) for name in ("ann", "bob")]
    flags = up_flags("--set", "training.max_steps=5")
    starts = [operator.start("cluster", "up", *flags) for operator in operators]
    told = [start.communicate(timeout=300) for start in starts]
    codes = sorted(start.returncode for start in starts)
    assert codes == [0, 4], told
    loser = next(i for i, start in enumerate(starts) if start.returncode == 4)
    assert "another launch is starting a run" in told[loser][1] or "busy" in told[loser][1]
    cluster.operator.launch("cluster", "down", "--all")
    assert [leftovers(host) for host in cluster.hosts] == [[], [], []]


def test_a_slow_line(cluster: Cluster) -> None:
    """Shares follow the line: behind 50 Mbit/s a worker gets less, if anything; later more."""
    run = Running.start(cluster, "--set", "exchange.split=measured")

    def mean_share(count: int = 20) -> float:
        """Return the samples of rank 1 in the next steps, 0 where it takes part in none."""
        at = run.step
        run.wait(lambda: run.step >= at + count, f"{count} more steps")
        steps = [step for step in run.records("step") if step["step"] > at]
        return sum(step["worker_samples"].get("1", 0) for step in steps) / len(steps)

    before = run.wait(lambda: share if (share := mean_share()) > 2 else 0, "a share for rank 1")
    cluster.w1.shape("50mbit")
    try:
        run.wait(lambda: mean_share() < 0.7 * before, f"a smaller share than {before:.1f}")
    finally:
        cluster.w1.shape(None)
    run.wait(lambda: mean_share() > 0.8 * before, f"a share of {before:.1f} again")
    run.check()
    cluster.operator.launch("cluster", "down")
