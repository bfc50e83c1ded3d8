"""A host and a setting that plans are made for, and what a plan's command says."""

from __future__ import annotations

from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.plan_context import PlanContext

SETTING = PlanContext(
    run_id="quickstart-20261120-110300-7f3a",
    trainer_command=("/venv/bin/trainer",),
    state_folder="/state",
    routes={},
)
LOCAL = Host(
    name="localhost",
    connection="local",
    coordinator=True,
    bind_address="127.0.0.1",
    devices=(Device("cpu", "cpu"),),
    fill_with_cpu=True,
    cores=8,
)


def flag(argv: tuple[str, ...], name: str) -> str:
    """Return the word behind an option."""
    return argv[argv.index(name) + 1]
