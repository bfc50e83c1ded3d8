"""The inventories that are shipped: they load, are documented, and ranks are as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import cli
from launcher.inventory.hosts import load_inventory
from launcher.inventory.variables import VARIABLES
from tests import ROOT

REFERENCE = ROOT / "inventory/hosts.yml"
CPU_ONLY = ROOT / "inventory/cpu-only.yml"


def planned(inventory: Path, workers: int) -> list[dict[str, object]]:
    options = ["cluster", "up", "-i", str(inventory), "--expect-workers", str(workers)]
    result = CliRunner().invoke(cli, [*options, "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["processes"]


def test_the_reference_cluster_has_its_ranks() -> None:
    coordinator, *workers = planned(REFERENCE, 3)

    assert (coordinator["host"], coordinator["address"]) == ("intel", "192.168.50.20:9000")
    assert [(w["rank"], w["host"], w["backend"], w["device"]) for w in workers] == [
        (0, "intel", "wgpu", "0000:03:00.0"),
        (1, "intel", "wgpu", "0000:0b:00.0"),
        (2, "lambda", "cuda", "0000:01:00.0"),
    ]
    assert {worker["address"] for worker in workers} == {"192.168.50.20:9000"}


def test_three_machines_without_a_gpu() -> None:
    coordinator, *workers = planned(CPU_ONLY, 3)

    assert coordinator["address"] == "192.168.50.41:9000"
    assert [(w["host"], w["backend"]) for w in workers] == [
        ("head", "cpu"),
        ("second", "cpu"),
        ("third", "cpu"),
    ]


@pytest.mark.parametrize("path", [REFERENCE, CPU_ONLY], ids=lambda path: path.stem)
def test_nobody_logs_in_as_root_or_without_a_key(path: Path) -> None:
    for host in load_inventory(path):
        assert host.user not in (None, "root")
        assert host.connection == "ssh"


def test_every_variable_is_explained_in_the_reference_inventory() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    required, optional = text.index("# REQUIRED"), text.index("# OPTIONAL")
    for name in VARIABLES:
        assert f"#   {name} " in text, f"inventory/hosts.yml does not explain {name}"
    for name in ("motley_coordinator", "motley_bind_address", "share_server"):
        assert required < text.index(f"#   {name} ") < optional
