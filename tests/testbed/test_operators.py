"""Who drives the cluster: a login without rights, updates, logs over connections that break."""

from __future__ import annotations

import datetime
import json
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from tests.testbed.host import Host
from tests.testbed.plays import tagged
from tests.testbed.processes import wait_until
from tests.testbed.training import PATIENCE, ROOT, STATE, Cluster, Operator, Running, leftovers
from tests.testbed.training import up_flags as job

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]

CURRENT, PREVIOUS, VERSIONS = (
    f"/opt/motley/{name}" for name in ("current", "previous", "versions")
)


@pytest.fixture(scope="module")
def guest(cluster: Cluster) -> Iterator[Operator]:
    """Return somebody with a login of their own, who may do what `trainer_operators` may."""
    rule = "/etc/sudoers.d/zz-motley"
    known, key = (f"/home/{user}/.ssh/authorized_keys" for user in ("ops", "guest"))
    owned = ["install", "-D", "--owner=guest", "--mode=600", known, key]
    for host in cluster.hosts:
        host.exec(["useradd", "--create-home", "--shell", "/bin/bash", "guest"])
        host.exec(owned)
        host.exec(["cp", "-a", rule, "/root/rule"])
    operators = json.dumps({"trainer_operators": ["ops", "guest"]})
    cluster.operator.play(*tagged("trainer_operators"), "-e", operators)
    operator = cluster.another_operator("guest")
    inventory: dict[str, Any] = yaml.safe_load(operator.inventory.read_text())
    inventory["all"]["vars"]["ansible_user"] = "guest"
    own = operator.folder / "hosts.yml"
    own.write_text(yaml.safe_dump(inventory))
    operator.environment["MOTLEY_INVENTORY"] = str(own)
    yield operator
    for host in cluster.hosts:
        host.exec(["cp", "-a", "/root/rule", rule])
        host.exec(["userdel", "--remove", "guest"], check=False)


@pytest.fixture(scope="module")
def run(cluster: Cluster, guest: Operator) -> Iterator[Running]:
    """Return a run that the guest has started."""
    yield Running(cluster, guest.json("cluster", "up", *job()))
    guest.launch("cluster", "down")


@pytest.fixture(scope="module")
def developer(cluster: Cluster) -> Operator:
    """Return somebody who has changed a line, in a checkout of their own."""
    operator = cluster.another_operator("developer")
    checkout = operator.folder / "checkout"
    for package in ("launcher", "trainer"):
        shutil.copytree(ROOT / package, checkout / package)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    with (checkout / "launcher" / "__init__.py").open("a") as stream:
        stream.write(f"# a changed line, {secrets.token_hex(4)}\n")
    operator.environment["PYTHONPATH"] = str(checkout)
    return operator


def findings(operator: Operator, check: str, *flags: str) -> dict[str, dict[str, str]]:
    """Return what `launch doctor` finds of one kind, by host."""
    said = operator.launch("doctor", "--json", *flags, check=False).stdout
    tree, _ = json.JSONDecoder().raw_decode(said)
    return {found["host"]: found for found in tree["checks"] if found["name"] == check}


def skewed(operator: Operator) -> list[str]:
    """Return the hosts that have another version than somebody's launcher."""
    found = findings(operator, "version")
    assert set(found) == {"head", "w1", "w2"}
    return [host for host, check in found.items() if check["status"] == "fail"]


def versions(cluster: Cluster, link: str = CURRENT) -> dict[str, str]:
    """Return what a link shows on each host."""
    return {host.name: host.exec(["readlink", link]).stdout.strip() for host in cluster.hosts}


def test_inputs_that_are_there_are_not_sent_again(cluster: Cluster) -> None:
    paths = [str(cluster.folder / name) for name in ("data", "model")]
    tree = cluster.operator.json("sync", "inputs", *paths)
    assert {host["host"]: host["files"] for host in tree["hosts"]} == {"head": 0, "w1": 0, "w2": 0}
    content = sum(file.stat().st_size for path in paths for file in Path(path).iterdir())
    assert all(host["sent_bytes"] < content / 10 for host in tree["hosts"])


# --- a login that may drive runs and nothing else ---------------------------------------------


