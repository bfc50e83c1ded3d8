"""Fixtures of the test bed: a lab for the whole session, and hosts that boot in a second.

Tests that need hosts live in this folder and carry `pytest.mark.testbed`; they run in one process.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.errors import LabError
from tests.testbed.host import Host
from tests.testbed.image import SUITES, image
from tests.testbed.lab import Lab
from tests.testbed.processes import Completed
from tests.testbed.requirements import complaint
from tests.testbed.training import RECIPE, ROOT, Cluster

NewHost = Callable[..., Host]
Play = Callable[..., Completed]
COORDINATES = {"motley_coordinator": True}
Report = Generator[None, pytest.TestReport, pytest.TestReport]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the images that are not there yet before any test's time begins to run."""
    wanted = any(item.get_closest_marker("testbed") for item in session.items)
    if wanted and not session.config.option.collectonly and complaint() is None:
        for suite in SUITES:
            try:
                image(suite)
            except LabError as error:
                pytest.exit(f"no image of {SUITES[suite]}: {error}", pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Report:
    """Show what the hosts of the session's lab have logged last beside a failure."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.failed and call.when == "call" and isinstance(lab, Lab):
        for name, host in lab.hosts.items():
            if host.running:
                journal = ["journalctl", "--boot", "--no-pager", "--lines=20", "--priority=notice"]
                shown = host.exec(journal, check=False).stdout
                report.sections.append((f"journal of {name}", shown))
    return report


@pytest.fixture(scope="session")
def machine() -> None:
    """Skip where no lab can be made; a missing program is no accepted reason in CI."""
    if reason := complaint():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, machine: None) -> Iterator[Lab]:
    """Return an up lab for the session; it dies with pytest, however that ends."""
    with Lab(tmp_path_factory.mktemp("lab")).up(attached=True) as lab:
        yield lab


@pytest.fixture(scope="session")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return three hosts that the recipe has made from bare ones, with a model and data on them."""
    cluster = Cluster(lab, tmp_path_factory.mktemp("cluster"))
    cluster.operator.play(RECIPE)
    cluster.push_inputs()
    yield cluster
    cluster.close()


@pytest.fixture
def new_host(lab: Lab) -> Iterator[NewHost]:
    """Return a maker of booted hosts for one test: `new_host("trixie", disk="600M")`."""
    made: list[Host] = []
    numbers = itertools.count(1)

    def make(suite: str = "bookworm", name: str | None = None, **options: Any) -> Host:
        host = lab.add_host(name or f"h{next(numbers)}", suite, **options)
        made.append(host)
        return host

    yield make
    for host in made:
        host.remove()


@pytest.fixture
def lab_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder for a lab of the test's own."""
    return tmp_path / re.sub(r"\W", "-", request.node.name)[:20]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that git has or would take, which nobody edits meanwhile."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    copy = tmp_path_factory.mktemp("checkout")
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(files, cwd=ROOT, capture_output=True, check=True)
    archive = ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read"]
    packed = subprocess.run(archive, cwd=ROOT, input=listing.stdout, capture_output=True)
    subprocess.run(["tar", "--extract"], cwd=copy, input=packed.stdout, check=True)
    return copy


@pytest.fixture(scope="module")
def play(lab: Lab, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a caller of ansible-playbook on all hosts of the lab, the first one coordinates."""

    def call(
        *arguments: str,
        fails: bool | None = False,
        env: dict[str, str] | None = None,
        **extra: object,
    ) -> Completed:
        # `fails`: whether it must fail; None when either will do.
        first = next(iter(lab.hosts))
        variables: dict[str, object] = {"share_server": first, "trainer_extras": "coordinator"}
        inventory = lab.write_inventory(
            tmp_path_factory.mktemp("inventory") / "hosts.yml",
            {**variables, **extra},
            {first: COORDINATES},
        )
        program = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory)]
        done = lab.run([*program, *arguments], cwd=checkout, env=env, timeout=1200, check=False)
        assert fails is None or (done.returncode != 0) == fails, (
            done.stdout[-6000:] + done.stderr[-2000:]
        )
        return done

    return call
