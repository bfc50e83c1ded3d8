"""Skew between hosts: other code refuses, other patch releases are said."""

import re
from dataclasses import replace

from launcher.agent.checks.finding import Result
from launcher.inventory.facts.machine import Machine
from launcher.inventory.facts.network import Network
from launcher.runs.preflight.versions import compare_versions
from tests import ROOT

HERE = Machine(
    identity="laptop",
    hostname="laptop",
    python="3.12.3",
    version="0.1.0",
    code="c" * 64,
    wheel="",
    libraries={"numpy": "2.1.0"},
    cores=8,
    network=Network(),
)
TORCH = {"numpy": "2.1.0", "torch": "2.13.0"}
INTEL = replace(HERE, identity="i", python="3.11.2", wheel="f" * 64, libraries=TORCH)
LAMBDA = replace(INTEL, identity="l")


def named(checks: list[Result], name: str) -> dict[str, Result]:
    return {check.host: check for check in checks if check.name == name}


def test_the_same_everywhere_is_well_although_the_laptop_has_another_python() -> None:
    checks = compare_versions({"intel": INTEL, "lambda": LAMBDA}, HERE, "intel")
    assert {check.status for check in checks} == {"ok"}
    assert "wheel ffffffffffff" in named(checks, "version")["intel"].detail


def test_skew_says_who_has_what_and_how_to_update() -> None:
    old = replace(LAMBDA, version="0.0.9", code="0" * 64)
    checks = compare_versions({"intel": INTEL, "lambda": old, "nas": replace(old)}, HERE, "intel")
    versions = named(checks, "version")
    assert versions["intel"].status == "ok"
    assert versions["lambda"].status == "fail"
    assert "Motley 0.0.9, code 000000000000" in versions["lambda"].detail
    assert "(like nas), but the launcher, intel: Motley 0.1.0" in versions["lambda"].detail


def test_a_patch_version_of_python_is_only_said() -> None:
    machines = {"intel": INTEL, "lambda": replace(LAMBDA, python="3.11.9")}
    python = named(compare_versions(machines, HERE, "intel"), "python")
    assert python["intel"].status == "ok"
    assert python["lambda"].status == "warn"
    assert python["lambda"].detail == "3.11.9, the coordinator has 3.11.2"


def test_another_release_of_a_library_is_reported_by_its_host() -> None:
    head = replace(INTEL, libraries={"numpy": "2.1.0"})  # coordinates only: no torch
    other = replace(LAMBDA, libraries={**TORCH, "torch": "2.12.1"})
    machines = {"lambda": LAMBDA, "intel": head, "nas": other}
    libraries = named(compare_versions(machines, HERE, "intel"), "libraries")
    assert [libraries[name].status for name in machines] == ["ok", "ok", "warn"]
    assert "torch 2.12.1 (2.13.0 on lambda)" in libraries["nas"].detail


def test_releases_that_the_locks_split_by_python_are_no_skew() -> None:
    """An update would install the same two again."""
    lock = (ROOT / "launcher" / "locks" / "trainer.txt").read_text()
    older, newer = re.findall(r"^numpy==(\S+) ; python_full_version", lock, re.MULTILINE)
    head = replace(INTEL, libraries={"numpy": older})
    other = replace(LAMBDA, python="3.13.5", libraries={"numpy": newer})
    libraries = named(
        compare_versions({"intel": head, "lambda": other}, HERE, "intel"), "libraries"
    )
    assert libraries["lambda"].status == "ok"
    stale = replace(other, libraries={"numpy": "2.1.0"})
    libraries = named(
        compare_versions({"intel": head, "lambda": stale}, HERE, "intel"), "libraries"
    )
    assert libraries["lambda"].status == "warn"
    same = replace(other, python=head.python)
    libraries = named(compare_versions({"intel": head, "lambda": same}, HERE, "intel"), "libraries")
    assert libraries["lambda"].status == "warn"
