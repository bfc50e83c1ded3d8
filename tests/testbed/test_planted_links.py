"""The run user owns two folders, and root works beside it: no planted link leads root outside.

What runs in training is fenced in, but writes where the recipe looks again at its next run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.testbed.conftest import NewHost, Play
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.plays import tagged
from tests.testbed.processes import Completed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1800)]

WRITABLE = ("/var/lib/motley", "/opt/motley", "/srv/motley/logits", "/srv/motley/checkpoints")
EXPECTED = {
    "/var/lib/motley": ["inputs", "outputs", "push", "runs", "tmp", "verify.json"],
    "/opt/motley": [".current.new", ".lock", "environments", "tmp", "versions", "wheels"],
    "/srv/motley/logits": ["teacher"],
    "/srv/motley/checkpoints": ["demo"],
}
"""Names that a recipe or Motley has used in there: planted whether they exist or not."""
VICTIM, PREY = "/etc/victim", "/etc/victim/prey"
RAN = "/var/lib/motley/ran"
PYTHON = f"""#!/bin/sh
id -un >>{RAN}
exec /usr/bin/python3 "$@"
"""
PLAYS = ("base", "share", "trainer", "verify")


@pytest.fixture(scope="module")
def host(lab: Lab, play: Play) -> Iterator[Host]:
    """Return a host that the recipe has made, with a folder of root's to lead to."""
    host = lab.add_host("planted")
    run(host, play, *tagged(*PLAYS))
    host.exec(["mkdir", "--mode=0700", VICTIM])
    host.exec(["mkdir", "--parents", "/var/spool/cron"])  # where jobs of root's would be planted
    host.exec(["tee", PREY], input="root's own\n")
    yield host
    host.remove()


def run(host: Host, play: Play, *playbooks: str, fails: bool | None = False) -> Completed:
    return play(*playbooks, "--limit", host.name, fails=fails, share_mode="rsync")


def outside(host: Host) -> str:
    """Return owner, mode, size, time and target of all that is not the run user's own."""
    shown = "%p %u:%g %m %s %T@ %l\\n"
    places = ["/etc", "/root", "/usr/local", "/home", "/srv", "/opt", "/var/lib", "/var/spool/cron"]
    mine = ["-path", "*/.ansible", "-prune", "-o", "-path", "/var/lib/systemd", "-prune", "-o"]
    for folder in WRITABLE:
        mine += ["-path", f"{folder}/*", "-prune", "-o"]
    found = host.exec(["find", *places, "-xdev", *mine, "-not", "-type", "d", "-printf", shown])
    folders = host.exec(
        ["find", *places, "-xdev", *mine, "-type", "d", "-printf", "%p %u:%g %m\\n"]
    )
    return "\n".join(sorted([*found.stdout.splitlines(), *folders.stdout.splitlines()]))


def plant(host: Host, target: str) -> None:
    """As the run user, replace everything in its folders by links to `target`."""
    lines = ["set -e"]
    for folder, names in EXPECTED.items():
        there = host.exec(["ls", "-A", folder]).stdout.split()
        lines.append(f"cd {folder}")
        for name in sorted({*there, *names}):
            lines.append(f"rm -rf {name}; ln -s {target} {name}")
    host.exec(["sh", "-c", "\n".join(lines)], user="motley")


@pytest.mark.parametrize("target", ["/etc", VICTIM, PREY])
def test_no_link_leads_root_outside(host: Host, play: Play, target: str) -> None:
    plant(host, target)
    before = outside(host)
    for name in PLAYS:
        done = run(host, play, *tagged(name), fails=None)
        assert outside(host) == before, f"{name}: {done.stdout[-3000:]}"
        # It mends what it finds, or refuses in a line; a module that crashed has said neither.
        assert "MODULE FAILURE" not in done.stdout
        assert "Traceback (most recent call last)" not in done.stdout


def test_root_runs_nothing_of_the_run_users(host: Host, play: Play) -> None:
    make = f"""rm -rf /opt/motley/current /opt/motley/.lock {RAN}
mkdir -p /opt/motley/current/bin
cat >/opt/motley/current/bin/python
chmod 755 /opt/motley/current/bin/python"""
    host.exec(["sh", "-c", make], user="motley", input=PYTHON)
    for name in ("verify", "trainer", "share"):
        run(host, play, *tagged(name), fails=None)
    assert set(host.exec(["cat", RAN]).stdout.split()) == {"motley"}


def test_the_reset_removes_links_and_not_what_they_point_to(host: Host, play: Play) -> None:
    plant(host, VICTIM)
    run(host, play, "recipes/reset.yml")
    assert host.exec(["cat", PREY]).stdout == "root's own\n"
    assert host.exec(["stat", "--format=%U %a", VICTIM]).stdout == "root 700\n"


def test_the_recipe_mends_what_it_can(new_host: NewHost, play: Play) -> None:
    """A report that became a link is written again, as the run user."""
    host = new_host(name="mended")
    run(host, play, *tagged("base"))
    make = "ln -s /etc/hostname /var/lib/motley/verify.json"
    host.exec(["sh", "-c", make], user="motley")
    run(host, play, *tagged("verify"))
    kind = ["stat", "--format=%F %U %a", "/var/lib/motley/verify.json"]
    assert host.exec(kind).stdout == "regular file motley 644\n"
    assert host.exec(["cat", "/etc/hostname"]).stdout == "mended\n"
