"""A newcomer's computer: what the README asks for and no more, a fresh clone, its two commands.

The tier `newcomer` of scripts/test.sh, on Debian 12 and 13. Both commands run whole, as an ordinary
user without sudo, and leave nothing behind. `NEWCOMER="make test-fast"` runs that instead, to work
on this file, and `SUITE=trixie` one of the two. `NEWCOMER_PASSED=FILE` keeps the names of the
tests that passed on Debian 12, whose Python is the one here (tests/passed_elsewhere.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT, passed_elsewhere
from tests.project.command_blocks import CommandBlock, command_block
from tests.testbed.errors import LabError
from tests.testbed.host import Host
from tests.testbed.image import SUITES
from tests.testbed.lab import Lab
from tests.testbed.plan import Plan
from tests.testbed.processes import wait_until

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(2700)]

USER, HOME = "ops", "/home/ops"
CHECKOUT = f"{HOME}/motley"
BUNDLE = "/srv/motley.bundle"
PASSED = f"{HOME}/passed"
ENVIRONMENT = {
    "HOME": HOME,
    "USER": USER,
    "MOTLEY_STRICT_SKIPS": "1",
    passed_elsewhere.NOTE: PASSED,
    "GIT_CONFIG_COUNT": "1",  # the bundle has a commit and no branch
    "GIT_CONFIG_KEY_0": "advice.detachedHead",
    "GIT_CONFIG_VALUE_0": "false",
}
TORCH = {"trixie": {"TORCH": "cuda"}}
"""An index that has the CPU build for each Python is not at hand everywhere; PyPI has this one."""

# What of the user is left: processes, listening sockets, and files outside the home folder. A test
# session's own folder stays, empty but for links to folders that it removed.
LEFT = """
import json, os, pathlib
found = {"processes": [], "sockets": [], "files": []}
me = os.getuid()
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) != os.getpid():
        try:
            if entry.stat().st_uid == me:
                found["processes"].append((entry / "cmdline").read_text().replace(chr(0), " "))
        except OSError:
            pass
for kind in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", kind).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[7]) == me:
            found["sockets"].append(fields[1])
for top in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock"):
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            if os.lstat(path).st_uid == me and not os.path.islink(path):
                found["files"].append(path)
print(json.dumps(found))
"""


def commands(block: CommandBlock) -> list[str]:
    """Return the commands of a block without their comments."""
    return [command.partition("#")[0].strip() for command in block.commands]


@pytest.fixture(scope="module", params=SUITES)
def newcomer(
    request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    """Return a bare host with this checkout's last commit to clone."""
    bundle = tmp_path_factory.mktemp("newcomer") / "motley.bundle"
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    subprocess.run([*git, "bundle", "create", "--quiet", str(bundle), "HEAD"], check=True)
    plan = Plan(
        name="newcomer",
        ip=lab.free_addresses(1)[0],
        suite=request.param,
        bare=True,
        nspawn=[f"--bind-ro={bundle}:{BUNDLE}"],
    )
    (host,) = lab.add_hosts([plan])
    yield host
    host.remove()


def run(host: Host, command: str, folder: str) -> float:
    """Run a shell command as the user, its output shown as it comes; return the seconds it took."""
    env = ENVIRONMENT | TORCH.get(host.plan.suite, {})
    words = host.command(["env", "-C", folder, "bash", "-c", command], user=USER, env=env)
    print(f"\n==> newcomer: {command}", flush=True)
    started = time.monotonic()
    done = subprocess.run(words, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}; its output is above"
    return time.monotonic() - started


def test_the_host_is_bare(newcomer: Host) -> None:
    """Else this tier would prove nothing."""
    absent = "sudo ssh sshd rsync gcc ip tc bwrap vulkaninfo nvidia-smi pip pip3 curl"
    done = newcomer.exec(["bash", "-c", f"type -P {absent}"], user=USER, check=False)
    assert done.stdout == ""
    assert newcomer.exec(["id", "-un"], user=USER).stdout == f"{USER}\n"


def test_the_two_commands_of_the_readme(newcomer: Host) -> None:
    clone, *rest = commands(command_block("CONTRIBUTING.md", "Set up"))
    wanted = commands(command_block("README.md", "Two commands"))
    assert len(wanted) == 2
    run(newcomer, clone.replace("<this repository>", BUNDLE), HOME)
    suite = newcomer.plan.suite
    took: dict[str, float] = {}
    try:
        for command in [os.environ["NEWCOMER"]] if "NEWCOMER" in os.environ else wanted:
            took[command] = run(newcomer, command, CHECKOUT)
    finally:
        if (keep := os.environ.get("NEWCOMER_PASSED")) and suite == "bookworm":
            passed = newcomer.exec(["cat", PASSED], user=USER, check=False).stdout
            Path(keep).write_text(passed, encoding="utf-8")
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
    print(f"\n==> newcomer: {SUITES[suite]}: {times}")
    look = ["python3", "-c", LEFT]
    left: dict[str, list[str]] = {}

    def nothing() -> bool:
        left.update(json.loads(newcomer.exec(look, user=USER).stdout))
        return not any(left.values())

    with contextlib.suppress(LabError):  # what ends by itself may take a moment
        wait_until(nothing, 20, "something is left")
    assert left == {"processes": [], "sockets": [], "files": []}
    changed = newcomer.exec(["git", "-C", CHECKOUT, "status", "--porcelain"], user=USER).stdout
    assert changed == "", "the two commands changed the checkout"
    for command in rest:  # to contribute: the environment is there, the rest takes seconds
        run(newcomer, command, CHECKOUT)
