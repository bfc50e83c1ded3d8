"""What the role firewall asks nft and ufw for, a range of ports too; real ones: tests/testbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "playbooks/roles/firewall/files/motley-firewall"
RING = {"ports": ["32768-60999"], "to": "10.0.0.3", "from": ["10.0.0.3", "10.0.0.4"]}
CHAIN = {"family": "inet", "table": "filter", "name": "input", "handle": 1}
RULES = [{"chain": {**CHAIN, "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}}]
ACTIVE = {
    "nftables": {"systemctl": "echo active", "nft": f"echo '{json.dumps({'nftables': RULES})}'"},
    "ufw": {"systemctl": "echo inactive", "ufw": "[ $1 != status ] || echo Status: active"},
}
"""By the firewall that is active, what each program says."""


def check(folder: Path, firewall: str, settings: object) -> list[str]:
    """Return the rules that the real script misses, with programs that only say what is there."""
    for program, body in ACTIVE[firewall].items():
        path = folder / program
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    # Its own PATH is root's; `find` looks there by absolute names.
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count('"/usr/sbin", "/usr/bin", "/sbin"') == 1
    script = folder / "script"
    script.write_text(text.replace('"/usr/sbin", "/usr/bin", "/sbin"', f'"{folder}",'))
    done = subprocess.run(
        [sys.executable, "-I", str(script), "check", "ring", json.dumps(settings)],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["firewall"] == firewall
    return found["rules"]


def test_nftables_opens_a_range_to_the_cluster_alone(tmp_path: Path) -> None:
    (rule,) = check(tmp_path, "nftables", RING)
    assert rule.startswith(
        "insert rule inet filter input ip saddr { 10.0.0.3, 10.0.0.4 } ip daddr 10.0.0.3"
        ' tcp dport { 32768-60999 } accept comment "motley: ring '
    )


def test_ufw_opens_a_range_to_the_cluster_alone(tmp_path: Path) -> None:
    assert check(tmp_path, "ufw", RING) == [
        f"ufw allow proto tcp from {peer} to 10.0.0.3 port 32768:60999 comment motley: ring"
        for peer in RING["from"]
    ]


@pytest.mark.parametrize("firewall", ACTIVE)
def test_without_peers_nothing_is_opened(tmp_path: Path, firewall: str) -> None:
    assert check(tmp_path, firewall, {**RING, "from": []}) == []
