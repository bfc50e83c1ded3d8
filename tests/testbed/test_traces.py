"""A lab leaves no trace: not while it is up, not after `down`, not when its owner is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import ROOT
from tests.testbed.conftest import NewHost
from tests.testbed.lab import Lab
from tests.testbed.picture import picture
from tests.testbed.processes import command_line, everyone, run, wait_until

pytestmark = pytest.mark.testbed

TOOL = [sys.executable, "-m", "tests.testbed"]

# A machine of its own, in which nobody else starts or mounts anything between the two pictures.
# Its mounts are shared, as systemd has them: what a lab lets out is seen.
APART = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
BEFORE_AND_AFTER = """
set -e
mount --make-rshared /
mount -t sysfs sysfs /sys; mkdir -p /run; mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
"$1" -m tests.testbed.picture
"$1" -m tests.testbed --lab "$2" up one two=trixie --volume /var/lib/small=5M >&2
"$1" -m tests.testbed.picture
"$1" -m tests.testbed --lab "$2" exec one mount -t tmpfs tmpfs /mnt
"$1" -m tests.testbed --lab "$2" down
"$1" -m tests.testbed.picture
exit 0
"""


def of_folder(folder: Path) -> list[str]:
    """Return the command lines of living processes that name a folder."""
    lines = [" ".join(command_line(pid)) for pid in everyone()]
    return [line for line in lines if str(folder) in line]


def test_down_restores_the_machine(machine: None, lab_folder: Path) -> None:
    script = ["bash", "-c", BEFORE_AND_AFTER, "-", sys.executable, lab_folder]
    done = run([*APART, *script], cwd=ROOT, timeout=100)

    before, during, after = [json.loads(line) for line in done.stdout.splitlines()]

    assert any("systemd-nspawn" in line for line in during["processes"])
    # The tree of cgroups is the whole machine's: other labs may come and go in it.
    cgroups = [set(shown.pop("cgroups")) for shown in (before, during, after)]
    own = cgroups[1] - cgroups[0]
    assert own
    assert not own & cgroups[2]
    for what in ("links", "routes", "rules", "mounts", "namespaces", "loops", "settings"):
        assert during[what] == before[what], f"{what}: visible outside while the lab is up"
    assert after == before
    assert not lab_folder.exists()


def test_a_lab_shows_nothing_of_itself_outside(lab: Lab, new_host: NewHost) -> None:
    host = new_host()
    shown = picture()
    for what in ("links", "routes", "rules", "mounts", "namespaces"):
        traces = ("tb0", host.interface, str(lab.folder), "10.77.0.")
        found = [line for line in shown[what] if any(trace in line for trace in traces)]
        assert not found, what


def test_a_lab_dies_with_its_owner(machine: None, lab_folder: Path) -> None:
    owner = (
        "import signal, sys; from tests.testbed.lab import Lab\n"
        "Lab(sys.argv[1]).up(attached=True).add_host('one')\n"
        "print('up', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", owner, str(lab_folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
    wait_until(lambda: not of_folder(lab_folder), 20, "the lab lives on")

    with Lab(lab_folder).up(attached=True) as again:  # in the folder that the dead one left
        assert again.hosts == {}
    assert not lab_folder.exists()


@pytest.mark.parametrize("moment", ["lab.json", "hosts/one/root", "hosts/one/console.log"])
def test_an_interrupted_up_leaves_nothing(machine: None, lab_folder: Path, moment: str) -> None:
    # Whoever starts the tests in the background of a script has SIGINT ignored.
    command = ["env", "--default-signal=INT", *TOOL, "--lab", str(lab_folder), "up", "one"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        wait_until((lab_folder / moment).exists, 60, f"no {moment}")

        os.killpg(process.pid, signal.SIGINT)

        assert process.wait(60) == 130
        assert not lab_folder.exists()
        assert not of_folder(lab_folder)
    finally:
        Lab(lab_folder).down()


def test_two_labs_do_not_meet(lab: Lab, new_host: NewHost, lab_folder: Path) -> None:
    here = new_host(name="same")
    secret = uuid.uuid4().hex
    here.exec(["tee", "/srv/secret"], input=secret)
    with Lab(lab_folder).up(attached=True) as other:
        there = other.add_host("same", ip=here.ip)
        there.exec(["test", "!", "-e", "/srv/secret"])
        there.cut()
        assert lab.run(["ssh", here.ip, "cat /srv/secret"]).stdout == secret
    assert here.running


def test_errors_are_one_line(machine: None, lab_folder: Path) -> None:
    for words, told in (
        (["status"], "no lab is up; python -m tests.testbed up"),
        (["cut", "w1"], "no host w1; there are: none"),
        (["up", "W1"], "host 'W1': a letter, then"),
        (["up", "w1=sid"], "suite sid: there are bookworm, trixie"),
        (["up", "w1", "--disk", "much"], "size 'much'"),
    ):
        done = run([*TOOL, "--lab", lab_folder, *words], cwd=ROOT, check=False)
        assert done.returncode == 1, words
        assert done.stderr.startswith("testbed: ")
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
        assert not lab_folder.exists()
