"""Derive the settings of a run from its model and data, which the coordinator's host has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import cast

from launcher.agent.checks.job import own_settings
from launcher.hosts.survey import Survey
from launcher.plan.plan import LaunchPlan
from trainer.config.run import RunConfig
from trainer.planning.defaults import DERIVED_KEYS, format_table
from trainer.planning.devices import MAIN_MEMORY
from trainer.planning.workers import Room
from trainer.system.backends import BACKENDS, Backend


def derive_data_settings(
    config: RunConfig, given: Collection[str], plan: LaunchPlan, found: Survey
) -> tuple[RunConfig, list[str]]:
    """Return the config with settings derived from its data and model, and lines that list them.

    Unreadable files give no settings: the checks of the start report the error.

    Args:
        given: the settings to keep.

    Raises:
        PreflightError: the coordinator's host does not know the question.
        UnreachableError: it does not answer.
        ConfigError: the derived settings are invalid, such as 4,000 classes.
    """
    head = plan.leader.host
    settings = config.model_dump(mode="json", exclude_unset=True)
    answer = found.connections[head].ask(
        own_settings, settings, sorted(given), _worker_memory(plan)
    )
    derived = [part for part in answer if part.key in DERIVED_KEYS - set(given)]
    completed = config.with_settings({part.key: part.value for part in derived})
    return completed, format_table(derived, completed.output)


def _worker_memory(plan: LaunchPlan) -> list[Room]:
    """Return the memory of each worker, if known."""
    on_cpu = [process for process in plan.processes if process.backend == "cpu"]
    processes = Counter(p.host for p in on_cpu for _ in range(max(1, len(p.members))))
    rooms: list[Room] = []
    for worker in plan.workers:
        host = plan.get_host(worker.host)
        backend = cast("Backend", worker.backend)
        if not BACKENDS[backend].is_gpu:
            memory = host.memory and int(host.memory * MAIN_MEMORY) // processes[host.name]
        else:
            memory = plan.device_memory(worker)
        if memory:
            rooms.append(Room(memory, backend))
    return rooms
