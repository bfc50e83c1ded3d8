"""`launch discover` on booted hosts that the recipe announces: they appear, vanish, change keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.conftest import NewHost, Play
from tests.testbed.lab import Lab
from tests.testbed.plays import tagged
from tests.testbed.processes import wait_until
from tests.testbed.training import PROGRAMS, ROOT

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1200)]

SERVICE = "/etc/avahi/services/motley.service"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, machine: None) -> Iterator[Lab]:
    """Return a lab of its own: nobody else announces anything there."""
    with Lab(tmp_path_factory.mktemp("lan")).up(attached=True) as lab:
        yield lab


def discover(lab: Lab, folder: Path, *arguments: str | Path, code: int = 0) -> tuple[Any, str]:
    """Run `launch discover --json` as the operator; return what it printed, and what it said."""
    command = [str(PROGRAMS / "launch"), "discover", "--json", *map(str, arguments)]
    done = lab.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr + done.stdout
    tree, _ = json.JSONDecoder().raw_decode(done.stdout)
    return tree, done.stderr


def test_hosts_that_appear_vanish_and_change_their_key(
    lab: Lab, new_host: NewHost, play: Play, tmp_path: Path
) -> None:
    first, second = new_host("bookworm", name="first"), new_host("trixie", name="second")
    config = tmp_path / "ssh_config"
    config.write_text(lab.ssh_config.read_text().partition("Host *")[2].join(("Host *", "")))
    flags = ("--ssh-config", config)
    announce = (*tagged("base_packages", "base_announce"), "--limit")
    play(*announce, "first")
    assert "_motley._tcp" in first.exec(["cat", SERVICE]).stdout
    owner = first.exec(["stat", "--format=%U %a", SERVICE]).stdout
    assert owner == "root 644\n"
    running = first.exec(["ps", "-o", "user=", "-C", "avahi-daemon"]).stdout.split()
    assert set(running) == {"avahi"}

    def names() -> list[str]:
        tree, _ = discover(lab, tmp_path, *flags, "--no-links")
        return [host["name"] for host in tree["hosts"]]

    wait_until(lambda: names() == ["first"], 120, "the first host was not found")
    file = tmp_path / "mine.yml"
    discover(lab, tmp_path, *flags, "--write", file)
    before = file.read_text()
    play(*announce, "second")
    wait_until(lambda: names() == ["first", "second"], 120, "the second was not found")
    tree, _ = discover(lab, tmp_path, *flags, "--write", file)
    (link,) = tree["links"]
    assert link["problem"] == ""
    assert min(link["forward_rate"], link["reverse_rate"]) > 0
    assert [line for line in tree["diff"][2:] if line.startswith("-")] == []
    assert file.read_text().startswith(before.partition("\n    first:")[0])
    ping = [str(PROGRAMS / "ansible"), "all", "-i", str(file), "-m", "ansible.builtin.ping"]
    assert lab.run(ping, cwd=tmp_path).stdout.count('"ping": "pong"') == 2

    written = file.read_bytes()
    fresh = "rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh"
    second.exec(["sh", "-c", fresh])
    tree, said = discover(lab, tmp_path, *flags, "--write", file, "--no-links", code=3)
    assert "host second: ITS HOST KEY HAS CHANGED" in said
    assert [host["name"] for host in tree["hosts"]] == ["first"]

    second.power_off()
    tree, said = discover(lab, tmp_path, *flags, "--write", file, "--no-links", code=3)
    assert said.startswith(f"launch: host second: {second.ip} port 22")
    assert [host["name"] for host in tree["hosts"]] == ["first"]
    assert file.read_bytes() == written
