"""Files of a run besides its metrics: settings, hashes, model card, spending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field

from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.runs.budget.spending import SpendTotal, read_spend, sum_spend
from launcher.runs.records.registry import Registry
from trainer.planning.cost import money_text
from trainer.system.errors import plain_reason
from trainer.system.untrusted_data import validate_json
from trainer.system.yaml_tree import parse_yaml

Row = tuple[str, str]
"""A name, and what is known of it."""
_MOST = 1 << 20
"""Bytes of a file that are read."""
_LONGEST = 400
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")

_Text = Annotated[str, Field(max_length=_LONGEST)]
_Kind = TypeVar("_Kind", bound=BaseModel)


class _Checkpoint(BaseModel):
    """`run.json` of a checkpoint."""

    model_config = ConfigDict(extra="ignore")

    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    data_digest: _Text | None = None
    model_digest: _Text | None = None
    base_digest: _Text | None = None


class _File(BaseModel):
    blake3: _Text


class _Manifest(BaseModel):
    files: Annotated[dict[str, _File], Field(max_length=4096)]


def read_settings(text: bytes) -> dict[str, Any]:
    """Return a run's settings; none if they are damaged."""
    try:
        tree: Any = parse_yaml(text)
    except yaml.YAMLError:
        tree = None
    return cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}


def read_hashes(connection: Connection, checkpoint: str) -> tuple[list[Row], list[Row]]:
    """Return the hashes that the best checkpoint records, and which one that is."""
    if not checkpoint:
        return [], []
    store = PurePosixPath(checkpoint).parent
    for name in ("best", "best-evaluated", PurePosixPath(checkpoint).name):
        folder = store / name
        try:
            run = _read_json(connection, _Checkpoint, folder / "run.json")
            files = _read_json(connection, _Manifest, folder / "manifest.json").files
        except (OSError, ValueError):
            continue
        weights = next((files[each].blake3 for each in _WEIGHTS if each in files), None)
        found = {
            "model (files)": run.model_digest,
            "model (weights)": run.base_digest,
            "training data": run.data_digest,
            "trained weights": weights,
        }
        where = f"{folder} (step {run.step:,})"
        return [(what, f"{it}") for what, it in found.items() if it], [("checkpoint", where)]
    return [], []


def _read_json(connection: Connection, kind: type[_Kind], path: PurePosixPath) -> _Kind:
    return validate_json(kind, connection.read(str(path), limit=_MOST), str(path), lines=True)


def read_card(connection: Connection, output: str) -> str:
    """Return the model card in the folder to publish; empty if there is none."""
    for name in ("adapter", "model"):
        try:
            data = connection.read(f"{output}/{name}/README.md", limit=_MOST)
        except OSError:
            continue
        return data.decode(errors="replace")
    return ""


def read_spent(registry: Registry, run_id: str) -> list[Row]:
    """Return energy and cost, a line for each currency; none if no ledger has the run."""
    remarks: list[str] = []
    try:
        records = [r for r in read_spend(registry, remarks.append) if r.run_id == run_id]
    except LauncherError as error:
        return [("energy and cost", f"unknown: {plain_reason(error)}"[:_LONGEST])]
    return [*_amount_rows(sum_spend(records, "run")), *(("not counted", line) for line in remarks)]


def _amount_rows(found: Sequence[SpendTotal]) -> Iterator[Row]:
    for total in found:
        if total.kwh:
            yield (
                "energy",
                f"{total.kwh:.3f} kWh, {total.measured_fraction:.0%} of the time measured",
            )
        yield "cost", f"{money_text(total.cost)} {total.currency or ''}".strip()
