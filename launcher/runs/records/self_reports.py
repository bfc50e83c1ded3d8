"""The reports of processes in files: the leader's status.json, a teacher's heartbeat.

A report is kept if the parts that are used have the expected types, and ignored otherwise. Values
that are not plain, such as an infinite loss, are left out of it and named under `invalid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from launcher.hosts.base import Connection
from launcher.plan.plan import LaunchPlan
from trainer.data.metrics import Figures
from trainer.system.untrusted_data import drop_odd_values, parse_json, validate_data

MOST = 4 << 20
"""Bytes that a report may have."""

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Text = Annotated[str, Field(max_length=4096)]


class _ProcessReport(BaseModel):
    """The report on one process."""

    model_config = ConfigDict(strict=True)

    state: _Text | None = None
    rank: _Count | None = None
    pid: _Count | None = None
    samples: _Count | None = None
    shards: _Count | None = None
    shards_done: _Count | None = None
    tokens_per_second: float | None = None


class _Validation(BaseModel):
    """The last validation."""

    model_config = ConfigDict(strict=True)

    loss: float | None = None
    accuracy: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None
    figures: Figures = Field(default_factory=dict[str, float])
    step: _Count | None = None


class _Report(_ProcessReport):
    run_id: _Text | None = None
    reason: _Text | None = None
    step: _Count | None = None
    total_steps: _Count | None = None
    loss: float | None = None
    unit: Literal["tokens", "samples"] = "tokens"
    exchange_ms: float | None = None
    exchange_exposed_ms: float | None = None
    codec: _Text | None = None
    inner_steps: _Count | None = None
    epoch: _Count | None = None
    learning_rate: float | None = None
    validation: _Validation | None = None
    workers: Annotated[list[_ProcessReport], Field(max_length=65536)] | None = None
    summary: Annotated[list[_Text], Field(max_length=64)] | None = None
    updated: float | None = None
    invalid: list[_Text] | None = None
    notify_failure: _Text | None = None


def read_training(
    connection: Connection, plan: LaunchPlan, since: float | None
) -> Mapping[str, Any] | None:
    """Return what the leader wrote since its present attempt began; None when nothing.

    A restarted or resumed run finds the report of its earlier attempt, which does not apply to it.
    Both times come from the leader's host, so clocks need not agree.
    """
    tree = read_report(connection, f"{plan.output}/status.json")
    if tree is None or tree.get("run_id") != plan.run_id:
        return None
    updated = tree.get("updated")
    if since is not None and updated is not None and updated < since:
        return None
    return tree


def read_report(connection: Connection, path: str) -> Mapping[str, Any] | None:
    """Return a report; None when there is none that can be used."""
    try:
        data = connection.read(path, limit=MOST)
        tree: Any = parse_json(data, path)
        if isinstance(tree, dict):
            tree = drop_odd_values(cast("dict[str, Any]", tree))
        validate_data(_Report, tree, path, lines=True)
    except (OSError, ValueError):
        return None
    return tree
