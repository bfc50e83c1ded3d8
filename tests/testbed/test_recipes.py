"""The recipes on bare hosts: they converge, say truthfully what they would do, and can be undone.

torch is left out here (`trainer_extras: coordinator`), which saves minutes a host.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.conftest import COORDINATES, NewHost, Play
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plays import changed, changing_tasks, tagged
from tests.testbed.processes import Completed, wait_until
from tests.testbed.training import PROGRAMS, Operator

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1800)]

RECIPE, RESET = "recipes/gpu-training.yml", "recipes/reset.yml"
UNIT = "motley-worker@demo-20261121-130000-7f3a:worker-2.service"
SIZE = 20_000_000
DROP_IN = "/etc/ssh/sshd_config.d/00-motley.conf"


@pytest.fixture(scope="module")
def head(lab: Lab, play: Play) -> Iterator[Host]:
    """Return a host with roles base and trainer, and a login `guest` that may only drive runs."""
    host = lab.add_host("provisioned")
    host.exec(["useradd", "--create-home", "--shell", "/bin/bash", "guest"])
    keys = [f"/home/{user}/.ssh/authorized_keys" for user in ("ops", "guest")]
    host.exec(["install", "-D", "--owner=guest", "--mode=600", *keys])
    only = ("--limit", host.name)  # other hosts of the lab are other tests'
    play(*tagged("base", "trainer"), *only, trainer_operators=["ops", "guest"])
    yield host
    host.remove()


def as_guest(host: Host, *argv: str) -> Completed:
    return host.exec(["sudo", "-n", *argv], user="guest", check=False)


def test_services_are_fenced_in(head: Host) -> None:
    for name in (UNIT, "motley-coordinator@demo:coordinator.service"):
        # Exit status 1 above the threshold, which is in tenths.
        head.exec(["systemd-analyze", "security", "--threshold=20", "--no-pager", name])
        head.exec(
            ["systemd-analyze", "verify", f"/etc/systemd/system/{name.split('@')[0]}@.service"]
        )


def test_operators_may_start_and_stop_runs_and_nothing_else(head: Host) -> None:
    agent = ["-u", "motley", "/opt/motley/current/bin/python", "-P", "-m", "launcher.agent"]
    assert as_guest(head, *agent).returncode == 0
    for command in (
        ["id"],
        ["systemctl", "start", UNIT],
        ["-u", "motley", "id"],
        ["-u", "motley", "/opt/motley/current/bin/python", "-c", "0"],
        [*agent, "more"],
        agent[2:],
    ):
        assert as_guest(head, *command).returncode != 0, command

    refused = as_guest(head, "/usr/local/sbin/motley-unit", "start", "ssh.service")
    assert (refused.returncode, refused.stderr) == (2, "motley-unit: not a unit of Motley\n")


def test_needrestart_leaves_units_alone(head: Host, play: Play) -> None:
    """By its own reading of its settings; Ubuntu 24.04 restarts what they do not except."""
    install = ["apt-get", "install", "--yes", "--no-install-recommends", "needrestart"]
    head.exec(["apt-get", "update"])
    head.exec(["env", "DEBIAN_FRONTEND=noninteractive", *install])
    play(*tagged("trainer_units"), "--limit", head.name)
    code = (
        "our %nrconf; do '/etc/needrestart/needrestart.conf'; my $rules = $nrconf{override_rc};"
        "for my $unit (@ARGV) {"
        "  my $kept = grep { $unit =~ $_ && !$rules->{$_} } keys %$rules;"
        '  print $unit, $kept ? " kept\\n" : " restarted\\n" }'
    )
    units = [UNIT, "motley-coordinator@demo:coordinator.service", "motley-share.service"]
    shown = head.exec(["perl", "-e", code, *units]).stdout.splitlines()
    assert shown == [f"{units[0]} kept", f"{units[1]} kept", f"{units[2]} restarted"]


def test_a_unit_is_there_until_it_is_stopped(head: Host) -> None:
    wanted = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
    for verb in ("stop", "kill"):
        assert as_guest(head, "/usr/local/sbin/motley-unit", "start", UNIT).returncode == 0
        assert head.exec(["test", "-L", wanted]).returncode == 0
        nice = head.exec(["systemctl", "show", "--value", "-p", "LimitNICE", UNIT]).stdout
        assert nice == "30\n", "down to 20 - 30"

        assert as_guest(head, "/usr/local/sbin/motley-unit", verb, UNIT).returncode == 0

        assert head.exec(["test", "-e", wanted], check=False).returncode != 0
        assert (
            head.exec(["systemctl", "list-units", "--all", "--plain", "--no-legend", UNIT]).stdout
            == ""
        )


def test_passwords_are_off_and_keys_work(lab: Lab, head: Host) -> None:
    settings = head.exec(["sshd", "-T"]).stdout.splitlines()
    assert {"passwordauthentication no", "kbdinteractiveauthentication no"} <= set(settings)
    assert lab.run(["ssh", head.ip, "true"]).returncode == 0


# --- the share without NFS -----------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "folders"), [("none", []), ("rsync", ["checkpoints", "logits"])])
def test_a_share_without_nfs(head: Host, play: Play, mode: str, folders: list[str]) -> None:
    only = (*tagged("share"), "--limit", "provisioned")
    settings = {"share_mode": mode, "share_operators": ["guest"]}
    assert changed(play(*only, **settings))["provisioned"] > 0
    again = play(*only, **settings)
    assert changed(again) == {"provisioned": 0}, changing_tasks(again)
    assert sorted(head.exec(["ls", "/srv/motley"], check=False).stdout.split()) == folders


@pytest.mark.parametrize("kind", ["logits", "checkpoints"])
def test_a_sync_that_is_killed_goes_on(lab: Lab, head: Host, tmp_path: Path, kind: str) -> None:
    """As somebody who has no rights but those of the roles; the test above set mode rsync."""
    variables = {**COORDINATES, "ansible_user": "guest"}
    inventory = lab.write_inventory(tmp_path / "hosts.yml", {}, {"provisioned": variables})
    operator = Operator(lab, tmp_path / "laptop", inventory)
    here, there = tmp_path / kind, Path("/srv/motley", kind)
    manifest = json.dumps({"files": {"weights": {"size": SIZE}}})
    if kind == "logits":  # from here
        here.mkdir()
        (here / "weights").write_bytes(os.urandom(SIZE))
        (here / "manifest.json").write_text(manifest)
        words = ("sync", "logits", str(here))
    else:
        make = f"mkdir {there}/demo; cd {there}/demo; cat > manifest.json"
        make += f"; head -c {SIZE} /dev/urandom > weights"
        head.exec(["sh", "-c", make], user="motley", input=manifest)
        words = ("sync", "checkpoints", "--output", str(here))

    def size(name: str) -> int:
        """Return the size of a file on the receiving side, 0 if there is none."""
        which = ["-name", name, "-not", "-path", "*/.fetched*", "-printf", "%s"]
        if kind == "logits":
            return int(head.exec(["find", str(there), *which]).stdout or 0)
        return int(lab.run(["find", str(here), *which], check=False).stdout or 0)

    head.shape("40mbit")
    command = lab.command([str(PROGRAMS / "launch"), *words], env=operator.environment)
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_until(lambda: size(".weights.*") > SIZE // 4, 120, "nothing arrives")
        os.killpg(process.pid, signal.SIGTERM)
    wait_until(lambda: size("weights") > 0, 120, "what has arrived is not kept")
    kept = size("weights")
    assert size("manifest.json") == 0

    head.shape(None)
    assert operator.json(*words)["hosts"][0]["sent_bytes"] < SIZE - kept // 2

    assert size("manifest.json") == len(manifest)
    own = hashlib.sha256(next(here.rglob("weights")).read_bytes()).hexdigest()
    sums = ["find", str(there), "-name", "weights", "-exec", "sha256sum", "{}", "+"]
    assert head.exec(sums).stdout.split()[0] == own


# --- sshd: whatever happens, the operator still gets in ------------------------------------------


def test_no_key_no_hardening(new_host: NewHost, play: Play) -> None:
    """The connection of the play is open; a fresh one would need a password."""
    host = new_host(name="locked")
    hide = ["mv", "/home/ops/.ssh/authorized_keys", "/home/ops/.ssh/kept"]
    base = (*tagged("base_sshd"), "--limit", "locked")
    stays_open = {
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=yes",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": "/run/locked",
    }
    play("recipes/gpu-training.yml", "--tags", "validate", "--limit", "locked", env=stays_open)
    host.exec(hide)

    done = play(*base, fails=True, env=stays_open)

    assert "locked: base_manage_sshd: ops@" in done.stdout
    assert "does not get in with a key" in done.stdout
    assert host.exec(["test", "-e", DROP_IN], check=False).returncode != 0
    assert "passwordauthentication yes" in host.exec(["sshd", "-T"]).stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Nonsense yes", "its configuration was refused"),
        # Written by somebody, never loaded: our reload would bring it into force.
        ("AuthorizedKeysFile none", "no longer gets in with a key"),
    ],
)
def test_hardening_is_taken_back(new_host: NewHost, play: Play, line: str, message: str) -> None:
    host = new_host(name="back")
    host.exec(["tee", "/etc/ssh/sshd_config.d/10-local.conf"], input=f"{line}\n")

    done = play(*tagged("base_sshd"), "--limit", "back", fails=True)

    assert "back: sshd is as it was before" in done.stdout
    assert host.exec(["test", "-e", DROP_IN], check=False).returncode != 0


# --- the whole recipe ----------------------------------------------------------------------------


def test_bare_hosts_converge_and_can_be_undone(lab: Lab, new_host: NewHost, play: Play) -> None:
    """One of each Debian: all roles but torch, with a Vulkan device that is the CPU."""
    suites = {"intel": "bookworm", "lambda": "trixie"}
    hosts = [new_host(suite, name=name, nspawn=[AUTOFS]) for name, suite in suites.items()]
    for host in hosts:
        install_client(host)
    limit = ("--limit", "intel:lambda")
    data = ["/var/lib/motley/runs/old/plan.json", "/srv/motley/logits/teacher.parquet"]
    settings: dict[str, object] = {
        "share_server": "intel",
        "share_protocols": [3, 4],
        "base_open_files": 4096,
        "vulkan_allow_software": True,
    }

    first = play(RECIPE, *limit, **settings)
    assert all(changed(first)[host.name] > 0 for host in hosts)

    for arguments in ((), ("--check", "--diff")):
        again = play(RECIPE, *limit, *arguments, **settings)
        assert changed(again) == {"intel": 0, "lambda": 0}, changing_tasks(again)

    # Check mode tells the truth about a difference, too, and does not make it.
    told = play(
        *tagged("base"), *limit, "--check", "--diff", **{**settings, "base_open_files": 8192}
    )
    assert changed(told) == {"intel": 1, "lambda": 1}, changing_tasks(told)
    assert "-motley - nofile 4096\n+motley - nofile 8192" in told.stdout
    assert "4096" in hosts[0].exec(["cat", "/etc/security/limits.d/motley.conf"]).stdout

    for path in data:
        hosts[0].exec(["runuser", "-u", "motley", "--", "mkdir", "-p", str(Path(path).parent)])
        hosts[0].exec(["runuser", "-u", "motley", "--", "tee", path], input="kept")
    undone = play(RESET, *limit, **settings)
    assert all(changed(undone)[host.name] > 0 for host in hosts)
    for path in data:
        assert hosts[0].exec(["cat", path]).stdout == "kept"
    for host in hosts:
        places = ["/etc", "/usr/local", "/opt", "-xdev"]
        found = host.exec(["find", *places, "-iname", "*motley*"]).stdout
        assert found == ""
        assert host.exec(["getent", "passwd", "motley"], check=False).returncode == 2
        assert (
            host.exec(["grep", "-i", "motley", "/etc/hosts", "/etc/fstab"], check=False).stdout
            == ""
        )
        assert lab.run(["ssh", host.ip, "sudo -n true"]).returncode == 0
    again = play(RESET, *limit, **settings)
    assert changed(again) == {"intel": 0, "lambda": 0}, changing_tasks(again)


def test_reset_refuses_while_a_run_is_active(new_host: NewHost, play: Play) -> None:
    host = new_host(name="busy")
    unit = ["--unit=motley-worker@demo:worker-0.service", "sleep", "infinity"]
    host.exec(["systemd-run", *unit])

    done = play(RESET, "--limit", "busy", fails=True)

    assert "busy: a run is active (motley-worker@demo:worker-0.service" in done.stdout
    assert changed(done) == {"busy": 0}
