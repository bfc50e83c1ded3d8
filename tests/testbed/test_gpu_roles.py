"""Roles nvidia, vulkan and verify on real hosts, which have no card: what that can prove.

No driver is installed by these tests: docs/provisioning-gpu.md says what was tried by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.plays import changed, changing_tasks, tagged
from tests.testbed.processes import Completed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]

NOTHING = {"twelve": 0, "thirteen": 0}

Play = Callable[..., Completed]


@pytest.fixture(scope="module")
def hosts(lab: Lab) -> Iterator[dict[str, Host]]:
    """Return a Debian 12 host, which coordinates, and a Debian 13 host."""
    made = {
        "twelve": lab.add_host("twelve", "bookworm"),
        "thirteen": lab.add_host("thirteen", "trixie"),
    }
    yield made
    for host in made.values():
        host.remove()


@pytest.fixture(scope="module")
def play(lab: Lab, hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a caller of playbooks on both hosts; role base has run."""
    folder = tmp_path_factory.mktemp("gpu-roles")

    def call(*arguments: str, fails: bool = False, **extra: object) -> Completed:
        variables = {"vulkan_allow_software": True, "verify_summary": str(folder / "all.json")}
        variables |= {"share_mode": "rsync"}  # role share refuses no server, whatever the tags
        inventory = lab.write_inventory(
            folder / "hosts.yml",
            {**variables, **extra},
            {"twelve": {"motley_coordinator": True}},
            hosts=hosts.values(),
        )
        program = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory)]
        done = lab.run([*program, *arguments], cwd=ROOT, timeout=500, check=False)
        assert (done.returncode != 0) == fails, done.stdout[-6000:] + done.stderr[-2000:]
        return done

    call(*tagged("base"))
    return call


def test_without_a_card_the_nvidia_role_says_so_and_does_nothing(play: Play) -> None:
    first = play(*tagged("nvidia"))
    assert "twelve: no NVIDIA card on the PCI bus, role nvidia is skipped" in first.stdout
    assert "thirteen: no NVIDIA card" in first.stdout
    assert changed(play(*tagged("nvidia"))) == NOTHING


def test_software_vulkan_converges_and_is_asked_as_the_run_user(
    play: Play, hosts: dict[str, Host]
) -> None:
    refused = play(*tagged("vulkan"), vulkan_allow_software=False)
    assert "role vulkan is skipped" in refused.stdout
    assert all(changed(play(*tagged("vulkan"), "--check", "--diff")).values())
    assert all(changed(play(*tagged("vulkan"))).values())
    again = play(*tagged("vulkan"))
    assert changed(again) == NOTHING, changing_tasks(again)
    assert again.stdout.count("software") >= 2
    assert "as motley:" in again.stdout
    assert changed(play(*tagged("vulkan"), "--check", "--diff")) == NOTHING
    for host in hosts.values():
        assert {"render", "video"} <= set(host.exec(["id", "-nG", "motley"]).stdout.split())


def test_verify_prints_one_table_and_writes_reports(
    play: Play, hosts: dict[str, Host], tmp_path: Path
) -> None:
    for host in hosts.values():
        host.exec(["install", "-d", "-o", "motley", "/srv/motley", "/srv/motley/checkpoints"])
    summary = tmp_path / "reports.json"
    first = play(*tagged("verify"), verify_summary=str(summary))
    assert re.search(r"^ +host +system +python +motley +devices", first.stdout, re.MULTILINE)

    again = play(*tagged("verify"), verify_summary=str(summary))
    assert changed(again) == NOTHING, changing_tasks(again)
    reports = {report["host"]: report for report in json.loads(summary.read_text())}
    assert list(reports) == ["twelve", "thirteen"]
    for name, report in reports.items():
        assert report["schema"] == "motley.verify/1"
        assert report["share"]["status"] in ("ok", "warn")
        assert "a durable file in" in report["share"]["detail"]
        assert [adapter["driver"] for adapter in report["usable_vulkan"]] == ["llvmpipe"]
        assert abs(report["clock"]["offset_s"]) <= report["clock"]["uncertainty_s"] + 0.05
        own = hosts[name].exec(["cat", "/var/lib/motley/verify.json"]).stdout
        assert json.loads(own) == report
    assert reports["twelve"]["link"] == {"note": "coordinator"}
    assert reports["thirteen"]["link"]["to_mbit_s"] > 0
    assert reports["thirteen"]["link"]["from_mbit_s"] > 0
    # The port was open for the measurement alone.
    assert ":9000" not in hosts["twelve"].exec(["ss", "-ltnH"]).stdout