def test_a_login_with_the_narrow_rule_is_enough(cluster: Cluster, guest: Operator) -> None:
    for host in cluster.hosts:
        assert host.exec(["sudo", "-n", "true"], user="guest", check=False).returncode != 0
    reached = findings(guest, "reachable", *job())
    for host in cluster.hosts:
        assert reached[host.name]["status"] == "ok"
        assert reached[host.name]["detail"].startswith("as motley, systemd units")


def test_an_output_where_the_unit_may_not_write_is_refused_before_a_start(guest: Operator) -> None:
    """The agent says so, though nothing fences it in; no checkpoint has to fail first."""
    found = findings(guest, "unit", *job("--output", "/data/out"))
    assert found["head"]["status"] == "fail"
    assert found["head"]["detail"] == (
        "/data/out is read-only for motley-coordinator@.service, "
        "which writes below /var/lib/motley and /srv/motley"
    )
    assert found["w1"]["status"] == found["w2"]["status"] == "ok"


def test_a_run_of_the_guest_is_everybodys(cluster: Cluster, run: Running) -> None:
    run.wait_steps()
    assert run.wait_status()["run_id"] == run.run_id  # asked by the operator who is not the guest


# --- logs -------------------------------------------------------------------------------------


class Follower:
    """Somebody who looks at `launch logs -f`, as long as the run goes on."""

    def __init__(self, operator: Operator, *names: str) -> None:
        self._process = operator.start("logs", *names, "--follow")
        self.lines: list[str] = []
        self.notes: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pipes = ((self._process.stdout, self.lines), (self._process.stderr, self.notes))
        self._readers = [threading.Thread(target=_collect, args=pair) for pair in pipes]
        for reader in self._readers:
            reader.start()

    def attached(self) -> Follower | None:
        """Return this one once it shows something; None: it found the hosts too busy to answer."""
        ended = self._process.poll
        wait_until(lambda: bool(self.lines) or ended() is not None, PATIENCE, "no line at all")
        return self if self.lines else None

    def wait_for(self, line: str) -> None:
        wait_until(lambda: line in self.lines, PATIENCE, f"no line {line!r}")

    def end(self) -> None:
        """Wait until it ends by itself."""
        self._process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()


def _collect(pipe: IO[str], lines: list[str]) -> None:
    with pipe:
        for line in pipe:
            lines.append(line.removesuffix("\n"))


class Chatter:
    """A worker that says much: numbered lines, written as its process writes."""

    def __init__(self, run: Running, host: Host, name: str) -> None:
        self.name = name
        self._host = host
        self._log = f"{STATE}/runs/{run.run_id}/processes/{name}/attempt-1"

    def begin(self, word: str, count: int, pause: float = 0.0) -> subprocess.Popen[bytes]:
        """Begin to write `word 1` to `word COUNT`, so many seconds between them."""
        loop = f"for i in $(seq {count}); do echo {word} $i; sleep {pause}; done >> {self._log}.log"
        return subprocess.Popen(self._host.command(["sh", "-c", loop], user="motley"))

    def say(self, word: str, count: int) -> None:
        assert self.begin(word, count).wait(PATIENCE) == 0

    def lines(self) -> list[str]:
        return self._host.exec(["cat", f"{self._log}.log"]).stdout.splitlines()

    def marked(self) -> float:
        """Return the moment by which all of now is noted as written, in Unix seconds."""
        size = int(self._host.exec(["stat", "--format=%s", f"{self._log}.log"]).stdout)

        def noted() -> list[str]:
            marks = self._host.exec(["tail", "-1", f"{self._log}.times"]).stdout.split()
            return marks if int(marks[1]) >= size else []

        wait_until(lambda: bool(noted()), PATIENCE, f"no mark of {self.name} at {size}")
        return float(noted()[0])


@pytest.fixture
def talking(cluster: Cluster, run: Running) -> list[Chatter]:
    hosts = {"worker-1": cluster.w1, "worker-2": cluster.w2}
    return [Chatter(run, host, name) for name, host in hosts.items()]


