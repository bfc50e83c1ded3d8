"""The report of a run: its state and history as the page shows them, and what its files record.

What nothing records is left out, and `absent` says so.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import yaml

from launcher.errors import ConfigError, LauncherError
from launcher.hosts import ssh
from launcher.hosts.fleet import describe_pending
from launcher.runs.failures import FailureWatch
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import Run
from launcher.runs.status import RunMonitor, RunView
from launcher.terminal import note
from launcher.views.dashboard.distillation import Distillation
from launcher.views.dashboard.facts import Facts
from launcher.views.dashboard.history import History
from launcher.views.dashboard.run_files import read_card, read_hashes, read_settings, read_spent
from launcher.views.dashboard.single_file import build_single_file
from launcher.views.dashboard.state import Tree, last_checkpoint, run_tree
from launcher.views.telemetry import TelemetrySnapshot
from trainer import __version__
from trainer.system.errors import plain_reason

MOST_HISTORY = 2 << 20
"""Characters of steps and events in a report; see `History`."""
_LONGEST = 400
_MOST = 1 << 20
"""Bytes of a run.yaml that are read."""


@dataclass(frozen=True)
class Report:
    """A run at one moment."""

    run_id: str
    state: Tree
    """As `api/runs/ID` tells it, with `report`: what the page's own parts do not show."""
    records: str
    """Its history, as JSON."""
    card: str
    """README.md of the folder to publish, as the trainer wrote it; empty if there is none."""


def as_html(report: Report) -> str:
    """Return the page with a report in it."""
    path, head = f"api/runs/{report.run_id}", json.dumps(report.state)
    run = f'{head[:-1]}, "records": {report.records}}}'  # which is JSON already, and long
    return build_single_file({"home": json.dumps(f"#/run/{report.run_id}"), path: run})


def make_report(registry: Registry, run: Run, view: RunView | None = None) -> Report:
    """Ask the hosts of a run for what they have of it.

    Args:
        view: of a run that no launcher started, which its output folder describes alone.

    Raises:
        UnreachableError: its leader's host does not answer.
    """
    monitor, history, alone = RunMonitor(run), History(run, MOST_HISTORY), view is not None
    if view is None:
        view = monitor.observe(on_late=lambda known: note(describe_pending(known.late)))
    failures = [] if alone else FailureWatch(monitor).new_failures(view)
    state = run_tree(TelemetrySnapshot(view, 0.0, failures=tuple(failures)))
    absent: list[str] = []
    connection = ssh.connect_host(run.leader_host)
    try:
        history.read_on()
    except FileNotFoundError:
        absent.append("steps: none was recorded")
    checkpoint = last_checkpoint(state["status"]["training"])
    if run.plan.leader.role == "student":
        taught = Distillation(run)
        try:
            taught.read_on(checkpoint)
        except (LauncherError, OSError, ValueError) as error:
            absent.append(f"shards and scores: {plain_reason(error)}"[:_LONGEST])
        state["distillation"] = taught.build_tree(*history.position)
    _, records = history.select_lines_after(0) or (0, "[]")
    try:
        own = f"{run.plan.output}/run.yaml"
        text = connection.read(own, limit=_MOST) if alone else registry.read_config(run.run_id)
        settings = read_settings(text)
    except (ConfigError, OSError):
        settings = {}
        absent.append("settings, and the commands that repeat the run: its run.yaml is missing")
    known = Facts(
        *(run, state, json.loads(records), history.confusion is not None, settings),
        by_launcher=not alone,
    )
    hashes, saved = read_hashes(connection, checkpoint)
    spent = read_spent(registry, run.run_id)
    state["report"] = {
        "created_at": time.time(),
        "version": __version__,
        "facts": [*known.list_facts(), *saved],
        "results": known.list_results(),
        "costs": [*known.list_traffic(), *spent],
        "faults": known.list_faults(),
        "answers": known.list_answers(),
        "classes": known.list_class_names(),
        "confusion": history.confusion,
        "hashes": hashes,
        "commands": known.list_commands() if settings else [],
        "settings": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
        "missing": [*absent, *known.list_absent(hashes=bool(hashes), spent=bool(spent))],
    }
    plan = run.read_plan_of_host(run.leader_host, connection) or run.plan
    return Report(run.run_id, state, records, read_card(connection, plan.output))
