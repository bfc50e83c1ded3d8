"""A new version on hosts: real installations, reached through this machine's own connection."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from launcher.errors import LauncherError, PartialError, PreflightError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.local import LocalConnection
from launcher.installation import install
from launcher.installation.environments import WheelFacts, read_wheel
from launcher.installation.versions import Installation
from launcher.inventory.hosts import Host
from launcher.transfer.push import Fleet, HostUpdate, installation_root, refuse_updates
from tests import ROOT
from tests.launcher.handmade import lock_of, make_wheel
from tests.launcher.installation.small import uv_lock
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,  # each installation takes seconds
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("without_checkout"),
]

Make = Callable[..., WheelFacts]


class InstalledConnection(LocalConnection):
    """This machine, with Motley as the trainer recipe installs it below `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.python = str(root / "current/bin/python")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a maker of wheels with the real launcher and nothing that it does not need here."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    twig = make_wheel(tmp_path, "twig", "1.0", {"twig.py": ""})

    def make(version: str, twigs: bool = False, broken: bool = False) -> WheelFacts:
        path = write_wheel(
            tmp_path / version,
            version,
            lock=lock_of(twig) if twigs else "",
            build="1 / 0" if broken else "",
        )
        return read_wheel(path)

    return make


@cache
def _sources() -> list[Path]:
    """Return what a host is asked by, and checked with: to compile all of it takes seconds."""
    code = (
        "import sys, launcher.installation.__main__, launcher.session.__main__\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    if name.partition('.')[0] in ('launcher', 'trainer'): print(module.__file__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(Path, done.stdout.split()) if path.is_relative_to(ROOT)]


def write_wheel(folder: Path, version: str, lock: str = "", build: str = "") -> Path:
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in _sources()}
    files |= {
        "launcher/locks/coordinator.txt": lock,
        "launcher/locks/uv.txt": uv_lock(),
        "trainer/__init__.py": "",
        "trainer/commands/finetune.py": build,
    }
    return make_wheel(folder, "motley", version, files)


@pytest.fixture(scope="module")
def first_root(tmp_path_factory: pytest.TempPathFactory, uv_wheel: Path) -> Path:
    """Return an installation of version 1.0, without packages."""
    folder = tmp_path_factory.mktemp("first")
    wheel = read_wheel(write_wheel(folder, "1.0"))
    made = Installation(folder / "opt", lambda _: None)
    with pytest.MonkeyPatch.context() as patch, made.lock():
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(uv_wheel.parent))
        made.install_wheel(wheel, wheel.make_recipe(["coordinator"], None), "unused")
    return made.root


@pytest.fixture
def hosts(tmp_path: Path, first_root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """Return two hosts with version 1.0 each."""
    result: list[Host] = []
    for name in ("lambda", "intel"):
        result.append(Host(name=name, state_folder=str(tmp_path / name / "state")))
        root = tmp_path / name / "opt"
        lock = shutil.ignore_patterns(".lock")  # of each host its own
        shutil.copytree(first_root, root, symlinks=True, ignore=lock, copy_function=os.link)

    def connect(host: Host) -> LocalConnection:
        if host.name == "away":
            raise UnreachableError("host away: no route")
        return InstalledConnection(tmp_path / host.name / "opt")

    monkeypatch.setattr(ssh, "connect_host", connect)
    return result


def name_of(wheel: WheelFacts) -> str:
    return wheel.name_installation(wheel.make_recipe(["coordinator"], None))


def installed(folder: Path) -> str:
    return (folder / "opt/current").readlink().name.split("-")[0]


@pytest.mark.long
def test_a_push_and_the_way_back(tmp_path: Path, hosts: list[Host], make: Make) -> None:
    said: list[str] = []
    fleet, wheel = Fleet(hosts, said.append), make("2.0")
    updates = fleet.plan_updates(wheel)
    assert [update.describe for update in updates] == [
        f"{host.name}: {before} -> {name_of(wheel)}"
        for host, before in zip(hosts, [update.before for update in updates], strict=True)
    ]
    assert installed(tmp_path / "lambda") == "1.0"  # only asked so far
    fleet.apply_updates(updates, wheel, force=False)
    assert [installed(tmp_path / host.name) for host in hosts] == ["2.0", "2.0"]
    assert f"intel: installing {name_of(wheel)}" in said
    again = fleet.plan_updates(wheel)
    assert [update.describe for update in again] == [
        f"{host.name}: {name_of(wheel)} is already installed" for host in hosts
    ]
    back = fleet.plan_updates(None)
    fleet.apply_updates(back, None, force=False)
    assert [installed(tmp_path / host.name) for host in hosts] == ["1.0", "1.0"]
    third = make("3.0")
    fleet.plan_updates(third)
    pushed = tmp_path / "lambda/state/push"
    assert [path.name for path in pushed.rglob("*.whl")] == [third.path.name]  # only the latest


def test_no_way_back(hosts: list[Host]) -> None:
    with pytest.raises(PreflightError, match="no previous version"):
        Fleet(hosts, lambda _: None).plan_updates(None)


def test_one_host_that_is_away_keeps_all_as_they_are(hosts: list[Host], make: Make) -> None:
    fleet = Fleet([*hosts, Host(name="away")], lambda _: None)
    with pytest.raises(UnreachableError, match="host away"):
        fleet.plan_updates(make("2.0"))


def test_a_run_that_is_up(tmp_path: Path, hosts: list[Host], make: Make) -> None:
    python = tmp_path / "intel/opt/current/bin/python"
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [python, "-c", code, "launcher.session"], stdin=pipe, stdout=pipe
    ) as supervisor:
        assert supervisor.stdout
        supervisor.stdout.readline()
        fleet, wheel = Fleet(hosts, lambda _: None), make("2.0")
        updates = fleet.plan_updates(wheel)
        with pytest.raises(PreflightError, match="a run is active on intel;") as refusal:
            refuse_updates(updates, quick=False, force=False)
        assert f"intel: pid {supervisor.pid}" in refusal.value.details[0]
        # Whoever comes in between is seen by the host itself.
        with pytest.raises(PartialError, match="1 of 2 hosts were not updated: intel") as failure:
            fleet.apply_updates(updates, wheel, force=False)
        assert any("a run uses it" in line for line in failure.value.details)
        assert installed(tmp_path / "lambda") == "2.0"
        refuse_updates(updates, quick=False, force=True)
        fleet.apply_updates(fleet.plan_updates(wheel), wheel, force=True)
        assert installed(tmp_path / "intel") == "2.0"
        supervisor.communicate()
    wait_for(lambda: supervisor.returncode is not None, "the supervisor to leave")


def test_new_dependencies(tmp_path: Path, hosts: list[Host], make: Make) -> None:
    fleet, wheel = Fleet(hosts[:1], lambda _: None), make("2.0", twigs=True)
    updates = fleet.plan_updates(wheel)
    assert updates[0].needs_download
    with pytest.raises(PreflightError, match="dependencies changed: lambda"):
        refuse_updates(updates, quick=True, force=False)
    refuse_updates(updates, quick=False, force=False)
    fleet.apply_updates(updates, wheel, force=False)
    assert installed(tmp_path / "lambda") == "2.0"


def test_a_version_that_does_not_start(tmp_path: Path, hosts: list[Host], make: Make) -> None:
    fleet, wheel = Fleet(hosts, lambda _: None), make("2.0", broken=True)
    with pytest.raises(PartialError, match="2 of 2 hosts were not updated") as failure:
        fleet.apply_updates(fleet.plan_updates(wheel), wheel, force=False)
    assert any("ZeroDivisionError" in line for line in failure.value.details)
    assert installed(tmp_path / "lambda") == "1.0"


def test_an_installation_that_is_killed(
    tmp_path: Path, hosts: list[Host], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = json.dumps({"schema": install.BEGUN_SCHEMA, "pid": 2**22, "start": 1, "boot": "x"})

    def spawn(_self: LocalConnection, _argv: object, _env: object, log: str) -> None:
        Path(log).write_text(f"{begun}\ninstallation: installing 2.0\n")

    fleet, wheel = Fleet(hosts[:1], lambda _: None), make("2.0")
    monkeypatch.setattr(LocalConnection, "spawn_process", spawn)
    with pytest.raises(LauncherError, match=r"ended without a result \(last: installing 2.0\)"):
        fleet.plan_updates(wheel)


def test_hosts_that_run_a_checkout_are_left_out() -> None:
    said: list[str] = []
    with pytest.raises(LauncherError, match="no host has Motley installed"):
        Fleet([Host(name="here", connection="local")], said.append).skip_checkouts()
    assert said[0].startswith("here skipped: ")


@pytest.mark.parametrize(
    ("python", "root"),
    [
        ("/opt/motley/current/bin/python", "/opt/motley"),
        ("/srv/a b/current/bin/python", "/srv/a b"),
        ("/usr/bin/python3", None),
        ("/home/ops/motley/.venv/bin/python", None),
    ],
)
def test_where_an_installation_lies(python: str, root: str | None) -> None:
    assert installation_root(python) == root


def test_a_line_for_people() -> None:
    steps = ("download packages", "install 2", "switch from 1")
    assert HostUpdate("a", "1", "2", steps, ()).describe == "a: 1 -> 2, with new packages"
    assert HostUpdate("a", None, "2", (), ()).describe == "a: nothing -> 2"