def test_logs_of_several_workers_since_and_grep(
    guest: Operator, run: Running, talking: list[Chatter]
) -> None:
    def logs(*arguments: str) -> list[str]:
        def seen() -> list[str]:  # not its first answer, see `Running.wait_status`
            done = guest.launch("logs", *arguments, check=False)
            assert done.returncode in (0, 3), done.stderr
            return done.stdout.splitlines() if done.returncode == 0 else []

        return run.wait(seen, f"logs {arguments}")

    for chatter in talking:
        chatter.say("early", 12)
    moment = max(chatter.marked() for chatter in talking)
    for chatter in talking:
        chatter.say("late", 12)

    both = [chatter.name for chatter in talking]
    younger = logs(
        *both, "--since", datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat()
    )
    assert not [line for line in younger if "early" in line]
    late = [f"{name} | late {number}" for name in both for number in range(1, 13)]
    assert [line for line in younger if "late" in line] == late
    assert "early 1" in logs("worker-2", "--since", "1h")
    newest = logs("worker-1", "--tail", "8")  # a slow worker may have lines of its own behind it
    assert len(newest) == 8
    assert "late 12" in newest


def test_an_update_during_a_run_is_refused(
    cluster: Cluster, developer: Operator, run: Running
) -> None:
    before = versions(cluster)
    refused = developer.launch("cluster", "push", check=False)
    assert refused.returncode == 4
    said = [
        line for line in refused.stderr.splitlines() if "a run is active on head, w1, w2" in line
    ]
    assert len(said) == 1
    assert "launch cluster down" in said[0]
    assert versions(cluster) == before
    run.wait_steps()


def test_followed_lines_survive_a_restart_of_sshd(
    cluster: Cluster, guest: Operator, run: Running, talking: list[Chatter]
) -> None:
    """Lines that come while the connection is away are neither lost nor doubled."""
    names = [chatter.name for chatter in talking]
    follower = run.wait(lambda: Follower(guest, *names).attached(), "logs --follow")
    assert follower is not None
    writers = [chatter.begin("said", 400, pause=0.02) for chatter in talking]
    for seen in (50, 200):
        follower.wait_for(f"worker-2 | said {seen}")
        cluster.w2.exec(["systemctl", "stop", "ssh.service"])
        cluster.w2.exec(["pkill", "-x", "sshd"])  # the connections that were open
        cluster.w2.exec(["systemctl", "start", "ssh.service"])
    for chatter in talking:
        follower.wait_for(f"{chatter.name} | said 400")
    assert [writer.wait(PATIENCE) for writer in writers] == [0, 0]
    guest.launch("cluster", "down")
    follower.end()

    for chatter in talking:
        prefix = f"{chatter.name} | "
        shown = [line.removeprefix(prefix) for line in follower.lines if line.startswith(prefix)]
        assert shown == chatter.lines()
    lost = [note for note in follower.notes if not note.startswith("querying ")]
    assert "w1" not in "\n".join(lost)
    assert [leftovers(host) for host in cluster.hosts] == [[], [], []]


# --- updates ----------------------------------------------------------------------------------


def test_a_host_that_is_away_keeps_all_as_they_are(cluster: Cluster, developer: Operator) -> None:
    before = versions(cluster)
    cluster.w1.cut()
    try:
        refused = developer.launch("cluster", "push", check=False)
    finally:
        cluster.w1.heal()
    assert refused.returncode == 3
    assert "host w1" in refused.stderr
    assert "host w2" not in refused.stderr
    assert versions(cluster) == before


def test_a_push_that_one_host_cannot_follow_and_the_way_back(
    cluster: Cluster, developer: Operator
) -> None:
    before = versions(cluster)
    cluster.w1.exec(["chown", "root", VERSIONS])
    try:
        partial = developer.launch("cluster", "push", check=False)
    finally:
        cluster.w1.exec(["chown", "motley", VERSIONS])
    assert partial.returncode == 5
    assert "1 of 3 hosts were not updated: w1" in partial.stderr
    after = versions(cluster)
    assert after["w1"] == before["w1"]
    assert after["head"] == after["w2"] != before["head"]
    assert skewed(developer) == ["w1"]

    tree = developer.json("cluster", "push")
    assert {host["host"]: host["changed"] for host in tree["hosts"]} == {
        "head": False,
        "w1": True,
        "w2": False,
    }
    assert set(versions(cluster).values()) == {after["head"]}
    assert versions(cluster, PREVIOUS) == before
    assert skewed(developer) == []
    assert skewed(cluster.operator) == ["head", "w1", "w2"]

    developer.launch("cluster", "push", "--rollback")
    assert versions(cluster) == before
    assert skewed(cluster.operator) == []
