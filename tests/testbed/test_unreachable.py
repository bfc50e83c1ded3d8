"""A host that does not answer costs its own line; the others are set up completely."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed.conftest import COORDINATES, NewHost
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.nfs import AUTOFS, install_client
from tests.testbed.plays import changed, tagged
from tests.testbed.processes import Completed
from tests.testbed.training import RECIPE

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1800)]

CLOSED = {"ansible_host": "10.77.0.99", "ansible_port": 1}
NAMED = {"ansible_host": "localhost", "ansible_port": 1}
"""Whose address only its facts would tell."""


def play(
    at: tuple[Lab, Path, Path], host: Host, away: dict[str, Any], *arguments: str, **settings: Any
) -> Completed:
    """Run the recipe on one booted host and on hosts whose port is closed."""
    lab, checkout, folder = at
    leads = {} if any("motley_coordinator" in one for one in away.values()) else COORDINATES
    shared = {"trainer_extras": "coordinator", "share_protocols": [3, 4], **settings}
    path = lab.write_inventory(folder / "hosts.yml", shared, {host.name: leads}, hosts=[host])
    inventory = yaml.safe_load(path.read_text())
    inventory["all"]["hosts"].update(away)
    path.write_text(yaml.safe_dump(inventory, sort_keys=False))
    program = [sys.executable, "-m", "ansible", "playbook", "-i", str(path), *arguments]
    return lab.run(program, cwd=checkout, timeout=1200, check=False)


def outcome(done: Completed) -> tuple[int, set[str], set[str]]:
    """Return the exit code, and which hosts the recap calls unreachable and failed."""
    found = [
        set(re.findall(rf"^(\S+)\s+: .*{word}=[1-9]", done.stdout, re.MULTILINE))
        for word in ("unreachable", "failed")
    ]
    return done.returncode, found[0], found[1]


def words(done: Completed) -> str:
    """Return what was said, without the line ends that fold long messages."""
    return " ".join(done.stdout.split())


def test_the_others_are_set_up(lab: Lab, checkout: Path, new_host: NewHost, tmp_path: Path) -> None:
    at = lab, checkout, tmp_path
    host = new_host(name="intel", nspawn=[AUTOFS])
    install_client(host)
    peers = {"lambda": CLOSED, "mac": NAMED}

    done = play(at, host, peers, RECIPE, share_server="intel")

    assert outcome(done) == (4, {"lambda", "mac"}, set()), done.stdout[-6000:]
    assert "lambda, mac did not answer: the other hosts are set up, and leave out mac" in words(
        done
    )
    host.exec(["test", "-e", "/opt/motley/current/motley.json"])
    exports = host.exec(["cat", "/etc/ganesha/ganesha.conf"]).stdout
    assert f"Clients = {CLOSED['ansible_host']};" in exports


def test_a_server_that_does_not_answer_costs_no_proof_of_its_clients(
    lab: Lab, checkout: Path, new_host: NewHost, tmp_path: Path
) -> None:
    at = lab, checkout, tmp_path
    host = new_host(name="intel", nspawn=[AUTOFS])
    install_client(host)
    host.exec(["groupadd", "--gid", "7100", "motley"])
    account = ["--uid", "7100", "--gid", "7100", "--home-dir", "/var/lib/motley"]
    host.exec(["useradd", *account, "--create-home", "motley"])
    units = ["find", "/etc/systemd/system", "-name", "srv-motley-*.mount"]

    away = {"nas": {**NAMED, **COORDINATES}}
    done = play(at, host, away, *tagged("share"), share_server="nas")
    assert outcome(done) == (4, {"nas"}, set()), done.stdout[-6000:]
    assert "nas did not answer, and its address is unknown: the mounts stay" in words(done)
    assert host.exec(units).stdout == ""

    away = {"nas": {**CLOSED, **COORDINATES}}
    done = play(at, host, away, *tagged("share"), share_server="nas")
    assert outcome(done) == (4, {"nas"}, set()), done.stdout[-6000:]
    assert "nas did not answer: the mounts are written but not proven" in words(done)
    assert len(host.exec(units).stdout.split()) == 2

    # Nothing is changed with a wrong inventory; the reset, too, goes on without that host.
    done = play(at, host, away, RECIPE, share_server="nobody")
    assert "share_server must name a host of the inventory" in words(done)
    assert outcome(done) == (2, {"nas"}, {"intel"}), done.stdout[-6000:]
    assert changed(done)["intel"] == 0
    assert "TASK [base" not in done.stdout
    done = play(at, host, away, "recipes/reset.yml", "--tags", "share", share_server="nas")
    assert outcome(done) == (4, {"nas"}, set()), done.stdout[-6000:]
    assert host.exec(units).stdout == ""
