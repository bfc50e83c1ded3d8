"""Certificates of a benchmark's members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig.cluster import COORDINATOR
from benchmarks.rig.synthetic import RUN_ID
from launcher.runs.certificates.authority import Authority, identity_of


def write_certificates(folder: Path, workers: int, names: Sequence[str]) -> None:
    """Make a CA and a folder of certificates for the coordinator and every rank."""
    authority = Authority.create()
    roles = {COORDINATOR: identity_of(RUN_ID, None)}
    roles |= {f"rank-{rank}": identity_of(RUN_ID, rank) for rank in range(workers)}
    for role, identity in roles.items():
        target = folder / role
        target.mkdir(parents=True)
        for name, content in authority.issue(identity, names).files().items():
            (target / name).write_bytes(content)
